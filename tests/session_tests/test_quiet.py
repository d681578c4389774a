"""Where nothing has to leave, nothing is recorded; what has to, is learnt."""

from __future__ import annotations

import threading
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OutOfMemoryError, SessionError
from chainer_hybridmem.training.execution import ledger
from chainer_hybridmem.training.recording import Recorder
from chainer_hybridmem.training.session import report as report_module
from chainer_hybridmem.training.session.guides.guide import Guide
from chainer_hybridmem.training.session.guides.guidebook import GuideBook
from chainer_hybridmem.training.session.iterations import (
    iteration_history,
    loop,
)

ROOMY = '1GB'
TIGHT = 3_800_000  # bytes; Everything needs 5.2 MB in-core
DATA = networks.batches(8)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that is recorded."""
    made: list[Any] = []

    class Counted(Recorder):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(
        'chainer_hybridmem.training.session.setting.measuring_instruments.Recorder',
        Counted,
    )
    return made


def train(make: Any = networks.Everything, data: Any = DATA, **options: Any) -> Any:
    return networks.train(make, data, **{'planner': None, **options})


# -- nothing has to leave ------------------------------------------------------
def test_nothing_is_recorded_where_everything_fits(recordings):
    expected = networks.plain(networks.Everything, DATA)
    result, session = train(memory_limit=ROOMY)
    networks.assert_same(expected, result)
    figures = session.statistics()
    assert not recordings and session.plan is None
    assert session.state == figures['state'] == 'in-core'
    assert figures['iterations'] == len(DATA) and figures['deviations'] == 0
    assert figures['peak_bytes'] > TIGHT and figures['fits']


def test_the_report_says_that_everything_fits():
    _, session = train(memory_limit=ROOMY)
    report = session.report()
    assert 'everything fits below the limit, and nothing is planned' in report
    assert 'unknown' not in report and 'waits for' not in report


def test_who_waits_until_it_has_settled_comes_to_an_end():
    settled = []
    train(memory_limit=ROOMY, after=lambda s, i: settled.append(s.settled))
    # An iteration ends when the next one begins.
    assert settled == [False] * 3 + [True] * 5


def test_no_plan_is_explained():
    def after(session, i):
        if i == 3:
            for ask in (lambda: session.replan('swap-all'), session.retime):
                with pytest.raises(SessionError, match="planner='hybrid'"):
                    ask()

    train(memory_limit=ROOMY, after=after)


def test_who_names_a_planner_gets_a_plan(recordings):
    _, session = train(memory_limit=ROOMY, planner='hybrid')
    assert len(recordings) == 3 and session.plan.planner == 'hybrid'
    assert not session.statistics()['fits']


def test_a_trace_is_made_of_what_fits(recordings):
    def after(session, i):
        if i == 1:
            session.trace_iteration()

    _, session = train(memory_limit=ROOMY, after=after)
    assert recordings and session.timeline is not None


def test_states_that_may_leave_are_planned(recordings):
    _, session = train(memory_limit=ROOMY, cross_iteration='states')
    assert recordings and session.plan is not None


def test_a_backward_in_another_thread_is_refused():
    model = networks.Everything()
    errors: list[BaseException] = []

    def backward(loss: Any) -> None:
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    with hybridmem.optimize(model, ROOMY) as session:
        networks.iterate(model, chainer.optimizers.SGD().setup(model), *DATA[0])
        loss = model(*DATA[0])
        assert session._loop.iteration.quiet
        thread = threading.Thread(target=backward, args=(loss,))
        thread.start()
        thread.join()
        assert 'another' not in str(errors) and len(errors) == 1
        assert isinstance(errors[0], SessionError)
        loss.backward()


def test_hooks_note_and_nothing_else(monkeypatch):
    """What costs most in other iterations is not called at all."""

    def never(*arguments: Any) -> Any:
        raise AssertionError('called in an iteration in which nothing had to leave')

    model = networks.Everything()
    optimizer = chainer.optimizers.SGD().setup(model)
    with hybridmem.optimize(model, ROOMY) as session:
        networks.iterate(model, optimizer, *DATA[0])
        for name in ('complete', 'before_forward', 'before_backward', 'after_backward'):
            monkeypatch.setattr(session._runtime.executor, name, never)
        monkeypatch.setattr(loop.graph, 'find_slots', never)
        keys = []
        key_of = loop.make_forward_key
        monkeypatch.setattr(
            loop, 'make_forward_key', lambda *a: keys.append(a) or key_of(*a)
        )
        for batch in DATA[1:4]:
            networks.iterate(model, optimizer, *batch)
    assert len(keys) == 3  # the first function of each


# -- memory is short -----------------------------------------------------------
def test_it_is_learnt_once_memory_has_been_short(recordings):
    expected = networks.plain(networks.Everything, DATA)
    result, session = train(memory_limit=TIGHT)
    networks.assert_same(expected, result)
    guided = [bool(entry['guided']) for entry in networks.entries_of(session)]
    # The first one is short, the next one is recorded, two profile.
    assert guided == [False] * 4 + [True] * 4
    assert len(recordings) == 3
    figures = session.statistics()
    assert figures['peak_bytes'] <= TIGHT and not figures['fits']
    assert networks.entries_of(session)[0]['evictions'] > 0


def test_a_quiet_iteration_ends_where_its_graph_has_died(recordings):
    """As where a converter pads sentences: the graph of that dies at once."""
    sentences = [np.zeros(length, np.float32) for length in (3, 2)]

    def convert(model, i):
        F.pad_sequence(sentences)
        F.stack(sentences[:1])

    _, session = train(memory_limit=TIGHT, before=convert)
    guided = [bool(entry['guided']) for entry in networks.entries_of(session)]
    assert guided == [False] * 4 + [True] * 4  # as without
    assert len(recordings) == 3 and session.statistics()['deviations'] == 0


class Deep(chainer.Chain):
    """Layers that are all alike; the update needs more than the iteration."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            for i in range(6):
                setattr(self, f'l{i}', L.Linear(100, 100))

    def forward(self, x: Any) -> Any:
        for i in range(6):
            x = F.tanh(self[f'l{i}'](x))
        return F.sum(x * x)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def deep_losses(steps: Any, limit: int | None = None, **options: Any) -> Any:
    """What a program records, and its session."""
    np.random.seed(0)
    model = Deep()
    optimizer = chainer.optimizers.Adam().setup(model)
    losses: list[Any] = []
    given = {} if limit is None else {'memory_limit': limit, 'planner': None, **options}
    with networks.session_for(model, given) as session:
        steps(model, optimizer, losses)
    return losses + [p.array.copy() for _, p in sorted(model.namedparams())], session


