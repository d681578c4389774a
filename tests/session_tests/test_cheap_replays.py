"""What costs less to make again than to copy is recomputed, with no plan that says so.

Every program here draws its layers anew in each iteration, so that none has the
signature of another one, and the link is so slow that copies are worth avoiding.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainer_hybridmem as hybridmem
from chainer_hybridmem import timing
from chainer_hybridmem.training.chainer_access import graph, owners
from chainer_hybridmem.training.execution.cheap_replays import CheapReplays
from chainer_hybridmem.training.execution.mover import Counters
from chainer_hybridmem.training.execution.replayer import Recipes, Restorer
from chainer_hybridmem.training.recording.trials import TrialResult
from chainer_hybridmem.training.session.iterations import replay_trials
from chainer_hybridmem.training.session.iterations.loop import Loop
from chainer_hybridmem.training.session.iterations.replay_trials import (
    CopyCosts,
    ReplayCost,
    ReplayTrials,
    RunningRatio,
)

COUNT = 14
LIMIT = 4_000_000  # bytes
SLOW = '100MB/s'
CHANNELS = 8

Layer = Callable[[chainer.Chain, int, Any], Any]


class Layers(chainer.Chain):
    """Convolutions of single pixels, each with a batch normalisation."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        with self.init_scope():
            self.first = L.Convolution2D(3, CHANNELS, 1)
            self.convolutions = chainer.ChainList(
                *(L.Convolution2D(CHANNELS, CHANNELS, 1) for _ in range(4))
            )
            self.normalisations = chainer.ChainList(
                *(L.BatchNormalization(CHANNELS) for _ in range(4))
            )

    def forward(self, x: Any, numbers: Any) -> Any:
        x = F.relu(self.first(x))
        for n in numbers:
            x = self.layer(self, n, x)
        return F.mean(x * x)


def residual(model: Any, n: int, x: Any) -> Any:
    return F.relu(model.normalisations[n](model.convolutions[n](x)) + x)


def run(
    layer: Layer = residual,
    step: Callable[[Any, Any, Any, Any], float] | None = None,
    **options: Any,
) -> tuple[str, list[float], Any]:
    """Trains; the digest of all parameters, the losses and the session's figures."""
    np.random.seed(0)
    model = Layers(layer)
    optimizer = chainer.optimizers.MomentumSGD(1e-4).setup(model)
    rng = np.random.RandomState(1)
    losses, figures = [], []

    def train(session: Any = None) -> None:
        for _ in range(COUNT):
            x = rng.rand(8, 3, *rng.randint(24, 32, 2)).astype(np.float32)
            numbers = rng.randint(0, 4, rng.randint(12, 20))
            losses.append((step or train_once)(model, optimizer, x, numbers))
            if session is not None:
                session.finish_iteration()
                figures.append({'state': session.state, **session.last_iteration()})

    if options:
        with hybridmem.optimize(model, **options) as session:
            train(session)
        assert all(entry['peak_bytes'] <= LIMIT for entry in figures)
    else:
        train()
    digest = hashlib.sha256()
    for _, parameter in sorted(model.namedparams()):
        digest.update(parameter.array.tobytes())
    assert np.isfinite(losses).all()
    return digest.hexdigest(), losses, figures


def train_once(model: Any, optimizer: Any, x: Any, numbers: Any) -> float:
    loss = model(x, numbers)
    model.cleargrads()
    loss.backward()
    optimizer.update()
    return float(loss.array)


def limited(**others: Any) -> Any:
    options = {'memory_limit': LIMIT, 'link_bandwidth': SLOW, **others}
    return run(
        **{k: options.pop(k) for k in ('layer', 'step') if k in options}, **options
    )


def count_recomputed(figures: Any) -> int:
    return sum(e['recomputed_bytes'] for e in figures if e['state'] == 'passive')


