"""Training under a plan gives the same bits as training without us."""

from __future__ import annotations

import numpy as np
import pytest
from support import networks
from support.drawn_plans import RANDOM, random_plan

from chainer_hybridmem.planning import planners
from chainer_hybridmem.planning.planners.superneurons import superneurons
from chainer_hybridmem.planning.planners.uniform import swap_all
from chainer_hybridmem.planning.records.plan import FOR_REPLAYS
from chainer_hybridmem.planning.search.relaxed import relaxed
from chainer_hybridmem.training.execution.replayer import Recipes

PLANNERS = list(planners.PLANNERS)
ITERATIONS = 7


@pytest.mark.matrix(every=4)  # test_zoo.py has every planner, too
@pytest.mark.parametrize('planner', PLANNERS)
@pytest.mark.parametrize('where', ['ram', 'file'])
def test_same_bits_at_a_tight_limit(planner, where, data, in_core, peak, tmp_path):
    limit = peak if planner in networks.BLIND else int(peak * 0.72)
    options = {'swap_dir': str(tmp_path)} if where == 'file' else {}
    result, session = networks.train(
        networks.Everything,
        data,
        memory_limit=limit,
        planner=planner,
        link_bandwidth='2GB/s',
        **options,
        **networks.OPTIONS.get(planner, {}),
    )
    networks.assert_same(in_core, result)
    figures = session.statistics()
    assert figures['state'] == 'guided'
    assert figures['guided_iterations'] == ITERATIONS - 3
    assert figures['deviations'] == figures['evictions'] == figures['restores'] == 0
    assert figures['peak_bytes'] <= limit
    assert figures['guided_peak_bytes'] == pytest.approx(
        figures['predicted_peak_bytes'], rel=0.01
    )
    if planner != 'in-core':
        assert figures['swap'] + figures['recompute'] > 0


def test_in_core_at_that_limit_is_refused(data, peak):
    import chainer_hybridmem

    with pytest.raises(chainer_hybridmem.OutOfMemoryError, match='in-core'):
        networks.train(
            networks.Everything,
            data,
            memory_limit=int(peak * 0.72),
            planner='in-core',
        )


def test_predicted_in_core_peak_is_the_measured_one(data):
    _, session = networks.train(
        networks.Everything, data, memory_limit='1GB', planner='in-core'
    )
    figures = session.statistics()
    assert figures['guided_peak_bytes'] == pytest.approx(
        figures['in_core_peak_bytes'], rel=0.002
    )


def test_random_plans_are_exact(data, in_core, peak, monkeypatch):
    """Any assignment the simulator allows must execute exactly."""
    monkeypatch.setitem(planners.PLANNERS, RANDOM, random_plan)
    rng = np.random.default_rng(1)
    for _ in range(6):
        weights = rng.dirichlet([1, 1, 1])
        result, session = networks.train(
            networks.Everything,
            data,
            memory_limit=peak,
            planner=RANDOM,
            late=0.3,
            sources=0.7,
            seed_of_plan=int(rng.integers(1 << 30)),
            weights=tuple(weights),
        )
        networks.assert_same(in_core, result)
        figures = session.statistics()
        assert figures['evictions'] == figures['restores'] == 0
        assert figures['guided_peak_bytes'] == pytest.approx(
            figures['predicted_peak_bytes'], rel=0.01
        )


def test_what_stays_for_replays_spares_them(data, in_core, peak, monkeypatch):
    """Backward never reads it, and forward alone would drop it."""
    plan = networks.plan_with_sources
    monkeypatch.setitem(planners.PLANNERS, 'sources-for-tests', plan)
    result, session = networks.train(
        networks.Everything, data, memory_limit=peak, planner='sources-for-tests'
    )
    networks.assert_same(in_core, result)
    figures = session.statistics()
    assert figures['deviations'] == figures['evictions'] == figures['restores'] == 0
    assert figures['guided_peak_bytes'] == pytest.approx(
        figures['predicted_peak_bytes'], rel=0.01
    )
    replays = session._runtime.executor.counters.replays
    assert replays == len(session.plan.replays)
    assert f'{FOR_REPLAYS} ' in session.report()


def test_what_stays_for_replays_goes_first_when_memory_is_short(
    data, in_core, peak, monkeypatch
):
    """Replays make it again, with the same bits."""
    plan = networks.plan_with_sources
    monkeypatch.setitem(planners.PLANNERS, 'sources-for-tests', plan)
    given_up, held = [], []
    give_up = Recipes.give_up_sources

    def note(recipes):
        given_up.append(len(recipes._sources))
        give_up(recipes)

    monkeypatch.setattr(Recipes, 'give_up_sources', note)

    def hold(model, i):
        if i == len(data) - 2:  # it follows its plan by then
            held.append(np.ones(peak // 4, np.uint8))

    result, session = networks.train(
        networks.Everything,
        data,
        memory_limit=peak,
        planner='sources-for-tests',
        before=hold,
        arena=False,  # else there is another plan, for what is left
    )
    networks.assert_same(in_core, result)
    assert max(given_up, default=0) > 0
    assert session.statistics()['peak_bytes'] <= peak


@pytest.mark.parametrize('planner', [swap_all, superneurons])
def test_relaxed_plans_give_the_same_bits(planner, data, in_core, peak, monkeypatch):
    def relaxed_plan(problem, limit_bytes):
        return relaxed(problem, planner(problem, limit_bytes), margin=0)

    monkeypatch.setitem(planners.PLANNERS, 'relaxed', relaxed_plan)
    limit = int(peak * 0.72)
    result, session = networks.train(
        networks.Everything, data, memory_limit=limit, planner='relaxed'
    )
    networks.assert_same(in_core, result)
    figures = session.statistics()
    assert figures['deviations'] == figures['evictions'] == figures['restores'] == 0
    assert figures['guided_peak_bytes'] == pytest.approx(
        figures['predicted_peak_bytes'], rel=0.01
    )
