"""AutoSwap: candidates, scores, selection, and the combination of scores."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.lab.planners import autoswap
from chainer_hybridmem.lab.planners.autoswap import import_guess
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem

MIB = toys.MIB
SCORES = list(autoswap.SCORES)
every_score = pytest.mark.parametrize('score', SCORES)


def selection(profile, limit=2**40, smallest=autoswap.SMALLEST_BYTES):
    return autoswap._Selection(make_problem(profile), limit, smallest)


def swapped(plan):
    return [m for m, entry in enumerate(plan.maps) if entry.action is Action.SWAP]


@pytest.fixture
def uneven():
    """Maps of 10, 30, 10, 20, 10 MiB; a copy takes 1, 3, 1, 2, 1 seconds."""
    sizes = [n * MIB for n in (10, 30, 10, 20, 10)]
    return toys.chain(5, nbytes=sizes, bandwidth=10.0 * MIB, workspace=0)


def brute_scores(profile):
    """The four definitions, map by map, straight from the profile."""
    seconds = [op.device_seconds for op in profile.operations]
    maps = profile.feature_maps()
    spans = [
        (max((s.producer, *s.forward_uses)) + 1, min(s.backward_uses)) for s in maps
    ]
    lives = [(s.producer, max(s.backward_uses)) for s in maps]
    fixed = make_problem(profile).arrays.fixed_peak
    load = [
        int(fixed[k])
        + sum(
            s.nbytes
            for s, (born, last) in zip(maps, lives, strict=True)
            if born < k <= last
        )
        for k in range(len(seconds))
    ]
    doa = [
        sum(seconds[a:b]) - profile.link.d2h_seconds(s.nbytes)
        - profile.link.h2d_seconds(s.nbytes)
        for s, (a, b) in zip(maps, spans, strict=True)
    ]  # fmt: skip
    aoa = [
        d * s.nbytes if d >= 0 else d / s.nbytes for d, s in zip(doa, maps, strict=True)
    ]
    wdoa = [
        sum(load[k] * seconds[k] for k in range(a, b)) for a, b in spans
    ]  # fmt: skip
    return load, {'doa': doa, 'aoa': aoa, 'wdoa': wdoa}


@pytest.mark.parametrize('seed', range(5))
def test_scores_are_what_the_definitions_say(seed):
    profile = toys.random_graph(seed)
    load, expected = brute_scores(profile)
    chosen = selection(profile)
    assert chosen.load.tolist() == load
    for name, values in expected.items():
        np.testing.assert_allclose(autoswap.SCORES[name](chosen), values)


def test_an_absence_may_be_shorter_than_its_copies(uneven):
    chosen = selection(uneven)
    aoa = autoswap.SCORES['aoa'](chosen)
    assert chosen.doa[0] > 0 > chosen.doa[-1]
    assert aoa[0] == chosen.doa[0] * 10 * MIB
    assert aoa[-1] == chosen.doa[-1] / (10 * MIB)


def test_swdoa_counts_what_has_been_selected(uneven):
    """The areas at selection fall, and only the first is that of wdoa."""
    chosen = selection(uneven, smallest=0)
    swdoa, wdoa = (autoswap.SCORES[name](chosen) for name in ('swdoa', 'wdoa'))
    candidates = np.flatnonzero(chosen.is_candidate)
    order = candidates[np.argsort(-swdoa[candidates])]
    assert swdoa[order[0]] == wdoa[candidates].max()
    assert (swdoa[order[1:]] <= wdoa[order[1:]]).all()
    assert swdoa[order[1]] < wdoa[order[1]]
    load = chosen.load
    for m in order:
        areas = chosen.areas(load)
        assert swdoa[m] == areas[m] == areas[candidates].max()
        candidates = candidates[candidates != m]
        load = chosen.without(load, m)


def test_candidates_are_large_and_live_across_the_peak(uneven):
    large = selection(uneven, smallest=20 * MIB)
    everything = selection(uneven, smallest=0)
    assert everything.is_candidate.sum() > large.is_candidate.sum() > 0
    assert (large.size[large.is_candidate] >= 20 * MIB).all()
    worst = int(np.argmax(everything.load))
    for m, storage in enumerate(uneven.feature_maps()):
        lives = storage.producer < worst <= max(storage.backward_uses)
        assert everything.is_candidate[m] == lives


@every_score
def test_selection_takes_the_highest_scores_until_it_fits(score, uneven):
    chosen = selection(uneven)
    values = autoswap.SCORES[score](chosen)
    limit = int(chosen.load.max()) - MIB
    plan = make_plan(uneven, limit, f'autoswap-{score}')
    ranked = np.lexsort((-values, ~chosen.is_candidate)).tolist()
    count = plan.count(Action.SWAP)
    assert count >= 1
    assert swapped(plan) == sorted(ranked[:count])
    assert plan.count(Action.RECOMPUTE) == 0


@every_score
def test_it_goes_on_until_everything_is_swapped(score):
    profile = toys.chain(6)
    least = least_memory(make_problem(profile))[0]
    plan = make_plan(profile, least, f'autoswap-{score}')
    assert plan.predicted_peak_bytes <= least
    with pytest.raises(InfeasibleError):
        make_plan(profile, least - 1, f'autoswap-{score}')


def test_small_maps_follow_if_large_ones_do_not_suffice():
    profile = toys.chain(6)
    least = least_memory(make_problem(profile))[0]
    plan = make_plan(profile, least, 'autoswap-doa', smallest_bytes=25 * MIB)
    assert plan.count(Action.SWAP) > 0


def bo(profile, limit, **options):
    return make_plan(profile, limit, 'autoswap-bo', **options)


@pytest.mark.parametrize('seed', range(4))
def test_the_combination_is_not_slower_than_a_score(seed):
    profile = toys.random_network(seed, 9)
    problem = make_problem(profile)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    for limit in np.linspace(least, most - 1, 4).astype(int).tolist():
        best = min(
            make_plan(problem, limit, f'autoswap-{score}').predicted_seconds
            for score in SCORES
        )
        assert bo(problem, limit, evaluations=12).predicted_seconds <= best


def test_the_weights_are_told_and_lie_in_their_range():
    profile = toys.random_network(6, 9)
    limit = make_problem(profile).in_core_peak_bytes * 3 // 4
    plan = bo(profile, limit, seed=3)
    assert len(plan.options['weights']) == 4
    assert all(-1 <= w <= 1 for w in plan.options['weights'])
    assert plan.options['seed'] == 3


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn.gaussian_process', None)
    profile = toys.chain(4)
    limit = make_problem(profile).in_core_peak_bytes - 1
    with pytest.raises(OptionError, match='scikit-learn: pip install scikit-learn'):
        bo(profile, limit)


def test_the_guess_finds_the_bottom_of_a_bowl():
    rng = np.random.default_rng(0)
    tried = rng.uniform(-1, 1, (25, 4))
    bottom = np.array([0.4, -0.2, 0.1, 0.6])
    guess = import_guess()
    for _ in range(15):
        times = ((tried - bottom) ** 2).sum(1)
        others = rng.uniform(-1, 1, (500, 4))
        tried = np.vstack([tried, guess(tried, times, others)])
    first, last = (((t - bottom) ** 2).sum(1).min() for t in (tried[:25], tried[25:]))
    assert last < first / 2


@pytest.mark.parametrize(
    'options', [{'evaluations': 0}, {'smallest_bytes': -1}, {'seed': 1.5}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        bo(toys.chain(4), '1GiB', **options)