def vectors(rows: int) -> np.ndarray:
    return np.random.RandomState(rows).rand(rows, 100).astype(np.float32)


def plain(model: Any, optimizer: Any, losses: list[Any], rows: int = 400) -> None:
    loss = model(vectors(rows))
    model.cleargrads()
    loss.backward()
    losses.append(float(loss.array))
    del loss
    optimizer.update()


def assert_equal(expected: list[Any], found: list[Any]) -> None:
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def needed(steps: Any) -> int:
    """Peak of a program, in bytes."""
    return int(deep_losses(steps, 1 << 40)[1].statistics()['peak_bytes'])


@pytest.mark.parametrize('share', [0.95, 0.8, 0.65])
def test_memory_becomes_short_at_any_moment(share):
    """In forward, in backward, or in the update."""

    def steps(model: Any, optimizer: Any, losses: list[Any]) -> None:
        for rows in (300, 400, 500, 200, 450):
            plain(model, optimizer, losses, rows)

    limit = int(needed(steps) * share)
    expected, _ = deep_losses(steps)
    found, session = deep_losses(steps, limit)
    assert_equal(expected, found)
    assert session.statistics()['peak_bytes'] <= limit
    assert sum(entry['evictions'] for entry in networks.entries_of(session))


def test_poisoned_memory_and_late_copies_change_nothing(hostile):
    def steps(model: Any, optimizer: Any, losses: list[Any]) -> None:
        for rows in (300, 400, 300, 400, 300):
            plain(model, optimizer, losses, rows)

    for share in (0.9, 0.7):
        limit = int(needed(steps) * share)
        expected, _ = deep_losses(steps)
        found, session = deep_losses(steps, limit)
        assert_equal(expected, found)
        assert session.statistics()['peak_bytes'] <= limit