@pytest.fixture(autouse=True)
def measured_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is measured after a few iterations."""
    monkeypatch.setattr(replay_trials, 'WORTH_MEASURING', 0.1)


# -- what it is for --------------------------------------------------------------
def test_a_slow_link_is_avoided_without_a_plan():
    expected, losses, _ = run()
    digest, others, figures = limited()
    assert (digest, others) == (expected, losses)
    assert count_recomputed(figures) > LIMIT


@pytest.mark.parametrize('interrupted', [0, 1])
def test_a_trial_may_be_interrupted_once(monkeypatch, interrupted):
    """As on a machine with more to do than it has processors."""
    seconds, runs = TrialResult.seconds, itertools.count()

    def longer(self: Any, device: Any) -> float:
        return seconds(self, device) + (next(runs) % 2 == interrupted)

    monkeypatch.setattr(TrialResult, 'seconds', longer)
    assert count_recomputed(limited()[2]) > LIMIT


def test_a_slow_iteration_is_forgotten():
    slowness = RunningRatio()
    slowness.add(2.0, 2.0)
    slowness.add(30.0, 2.0)  # all of them were interrupted
    ratios = [slowness.ratio]
    for _ in range(20):  # and so no more replays
        slowness.add(0.0, 0.0)
        ratios.append(slowness.ratio)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 8 and 1 < ratios[-1] < 2
    slowness.add(2.0, 2.0)
    assert 1 < slowness.ratio < ratios[-1]


def test_waiting_for_room_is_not_time_of_a_replay(machine, monkeypatch):
    machine.change(computing=1e10)  # replays are soon known to be cheap
    taken: list[float] = []
    inside: list[bool] = []  # of a replay
    waits = iter(range(2))
    replay, time_replay = graph.replay, Counters.time_replay
    make_room = Loop._make_room

    def replayed(*args: Any) -> Any:
        inside.append(True)
        try:
            return replay(*args)
        finally:
            inside.clear()

    def noted(self: Any, seconds: float, expected_seconds: float) -> None:
        taken.append(seconds)
        time_replay(self, seconds, expected_seconds)

    def slowly(self: Any, missing_bytes: int) -> None:
        if inside and next(waits, None) is not None:
            timing.sleep(1.0)
        make_room(self, missing_bytes)

    monkeypatch.setattr(graph, 'replay', replayed)
    monkeypatch.setattr(Counters, 'time_replay', noted)
    monkeypatch.setattr(Loop, '_make_room', slowly)
    assert count_recomputed(limited()[2]) > LIMIT
    assert next(waits, None) is None  # it has waited
    assert max(taken) < 1


def test_nothing_is_recomputed_over_a_fast_link(monkeypatch):
    monkeypatch.setattr(CopyCosts, '_copy_seconds', lambda self, *sizes: 0.0)
    expected, losses, _ = run()
    digest, others, figures = limited(link_bandwidth=None)
    assert (digest, others) == (expected, losses)
    assert not count_recomputed(figures)


def test_nothing_is_recomputed_where_another_planner_is_named():
    expected, losses, _ = run()
    digest, others, figures = limited(planner='swap-opt')
    assert (digest, others) == (expected, losses)
    assert not sum(entry['recomputed_bytes'] for entry in figures)


def test_what_backward_has_read_goes_without_a_copy(monkeypatch):
    monkeypatch.setattr(CopyCosts, '_copy_seconds', lambda self, *sizes: 0.0)
    dropped: list[bool] = []
    is_cheaper = CheapReplays.is_cheaper

    def noted(self: Any, live: Any) -> bool:
        result = is_cheaper(self, live)
        if result:
            dropped.append(bool(live.uses))
        return result

    def pooled(model: Any, n: int, x: Any) -> Any:
        return residual(model, n, F.concat((x, x))[:, :CHANNELS])

    monkeypatch.setattr(CheapReplays, 'is_cheaper', noted)
    expected, losses, _ = run(pooled)
    assert limited(layer=pooled)[:2] == (expected, losses)
    assert dropped and not any(dropped)


# -- programs that could be led astray -------------------------------------------
def test_maps_made_from_parameters_come_back_before_an_update(monkeypatch):
    """A second loss comes over the same graph, after the first one's update."""

    def train_twice(model: Any, optimizer: Any, x: Any, numbers: Any) -> float:
        first = model(x, numbers)
        second = F.sum(first * first)
        model.cleargrads()
        first.backward()
        optimizer.update()
        model.cleargrads()
        second.backward()
        optimizer.update()
        return float(second.array)

    settled: list[Any] = []
    make_before_update = Restorer.make_before_update

    def noted(self: Any, live: Any) -> None:
        settled.append(live)
        make_before_update(self, live)

    monkeypatch.setattr(Restorer, 'make_before_update', noted)
    expected, losses, _ = run(step=train_twice)
    digest, others, figures = limited(step=train_twice)
    assert (digest, others) == (expected, losses)
    assert count_recomputed(figures)


