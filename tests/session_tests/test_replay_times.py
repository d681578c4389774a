"""Plans that are timed know what their replays take in an iteration."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize
from support import networks, toys

# isort: split
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.recording.stopwatch import Stopwatch, Times
from chainer_hybridmem.training.session.guides import profiling_plan
from chainer_hybridmem.training.session.guides.profiling_plan import with_median_times

FACTORS = (2.0, 3.0, 7.0)


def timings(profile, replayed):
    """Iterations in which the replays of some operations take a multiple."""
    seconds = {recipe.operation: recipe.seconds for recipe in profile.recipes}
    return [
        [
            Times(
                op.device_seconds,
                op.host_seconds,
                factor * seconds[op.index] if op.index in replayed else 0.0,
            )
            for op in profile.operations
        ]
        for factor in FACTORS
    ]


def in_core(profile):
    return make_plan(make_problem(profile), '1GB', 'in-core')


@pytest.mark.parametrize('count', [0, 1, 3])
def test_replays_count_with_their_median(count):
    profile = toys.chain(4)
    assert len(profile.recipes) > 3
    replayed = [recipe.operation for recipe in profile.recipes[:count]]
    timed = with_median_times(profile, timings(profile, replayed), in_core(profile))
    factor = 3.0 if count else 1.0  # also of those that have not been replayed
    for before, after in zip(profile.recipes, timed.recipes, strict=True):
        assert after.seconds == pytest.approx(factor * before.seconds)
    assert timed.operations == profile.operations


def test_one_that_was_not_replayed_in_every_iteration_is_not_known():
    profile = toys.chain(4)
    first = profile.recipes[0].operation
    rows = timings(profile, [first])
    rows[1] = timings(profile, [])[1]
    assert with_median_times(profile, rows, in_core(profile)) == profile


def test_a_session_times_its_replays(monkeypatch):
    """They take longer than the trial has shown."""
    times = Stopwatch.times

    def slow_times(watch: Stopwatch) -> list[Times]:
        found = times(watch)
        return [one._replace(replay_seconds=2 * one.replay_seconds) for one in found]

    monkeypatch.setattr(Stopwatch, 'times', slow_times)
    data = networks.batches(14)
    in_core = networks.train(networks.Everything, data[:5], memory_limit='1GiB')[1]
    limit = int(0.6 * in_core.statistics()['in_core_peak_bytes'])
    before = {}

    def after(session, i):
        if session.plan is not None and not before:
            before.update((r.operation, r.seconds) for r in session.profile.recipes)

    _, session = networks.train(
        networks.Everything,
        data,
        after=after,
        memory_limit=limit,
        planner='checkpoint-sqrt',
    )
    assert session.settled
    replayed = {replay.operation for replay in session.plan.replays}
    found = {r.operation: r.seconds for r in session.profile.recipes}
    assert replayed and before
    assert all(found[k] > before[k] for k in replayed)


@pytest.mark.parametrize('seed', range(50))
def test_what_a_moved_map_costs_is_fitted_as_by_scipy(seed):
    rng = np.random.RandomState(seed)
    maps = rng.randint(1, 20, 30) / 4
    columns = np.stack([maps, 1e7 * rng.rand(30) * maps], axis=1)
    seconds = columns @ (rng.randn(2) * (1e-5, 1e-11)) + 1e-6 * rng.rand(30)
    seconds = np.maximum(seconds, 0)
    found = profiling_plan._fit(columns, seconds)
    assert found == pytest.approx(optimize.nnls(columns, seconds)[0], rel=1e-6)
