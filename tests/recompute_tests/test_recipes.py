"""Which recipes a session records, and what it does where a pass is wrong."""

from __future__ import annotations

from typing import Any

from support import networks

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from support.virtual import Machine

from chainer_hybridmem.planning import planners
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.candidates import KEEP, RECOMPUTE, Search
from chainer_hybridmem.training.recompute import fused_replays

LIMIT = '1GB'
ITERATIONS = 6


def covered(profile: Profile, function: str) -> set[tuple[str, ...]]:
    """Names of the functions that the recipes of one function cover."""
    return {
        tuple(profile.operations[k].function for k in recipe.covers)
        for recipe in profile.recipes
        if profile.operations[recipe.operation].function == function
    }


def recompute_all(problem: Any, limit_bytes: int) -> Any:
    """A planner: everything that can be is recomputed, all else kept."""
    search = Search(problem, limit_bytes)
    action = np.where(problem.recomputable, RECOMPUTE, KEEP)
    return search.finish('recompute-for-tests', search.evaluate(action))


@pytest.fixture
def recomputing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(planners.PLANNERS, 'recompute-for-tests', recompute_all)
    return {'memory_limit': LIMIT, 'planner': 'recompute-for-tests'}


def test_chains_are_covered(data, recomputing):
    expected = networks.plain(networks.Everything, data)
    result, session = networks.train(networks.Everything, data, **recomputing)
    networks.assert_same(expected, result)
    profile = session.profile
    bn = 'BatchNormalization'
    assert covered(profile, bn) == {(bn,)}
    assert covered(profile, 'MaxPoolingND') == {('MaxPoolingND',)}
    assert covered(profile, 'ReLU') == {(), (bn, 'ReLU'), (bn, 'Add', 'ReLU')}
    assert covered(profile, 'Dropout') == {()}
    assert all(recipe.exact for recipe in profile.recipes)
    figures = session.statistics()
    assert figures['recompute'] > 15
    assert figures['restores'] == figures['evictions'] == 0
    assert figures['guided_peak_bytes'] == pytest.approx(
        figures['predicted_peak_bytes'], rel=0.01
    )


def test_a_chain_makes_nothing_in_between(data):
    _, session = networks.train(networks.Everything, data, memory_limit=LIMIT)
    profile = session.profile
    for recipe in profile.recipes:
        if len(recipe.covers) > 1:
            made = sum(profile.storages[s].nbytes for s in recipe.products)
            assert made <= recipe.peak_bytes < made + 1024


class Both(chainer.Chain):
    """Two normalised branches meet, as where a residual network narrows."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(3, 8, 3, pad=1)
            self.b1 = L.BatchNormalization(8)
            self.c2 = L.Convolution2D(3, 8, 1)
            self.b2 = L.BatchNormalization(8)
            self.last = L.Linear(None, 10)

    def forward(self, x: Any, t: Any) -> Any:
        h = F.relu(self.b1(self.c1(x)) + self.b2(self.c2(x)))
        return F.softmax_cross_entropy(self.last(F.max_pooling_2d(h, 3, 2)), t)


def test_two_normalised_branches(data, recomputing):
    expected, _ = networks.train(Both, data)
    result, session = networks.train(Both, data, **recomputing)
    networks.assert_same(expected, result)
    bn = 'BatchNormalization'
    assert covered(session.profile, 'ReLU') == {(bn, bn, 'Add', 'ReLU')}


class Kept(Both):
    """The normalised array is itself a feature map."""

    def forward(self, x: Any, t: Any) -> Any:
        h = self.b1(self.c1(x))
        h = F.relu(h) + F.sigmoid(h) * h
        return F.softmax_cross_entropy(self.last(h), t)


def test_a_map_on_the_way_is_not_jumped_over(data, recomputing):
    expected, _ = networks.train(Kept, data)
    result, session = networks.train(Kept, data, **recomputing)
    networks.assert_same(expected, result)
    assert covered(session.profile, 'ReLU') == {()}


class Wide(chainer.Chain):
    """So many channels that the statistics of a batch are no noise."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(None, 2048)
            self.norm = L.BatchNormalization(2048)
            self.last = L.Linear(2048, 10)

    def forward(self, x: Any, t: Any) -> Any:
        h = F.dropout(F.relu(self.norm(self.first(x))))
        return F.softmax_cross_entropy(self.last(h), t)