def test_an_update_between_forward_and_backward(monkeypatch):
    """Gradients are of the parameters as forward has read them."""

    def train_late(model: Any, optimizer: Any, x: Any, numbers: Any) -> float:
        loss = model(x, numbers)
        for parameter in model.params():
            parameter.grad = np.full_like(parameter.array, 1e-3)
        optimizer.update()
        model.cleargrads()
        loss.backward()
        optimizer.update()
        return float(loss.array)

    settled: list[Any] = []
    make_before_update = Restorer.make_before_update

    def noted(self: Any, live: Any) -> None:
        settled.append(live)
        make_before_update(self, live)

    monkeypatch.setattr(Restorer, 'make_before_update', noted)
    expected, losses, _ = run(step=train_late)
    digest, others, _ = limited(step=train_late)
    assert (digest, others) == (expected, losses)
    assert settled


def test_a_second_backward_over_the_same_graph():
    def train_twice(model: Any, optimizer: Any, x: Any, numbers: Any) -> float:
        loss = model(x, numbers)
        model.cleargrads()
        loss.backward()
        loss.grad = np.full_like(loss.array, 0.5)
        loss.backward()
        optimizer.update()
        return float(loss.array)

    expected, losses, _ = run(step=train_twice)
    digest, others, _ = limited(step=train_twice)
    assert (digest, others) == (expected, losses)


def test_a_program_that_writes_into_what_functions_make():
    def masked(model: Any, n: int, x: Any) -> Any:
        x = residual(model, n, x)
        x.array[:, 0] = 0
        return x

    expected, losses, _ = run(masked)
    digest, others, figures = limited(layer=masked)
    assert (digest, others) == (expected, losses)
    assert not count_recomputed(figures)


class Overwriting(chainer.FunctionNode):
    """Writes into what it reads, and says so to no one."""

    def forward(self, inputs: Any) -> Any:
        inputs[0][:, 1] *= 0.5
        return (inputs[0] + 1,)

    def backward(self, indexes: Any, gradients: Any) -> Any:
        return gradients


def test_functions_of_the_program_may_write_into_what_they_read():
    def written(model: Any, n: int, x: Any) -> Any:
        x = residual(model, n, x)
        return Overwriting().apply((x,))[0]

    expected, losses, _ = run(written)
    digest, others, _ = limited(layer=written)
    assert (digest, others) == (expected, losses)


def test_functions_that_draw_are_not_run_again():
    def dropped(model: Any, n: int, x: Any) -> Any:
        return F.rrelu(F.dropout(residual(model, n, x), 0.1))

    expected, losses, _ = run(dropped)
    digest, others, figures = limited(layer=dropped)
    assert (digest, others) == (expected, losses)
    assert count_recomputed(figures)


def test_a_function_that_draws_only_now_and_then():
    """It did not draw when it was tried."""

    def drawing(model: Any, n: int, x: Any) -> Any:
        with chainer.using_config('train', model.t % 3 == 2):
            x = F.rrelu(model.convolutions[n](x))
        return residual(model, n, x)

    def train_some(model: Any, optimizer: Any, x: Any, numbers: Any) -> float:
        model.t = optimizer.t
        return train_once(model, optimizer, x, numbers)

    expected, losses, _ = run(drawing, train_some)
    digest, others, _ = limited(layer=drawing, step=train_some)
    assert (digest, others) == (expected, losses)