@pytest.mark.parametrize('again', [False, True])
def test_graphs_that_are_away_leave_the_next_iteration_quiet(again, monkeypatch):
    """Whether the program runs backward over them again or not."""
    loud: list[int] = []
    start = loop.Loop._start_known_forward

    def start_forward(hook: Any, iteration: Any, *arguments: Any) -> None:
        loud.append(iteration.position)
        start(hook, iteration, *arguments)

    monkeypatch.setattr(loop.Loop, '_start_known_forward', start_forward)
    monkeypatch.setattr(GuideBook, 'wants_draft', lambda *_: False)

    def steps(model: Any, optimizer: Any, losses: list[Any]) -> None:
        before = None
        for rows in (400, 350, 300, 380, 320):
            loss = model(vectors(rows))
            model.cleargrads()
            for one in (loss, before):
                if one is loss or (again and one is not None):
                    one.backward()
            losses.append(float(loss.array))
            losses.append(model.l0.W.grad.copy())
            before = loss
            del loss, one

    limit = int(0.7 * needed(steps))
    expected, _ = deep_losses(steps)
    found, session = deep_losses(steps, limit)
    assert_equal(expected, found)
    figures = session.statistics()
    assert figures['peak_bytes'] <= limit and not figures['fits']
    assert not loud
    entries = networks.entries_of(session)
    assert any(entry['restores'] for entry in entries) == again


def test_a_graph_that_the_program_keeps_can_leave():
    """It was made quietly, and is evicted before the younger one."""

    def steps(model: Any, optimizer: Any, losses: list[Any]) -> None:
        for _ in range(3):
            kept = model(vectors(400))
            loss = model(vectors(300))
            for one in (loss, kept):
                model.cleargrads()
                one.backward()
                losses.append(float(one.array))
                optimizer.update()

    def older(model: Any, optimizer: Any, losses: list[Any]) -> None:
        loss = None
        for _ in range(4):  # the former graph lives until this one stands
            loss = model(vectors(400))
            model.cleargrads()
            loss.backward()
            losses.append(float(loss.array))
            optimizer.update()

    for program in (steps, older):
        limit = int(needed(program) * 0.75)
        expected, _ = deep_losses(program)
        found, session = deep_losses(program, limit)
        assert_equal(expected, found)
        assert session.statistics()['peak_bytes'] <= limit


def test_gradients_of_gradients_leave():
    def steps(model: Any, optimizer: Any, losses: list[Any]) -> None:
        for _ in range(3):
            x = chainer.Variable(vectors(300))
            loss = model(x)
            (gradient,) = chainer.grad([loss], [x], enable_double_backprop=True)
            loss += F.sum(gradient * gradient)
            model.cleargrads()
            loss.backward()
            losses.append(float(loss.array))
            del loss, gradient, x
            optimizer.update()

    limit = int(needed(steps) * 0.8)
    expected, _ = deep_losses(steps)
    found, session = deep_losses(steps, limit)
    assert_equal(expected, found)
    assert session.statistics()['peak_bytes'] <= limit


def test_what_never_comes_again_is_not_recorded(recordings):
    def steps(model: Any, optimizer: Any, losses: list[Any]) -> None:
        for rows in range(300, 330):
            plain(model, optimizer, losses, rows)

    limit = int(needed(steps) * 0.8)
    expected, _ = deep_losses(steps)
    found, session = deep_losses(steps, limit)
    assert_equal(expected, found)
    assert not recordings and session.statistics()['iterations'] == 30
    assert session.state == 'passive' and not session.settled


def test_what_fits_again_is_left_alone(recordings):
    """Shortages come and go with the size of the batch."""

    def steps(model: Any, optimizer: Any, losses: list[Any]) -> None:
        for rows in (500, 100, 100, 100, 100, 100):
            plain(model, optimizer, losses, rows)

    limit = int(needed(steps) * 0.8)
    _, session = deep_losses(steps, limit)
    assert not recordings and session.settled
    assert not session.statistics()['fits']


