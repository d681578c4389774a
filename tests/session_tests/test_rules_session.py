"""Training under rules: the same bits, with plans that obey and without a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import networks

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

import chainer_hybridmem as hybridmem
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.training.execution.evictor import Evictor
from chainer_hybridmem.training.execution.live_map import LiveMap

ITERATIONS = 8
ENCODED, DECODED = 64, 48  # floats: the sizes tell whose maps leave
BATCH = 1024
RULES = {
    'encoder/0/*': 'keep',
    '/encoder/*': 'no recompute',
    'decoder/1': 'swap',
    'decoder/*': 'at most 400kB',
    'unused': 'keep',
}


class Layer(chainer.Chain):
    def __init__(self, entries: int, units: int) -> None:
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(entries, units)

    def forward(self, x: Any) -> Any:
        return F.sigmoid(F.tanh(self.linear(x)))


class Coder(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            sizes = [(32, ENCODED), *[(ENCODED, ENCODED)] * 3]
            self.encoder = chainer.ChainList(*[Layer(*s) for s in sizes])
            sizes = [(ENCODED, DECODED), *[(DECODED, DECODED)] * 3]
            self.decoder = chainer.ChainList(*[Layer(*s) for s in sizes])
            self.unused = L.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        for layer in (*self.encoder, *self.decoder):
            x = layer(x)
        return F.average(x**2)


@pytest.fixture(scope='module')
def data() -> list[tuple[Any]]:
    rng = np.random.RandomState(1)
    return [(rng.rand(BATCH, 32).astype(np.float32),) for _ in range(ITERATIONS)]


@pytest.fixture(scope='module')
def limit(data: list[tuple[Any]]) -> int:
    _, session = networks.train(
        Coder, data[:4], memory_limit='1GB', planner='in-core', arena=False
    )
    return int(session.statistics()['in_core_peak_bytes'] * 0.7)


def actions(session: Any) -> list[tuple[str, Action, int]]:
    storages = session.profile.storages
    return [
        (storages[m.storage].label, m.action, storages[m.storage].nbytes)
        for m in session.plan.maps
    ]


@pytest.mark.parametrize('planner', ['hybrid', 'pooch', 'capuchin', 'swap-all'])
def test_the_same_bits_under_rules(planner, data, limit, hostile):
    expected = networks.plain(Coder, data)
    result, session = networks.train(
        Coder, data, memory_limit=limit, planner=planner, rules=RULES
    )
    networks.assert_same(expected, result)
    figures = session.statistics()
    assert figures['state'] == 'guided' and figures['peak_bytes'] <= limit
    made = actions(session)
    assert {a for label, a, _ in made if '/encoder/0/' in label} == {Action.KEEP}
    assert {a for label, a, _ in made if '/decoder/1/' in label} == {Action.SWAP}
    encoded = [a for label, a, _ in made if '/encoder/' in label]
    assert encoded and Action.RECOMPUTE not in encoded
    kept = [n for label, a, n in made if '/decoder/' in label and a is Action.KEEP]
    assert sum(kept) <= 400_000
    known = {pattern: says for pattern, says in RULES.items() if pattern != 'unused'}
    assert session.plan.rules == tuple(known.items())
    check_plan(session.profile, session.plan, limit)
    report = session.report()
    for pattern, says in known.items():
        assert f'rule {pattern}: {says}' in report
    assert '; costs ' in report


@pytest.mark.parametrize(
    ('pattern', 'nearest'),
    [
        ('encodr/*', 'encoder'),
        ('Tanhh', 'Tanh'),
        ('encoder/0/Sigmoidal', 'Sigmoid'),
        ('/decoder/9', 'decoder/3'),
    ],
)
def test_a_slip_in_a_name_is_refused_before_training(pattern, nearest):
    with pytest.raises(hybridmem.OptionError, match=rf'Nearest names:.*{nearest}'):
        hybridmem.optimize(Coder(), '1GB', rules={pattern: 'keep'})


@pytest.mark.parametrize(
    'pattern',
    ['encoder/0', '/encoder/0/linear', '*code*', 'Tanh', '/Sigmoid@5', 'LSTM',
     'decoder/*/LinearFunction', '*r/1*Function', 'encoder/0/Tanh', 'MadeLater'],
)  # fmt: skip
def test_a_name_that_may_be_meant_is_taken(pattern):
    hybridmem.optimize(Coder(), '1GB', rules={pattern: 'keep'})


def test_a_name_that_nothing_resembles_is_an_error_when_the_plan_is_made(data, limit):
    """It might have been a function that the program makes later."""
    done = []
    with pytest.raises(hybridmem.OptionError, match='Nearest names|Some names'):
        networks.train(
            Coder,
            data,
            after=lambda session, i: done.append(i),
            memory_limit=limit,
            rules={'MadeLater': 'keep'},
        )
    assert done  # it has trained up to there


def test_a_rule_that_is_none_is_an_error_at_once():
    with pytest.raises(hybridmem.OptionError, match=r"Did you mean 'keep'\?"):
        hybridmem.optimize(Coder(), '1GB', rules={'*': 'kep'})


def test_rules_that_move_maps_make_a_plan_where_everything_fits(data):
    for says, planned in (('swap', True), ('at most 0', True), ('keep', False)):
        _, session = networks.train(
            Coder, data[:6], memory_limit='1GB', planner=None, rules={'decoder/*': says}
        )
        assert (session.plan is not None) == planned
        if planned:
            moved = [a for label, a, _ in actions(session) if '/decoder/' in label]
            assert moved and Action.KEEP not in moved


def test_a_planner_that_cannot_obey_is_refused(data, limit):
    with pytest.raises(hybridmem.OptionError, match="'dtr' cannot obey the rules"):
        networks.train(
            Coder, data, memory_limit=limit, planner='dtr', rules={'decoder/1': 'swap'}
        )


@pytest.mark.parametrize('rules', [None, {'encoder/*': 'keep'}, {'*coder*': 'no swap'}])
def test_without_a_plan_kept_maps_leave_last(rules, data, limit, monkeypatch):
    left: list[int] = []
    evict = Evictor.evict

    def watched(self: Evictor, live: LiveMap) -> None:
        left.append(live.nbytes)
        evict(self, live)

    monkeypatch.setattr(Evictor, 'evict', watched)
    result, _ = networks.train(
        Coder, data[:1], memory_limit=limit, planner=None, rules=rules
    )
    networks.assert_same(networks.train(Coder, data[:1])[0], result)
    encoded, decoded = ENCODED * BATCH * 4, DECODED * BATCH * 4
    assert left
    if rules == {'encoder/*': 'keep'}:
        assert left[0] == decoded
    else:
        assert left[0] == encoded


def test_kept_plans_are_those_of_the_same_rules(data, limit, tmp_path):
    def train(rules: Any) -> Any:
        return networks.train(
            Coder, data[:5], memory_limit=limit, rules=rules, cache_dir=str(tmp_path)
        )[1]

    first = train(RULES)
    assert first.plan is not None
    again = train(RULES)
    assert again.statistics()['cached'] == 1
    assert again.plan.rules == first.plan.rules != ()
    assert train(None).statistics()['cached'] == 0


def test_a_link_that_raises_leaves_no_name_behind(data, limit):
    """Rules are about what runs in a link, not after it."""

    found = []
    kept = []  # errors, with their frames
    for raises in ('', 'and is dropped', 'and is kept'):
        model = Coder()
        optimizer = chainer.optimizers.SGD(0.01).setup(model)
        rules = {'encoder/1/*': 'keep'}
        with hybridmem.optimize(model, limit, 'swap-all', rules=rules) as session:
            if raises:
                with pytest.raises(chainer.utils.type_check.InvalidType) as caught:
                    model.encoder[1](np.zeros((2, 3), np.float32))
                if raises == 'and is kept':
                    kept.append(caught.value)
                del caught
            for (x,) in data:
                loss = F.average(F.tanh(F.sigmoid(F.tanh(model.encoder[0](x)))))
                model.cleargrads()
                loss.backward()
                optimizer.update()
            found.append(actions(session))
    assert found[0] == found[1] == found[2]


class Halfway(Coder):
    def forward(self, x: Any, whole: bool = True) -> Any:
        if whole:
            return super().forward(x)
        for layer in self.encoder:
            x = F.tanh(layer.linear(x))
        return F.average(x**2)


def test_an_iteration_obeys_the_rules_about_what_it_runs(data):
    """Others are about layers, or functions, of other iterations."""
    rules = {'decoder/*': 'at most 0', 'Sigmoid': 'no recompute', 'encoder/*': 'swap'}
    batches = [(x, whole) for whole in (True, False) for (x,) in data[:5]]
    plans = []
    result, _ = networks.train(
        Halfway,
        batches,
        after=lambda session, i: plans.append(session.plan),
        memory_limit='1GB',
        rules=rules,
    )
    networks.assert_same(networks.train(Halfway, batches)[0], result)
    assert plans[4].rules == tuple(rules.items())
    assert plans[-1].rules == (('encoder/*', 'swap'),)