def test_variables_that_the_program_keeps_and_changes():
    kept: list[Any] = []

    def keeping(model: Any, n: int, x: Any) -> Any:
        x = residual(model, n, x)
        if n == 1:
            kept.append(x)
        return x

    def train_changed(model: Any, optimizer: Any, x: Any, numbers: Any) -> float:
        kept.clear()
        loss = model(x, numbers)
        for variable in kept:
            variable.array[:, 2] *= 0.25
        kept.clear()
        model.cleargrads()
        loss.backward()
        optimizer.update()
        return float(loss.array)

    expected, losses, _ = run(keeping, train_changed)
    digest, others, _ = limited(layer=keeping, step=train_changed)
    assert (digest, others) == (expected, losses)


def test_making_room_reads_no_parameter(monkeypatch):
    """One that is away would come home, where there is no room."""
    node_array, is_in_reach = graph.node_array, Recipes._is_in_reach

    def read_no_parameter(node: Any) -> Any:
        assert not owners.is_parameter(node)
        return node_array(node)

    def noted(self: Recipes, node: Any) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(graph, 'node_array', read_no_parameter)
            return is_in_reach(self, node)

    monkeypatch.setattr(Recipes, '_is_in_reach', noted)
    _, _, figures = limited()
    assert count_recomputed(figures)


# -- what remains --------------------------------------------------------------
COPIES = {
    'copied': copy.deepcopy,
    'pickled': lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.parametrize('make', COPIES.values(), ids=COPIES)
def test_what_a_program_copies_has_nothing_of_the_session(make):
    """Update rules are watched for maps that are made of their parameters."""
    replaced: list[Any] = []

    def train_a_copy(model: Any, optimizer: Any, x: Any, numbers: Any) -> float:
        if optimizer.t == COUNT // 2 and not replaced:
            replaced.append(make(optimizer))
        for other in replaced:
            model, optimizer = other.target, other
        loss = train_once(model, optimizer, x, numbers)
        for parameter in model.params():
            assert not parameter.update_rule._hookable._pre_update_hooks
        return loss

    _, losses, _ = run(step=train_a_copy)
    replaced.clear()
    _, others, figures = limited(step=train_a_copy)
    assert others == losses and count_recomputed(figures)


def test_functions_that_are_dead_are_forgotten():
    """Also while nothing can be made again."""
    with hybridmem.optimize(Layers(residual), LIMIT) as session:
        cheap = session._runtime.executor.cheap
        kept = Overwriting()
        for function in (kept, Overwriting()):
            cheap.note_untrusted(function)
        del function
        cheap.choose(None)
        assert [function() for function in cheap._untrusted] == [kept]


def test_small_functions_are_looked_at_for_a_few_iterations_only(monkeypatch):
    monkeypatch.setattr(replay_trials, 'LEAST_SECONDS', 1.0)
    monkeypatch.setattr(replay_trials, 'BARREN', 3)
    active: list[bool] = []
    begin = ReplayTrials.begin

    def noted(self: ReplayTrials, passive: bool) -> None:
        begin(self, passive)
        active.append(self.active)

    monkeypatch.setattr(ReplayTrials, 'begin', noted)
    expected, losses, _ = run()
    digest, others, figures = limited()
    assert (digest, others) == (expected, losses)
    assert not count_recomputed(figures)
    assert sum(active) == 3 and not any(active[-4:])


@pytest.mark.parametrize('nbytes', [250, 400, 1600])
def test_sizes_that_are_alike(nbytes):
    worth = ReplayCost()
    assert not worth.covers(nbytes)
    worth.add(400, True, 4e-6, 800)
    assert worth.covers(nbytes) and not worth.covers(1601) and not worth.covers(99)
    worth.add(4000, True, 8e-6, 4000)
    assert worth.covers(1601) and worth.seconds_per_byte == 1e-8
    assert worth.peak_per_byte == 2.0


def test_what_is_not_exact_is_tried_once():
    worth = ReplayCost()
    worth.add(400, False, 4e-6, 800)
    assert worth.covers(10**9) and not worth.exact