def test_a_function_that_does_not_fit_runs_in_parts():
    class Pooled(networks.Ends):
        def forward(self, x: Any, t: Any) -> Any:
            h = F.max_pooling_2d(F.relu(self.conv(x)), 3, stride=1)
            return F.softmax_cross_entropy(self.last(h), t)

    data = networks.batches(3)
    expected, _ = networks.train(Pooled, data)
    _, roomy = train(Pooled, data, memory_limit=ROOMY)
    peak = roomy.statistics()['peak_bytes']
    result, session = train(Pooled, data, memory_limit=int(peak * 0.72))
    networks.assert_same(expected, result)
    assert networks.entries_of(session)[0]['split'] > 0


def test_what_cannot_fit_says_how_to_learn_more():
    model = networks.Everything()
    optimizer = chainer.optimizers.SGD().setup(model)
    with pytest.raises(OutOfMemoryError, match="with planner='hybrid'") as raised:
        with hybridmem.optimize(model, 300_000):
            networks.iterate(model, optimizer, *DATA[0])
    assert 'after operation 0 (/first/Convolution2DFunction)' in str(raised.value)


def test_errors_that_are_caught_end_nothing():
    def steps(model: Any, optimizer: Any, losses: list[Any]) -> None:
        for i in range(4):
            if i == 2:
                with pytest.raises(chainer.utils.type_check.InvalidType):
                    model(vectors(300)[:, :50])
            plain(model, optimizer, losses)

    for share in (1.1, 0.75):
        limit = int(needed(steps) * share)
        expected, _ = deep_losses(steps)
        found, session = deep_losses(steps, limit)
        assert_equal(expected, found)
        assert session.statistics()['iterations'] == 4


# -- what is noted -------------------------------------------------------------
class Thing:
    """Something to refer to."""


def noting(things):
    """A ledger of an iteration that has run these."""
    noted = ledger.Ledger()
    noted.begin('first')
    for k, thing in enumerate(things):
        noted.note(k, thing)
    return noted


def test_noted_functions_keep_nothing_alive():
    things = [Thing() for _ in range(3)]
    noted = noting(things)
    noted.note_nested(nested := Thing())
    for thing in (things[2], things[1]):
        noted.start_backward(thing)
    noted.end_backward(things[2])  # it is not the inner one
    assert noted.find_running() == [things[2], things[1]]
    noted.end_backward(things[1])
    assert noted.nested and noted.find_current() is things[2]
    del thing, things[0]
    entries, ended, running = noted.take()
    assert entries == [(1, 2, things[0]), (2, 3, things[1]), (-1, 4, nested)]
    assert (ended, running) == ([things[0]], [things[1]])
    assert noted.take() == ([], [], []) and noted.serial == 4


def test_what_is_noted_belongs_to_older_graphs_later():
    things = [Thing() for _ in range(3)]
    noted = noting(things)
    noted.start_backward(things[0])
    noted.end_backward(things[0])
    noted.begin('next')
    assert noted.all_dead and noted.older == 3  # none of this iteration's is noted
    del things[1:]
    noted.begin('the one after')
    assert noted.older == 1
    assert noted.take_older(0) == ([], things)
    assert noted.take_older(1) == ([('first', 0, 1, things[0])], things)
    assert noted.take_older(1) == ([], []) and noted.older == 0