def test_statistics_of_a_batch_are_not_planned(data, recomputing):
    expected, _ = networks.train(Wide, data)
    result, session = networks.train(Wide, data, **recomputing)
    networks.assert_same(expected, result)
    profile = session.profile
    assert covered(profile, 'ReLU') == {('BatchNormalization', 'ReLU')}
    normalised = [
        s
        for s in profile.feature_maps()
        if 'BatchNormalization' in profile.operations[s.producer].label
    ]
    assert normalised == []


@pytest.mark.parametrize('error', ['one bit', 'layout', 'exception'])
def test_a_pass_that_is_not_exact_is_not_used(error, data, recomputing, monkeypatch):
    whole = fused_replays.run

    def wrong(functions: Any, fetch: Any) -> Any:
        (y,), made = whole(functions, fetch)
        if error == 'exception':
            raise ValueError('a pass that does not work')
        if error == 'one bit':
            y.flat[-1] = np.nextafter(y.flat[-1], np.float32(9))
            return (y,), made
        return (np.asfortranarray(y),), made

    monkeypatch.setattr(fused_replays, 'run', wrong)
    expected = networks.plain(networks.Everything, data)
    result, session = networks.train(networks.Everything, data, **recomputing)
    networks.assert_same(expected, result)
    assert all(recipe.exact for recipe in session.profile.recipes)
    assert {recipe.covers for recipe in session.profile.recipes} == {()}


def test_copies_for_the_trial_are_given_up(data):
    """They need no more memory than training without them."""
    _, session = networks.train(networks.Everything, data, memory_limit=LIMIT)
    peak = session.statistics()['in_core_peak_bytes']
    expected = networks.plain(networks.Everything, data)
    result, session = networks.train(
        networks.Everything, data, memory_limit=int(peak * 0.7), planner='swap-all'
    )
    networks.assert_same(expected, result)
    assert session.statistics()['peak_bytes'] <= int(peak * 0.7)
    assert not session._runtime.executor.evictor.spare


def test_half_precision_trains_the_same(recomputing):
    data = networks.batches(ITERATIONS, size=2, insize=12)  # NumPy's halves are slow

    class Half(networks.Everything):
        def forward(self, x: Any, t: Any) -> Any:
            return super().forward(x.astype(np.float16), t)

    with chainer.using_config('dtype', np.float16):
        expected, _ = networks.train(Half, data)
        result, session = networks.train(Half, data, **recomputing)
    networks.assert_same(expected, result)
    assert covered(session.profile, 'MaxPoolingND') == {()}


def test_seconds_are_of_the_form_used(data, monkeypatch):
    """A slow first run does not count."""
    calls = []
    original = fused_replays.pool

    def slow_at_first(function: Any, x: Any) -> Any:
        calls.append(function)
        if len(calls) == 1:
            machine.sleep(0.3)
        return original(function, x)

    monkeypatch.setattr(fused_replays, 'pool', slow_at_first)
    machine = Machine()
    with machine.running():
        _, session = networks.train(networks.Everything, data, memory_limit=LIMIT)
    profile = session.profile
    (recipe,) = [
        r
        for r in profile.recipes
        if profile.operations[r.operation].function == 'MaxPoolingND'
    ]
    assert len(calls) > 1
    assert recipe.seconds < 0.1


class Changing(networks.Everything):
    """Its end is another one from some iteration on."""

    seen = 0

    def forward(self, x: Any, t: Any) -> Any:
        self.seen += 1
        h = F.dropout(F.relu(self.first(x)), 0.3)
        h = self.block2(self.block1(h))
        h = F.dropout(h, 0.3)
        if self.seen > ITERATIONS - 1:
            h = F.tanh(h)
        h = F.reshape(h * h, (h.shape[0], -1))
        return F.softmax_cross_entropy(self.last(h), t)


def test_masks_and_passes_after_a_deviation(data, recomputing):
    """What a plan has dropped is made again by the plan's recipe without it."""
    expected, _ = networks.train(Changing, data)
    result, session = networks.train(Changing, data, **recomputing)
    networks.assert_same(expected, result)
    figures = session.statistics()
    assert figures['deviations'] == 1
    assert session.last_iteration()['restores'] > 0