def test_references_to_the_dead_are_let_go_of(monkeypatch):
    monkeypatch.setattr(ledger, 'PURGED', 10)
    noted = noting([])
    living = [Thing() for _ in range(6)]
    for k in range(30):
        thing = living[k // 5] if not k % 5 else Thing()
        noted.note(k, thing)
        del thing
        if k == 8:
            assert [k for k, *_ in noted.take_next(6)] == [0, 5]
        noted.forget_dead()
        assert len(noted.noted) <= 20
    assert [k for k, *_ in noted.take_next(100)] == [10, 15, 20, 25]
    assert [k for k, *_ in noted.take()[0]] == [0, 5, 10, 15, 20, 25]


def test_a_program_without_backward_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(ledger, 'PURGED', 400)
    model = networks.Everything()
    with hybridmem.optimize(model, ROOMY) as session:
        noted = session._runtime.executor.ledger
        for _ in range(150):
            model(*DATA[0])
        assert len(noted.noted) < ledger.PURGED + 100


def test_memory_that_is_short_between_two_functions_breaks_nothing_off(monkeypatch):
    """The last function has come to its end, and the next one is not the first."""
    broken = []
    monkeypatch.setattr(loop.Loop, '_break_off', lambda *of: broken.append(of))
    model = networks.Everything()
    optimizer = chainer.optimizers.SGD().setup(model)
    with hybridmem.optimize(model, ROOMY) as session:
        for i, (x, t) in enumerate(DATA[:3]):
            features = model.block1(F.relu(model.first(x)))
            if i == 1:
                assert session._loop.iteration.quiet
                session._loop.reclaim(1 << 40)
                assert not session._loop.iteration.quiet
            loss = F.softmax_cross_entropy(model.last(model.block2(features)), t)
            model.cleargrads()
            loss.backward()
            optimizer.update()
        session.finish_iteration()
        assert session.statistics()['iterations'] == 3
    assert not broken


# -- kinds of iterations -------------------------------------------------------
def test_a_report_shows_every_kind_of_iteration():
    _, session = train(data=2 * DATA, memory_limit=TIGHT)
    figures = session.statistics()
    kinds = figures['kinds']
    assert sum(kind['iterations'] for kind in kinds) == figures['iterations']
    guided = [kind for kind in kinds if kind['state'] == 'guided']
    assert sum(kind['iterations'] for kind in guided) == figures['guided_iterations']
    assert all(kind['predicted_peak_bytes'] == session.plan.predicted_peak_bytes
               for kind in guided)  # fmt: skip
    assert max(kind['peak_bytes'] for kind in kinds) == figures['peak_bytes']
    lines = session.report().splitlines()
    for kind in kinds:
        assert any(line.split()[0] == kind['state'] for line in lines if line)


def test_times_are_means_over_all_kinds_that_follow_plans():
    """A plan is that of one kind; what it is for stands before it."""
    _, session = train(data=2 * DATA, memory_limit=TIGHT)
    figures = {**session.statistics(), 'iteration_seconds': 9.0, 'own_seconds': 9.0}
    guided = next(kind for kind in figures['kinds'] if kind['state'] == 'guided')
    times = ('seconds', 4.0), ('own_seconds', 3.0), ('predicted_seconds', 2.0)
    first = {**guided, **dict(times), 'in_core_seconds': 1.0, 'iterations': 3}
    second = {**first, 'own_seconds': 2.0, 'seconds': 2.0, 'iterations': 1}

    def report(*kinds: dict[str, Any]) -> str:
        told = {**figures, 'kinds': kinds}
        return report_module.session_report(told, session.plan, session.profile)

    several, one = report(first, second), report(first)
    assert '2.000 s / 2.750 s (prediction -27.3%)' in several
    assert 's / iteration with other programs     3.500 s' in several
    assert '+100.0% / +175.0%' in several
    own = session.profile.first_update
    assert f'of iterations of {own} operations' in several
    assert '/ 9.000 s' in one and 'of iterations of' not in one


def test_a_report_of_one_kind_has_no_table_of_kinds():
    _, session = train(memory_limit=ROOMY)
    assert len(session.statistics()['kinds']) == 1
    assert '\n\n' not in session.report()
    assert session.time_steps(1).predicted_seconds is None  # nothing was planned


def test_very_many_kinds_are_counted_together(monkeypatch):
    monkeypatch.setattr(iteration_history, 'MOST', 3)
    kinds = iteration_history.IterationKinds()
    entry = dict.fromkeys(
        ('peak_bytes', 'swapped_bytes', 'recomputed_bytes', 'evictions', 'restores'), 7
    )
    guides = [Guide([('f', k)]) for k in range(5)]
    for guide in 2 * guides:
        kinds.count('guided', guide, {**entry, 'seconds': 1.0, 'own_seconds': 1.0})
    kinds.count('passive', None, {**entry, 'seconds': 3.0, 'own_seconds': 2.0})
    found = kinds.collect()
    assert [kind['iterations'] for kind in found] == [2, 2, 2, 4, 1]
    assert found[-1]['seconds'] == 3.0 and found[3]['operations'] is None
    del guides, guide  # dead guides leave their figures
    assert len(kinds.collect()) == 5
