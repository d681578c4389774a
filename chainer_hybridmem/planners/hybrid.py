"""The default planner: keep, swap and recompute decided together.

1. The relaxation of :mod:`.bound` gives the proven bound and, per feature map,
   the fractions at which it is attained.
2. Simulated annealing on simulated time (:mod:`.local_search`): hot rounds from
   everything swapped and from the relaxation rounded, each twice, because single
   rounds get stuck now and then. With more than ``MANY_MAPS`` feature maps, rounds one
   after the other from the relaxation rounded, evened out over maps that are alike;
   with more than ``SPREAD_MAPS`` the first of them change many maps at once
   (:mod:`.coarse`).
3. The other planners' plans (for more than ``RIVAL_MAPS`` feature maps only those of
   the quick ones).
4. Warm rounds from the best so far, until the steps or the time are used up or
   the plan is as close to the bound as ``tolerance``.

So the result is not slower than what the planners asked find, and it says how far
from the best possible it can be at most. With the same options and without a
time budget, it is the same in every process.
"""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.planners.planner import Planner
from chainer_hybridmem.planners.pooch import FASTER_STAGE, NODE_BUDGET
from chainer_hybridmem.planners.superneurons import SUPERNEURONS
from chainer_hybridmem.planners.swap_all import SWAP_ALL
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.search.annealing import (
    MANY_MAPS,
    TOLERANCE,
    WARMEST,
    Budget,
    actions_of,
    anneal_round,
    kinds,
)
from chainer_hybridmem.search.bound import Bound, load, lower_bound
from chainer_hybridmem.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Candidate,
    Search,
)
from chainer_hybridmem.search.options import COUNT, SECONDS, SHARE
from chainer_hybridmem.simulation.problem import Problem

HOT_SHARE = 0.18  # of the steps, for each of the hot rounds
HOT_ROUNDS = 4
REFINING_SHARE = 0.14
REFINING_WARMTH = 0.2  # their first temperature, of what is above the bound
PILOT_STEPS = 100  # to learn how long a step takes
RIVAL_MAPS = 600  # feature maps, beyond which slow rivals are not asked
LARGE_ROUNDS = ((2e-3, 0.25), (5e-4, 0.25))  # first temperature, share of the steps
LARGE_WARMEST = 2e-4  # first temperature afterwards, at most
SPREAD_MAPS = 1000  # beyond so many, evenly spread changes come before
SPREAD_ROUNDS = ((2e-3, 0.17), (1e-3, 0.17))
LARGE_ROUNDS_AFTER = ((1e-3, 0.17),)
RIVALS = (SWAP_ALL, SUPERNEURONS, FASTER_STAGE)


def hybrid(
    problem: Problem,
    limit_bytes: int,
    steps: int | None = None,
    time_budget: float | None = None,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> Plan:
    """Keep, swap and recompute together, with a proven bound.

    Args:
        problem: What to plan.
        limit_bytes: Memory limit.
        steps: Candidates the annealing judges in all. None: as many as the time
            budget allows; without one, a number that falls with the operations.
        time_budget: Seconds after which the best plan so far is taken; the result
            then depends on the machine. The linear programs of the bound and a
            baseline that has been started are finished first.
        tolerance: Stop when the plan is at most this share slower than the bound.
        seed: Of the random moves.

    Raises:
        InfeasibleError: If nothing fits.
    """
    search = Search(problem, limit_bytes, barrier=False)
    if search.in_core_fits():
        return search.finish_in_core('hybrid')
    best = search.evaluate(search.fill(SWAP))
    if not best.fits:
        return search.finish('hybrid', best)  # raises, with the numbers
    _load(search)
    budget = Budget(search, steps, time_budget)
    explore = _many_starts if len(problem.maps) <= MANY_MAPS else _one_start
    best, bound = explore(search, best, budget, tolerance, seed)
    goal = bound.seconds * (1 + tolerance)
    rival = _best_rival(problem, limit_bytes, best.seconds, bound.seconds, budget)
    if rival is not None:
        start = search.evaluate(actions_of(rival))
        best = min(best, start, key=lambda c: c.seconds)
    best = _refine(search, best, goal, bound.seconds, budget, seed)
    options = {
        'steps': steps,
        'time_budget': time_budget,
        'tolerance': tolerance,
        'seed': seed,
    }
    if rival is not None and rival.predicted_seconds < best.seconds:
        return dataclasses.replace(
            rival,
            planner='hybrid',
            options={**options, 'found_by': rival.planner},
            planning_seconds=time.perf_counter() - search.started,
            simulations=search.simulations + rival.simulations,
        )
    return search.finish('hybrid', best, **options)


def _many_starts(
    search: Search, out: Candidate, budget: Budget, tolerance: float, seed: int
) -> tuple[Candidate, Bound]:
    """Hot rounds from everything swapped and from the relaxation rounded."""
    pilot = anneal_round(search, out, PILOT_STEPS, 0.0, 0.0, budget, seed)
    budget.share_out()
    # Something good first: with little time, the bound alone uses it up.
    found = _hot_round(search, out, 0.0, budget, seed)
    bound = lower_bound(search.problem, search.limit_bytes)
    goal = bound.seconds * (1 + tolerance)
    starts = [out, *_rounded(search, bound)]
    best = min(found, pilot, *starts, key=lambda c: c.seconds)
    for number in range(1, HOT_ROUNDS):
        if best.seconds <= goal:
            break
        start = starts[number % len(starts)]
        found = _hot_round(search, start, goal, budget, seed + number)
        best = min(best, found, key=lambda c: c.seconds)
    return best, bound


def _one_start(
    search: Search, out: Candidate, budget: Budget, tolerance: float, seed: int
) -> tuple[Candidate, Bound]:
    """Rounds one after the other from the relaxation rounded."""
    problem = search.problem
    bound = lower_bound(problem, search.limit_bytes)
    goal = bound.seconds * (1 + tolerance)
    starts = _rounded(search, _evened(problem, bound)) or _rounded(search, bound)
    starts.append(out)
    best = min(starts, key=lambda c: c.seconds)
    best = anneal_round(search, best, PILOT_STEPS, 0.0, goal, budget, seed)
    budget.share_out()
    spread = len(problem.maps) > SPREAD_MAPS
    groups = _alike(problem)
    number = 0
    for warm, share in SPREAD_ROUNDS if spread else ():
        warm *= problem.in_core_seconds
        steps = budget.take(share)
        best = anneal_round(
            search, best, steps, warm, goal, budget, seed + number, groups
        )
        number += 1
    for warm, share in LARGE_ROUNDS_AFTER if spread else LARGE_ROUNDS:
        warm *= problem.in_core_seconds
        steps = budget.take(share)
        best = anneal_round(search, best, steps, warm, goal, budget, seed + number)
        number += 1
    return best, bound


def _alike(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Maps by group of those of one kind and size: pointers, and the maps."""
    n_maps = len(problem.maps)
    rows = [kinds(problem), problem.arrays.size[:n_maps], problem.recomputable]
    group = np.unique(np.stack(rows), axis=1, return_inverse=True)[1].ravel()
    pointers = np.concatenate([[0], np.cumsum(np.bincount(group))]).astype(np.int64)
    return pointers, np.lexsort((np.arange(n_maps), group)).astype(np.int64)


def _evened(problem: Problem, bound: Bound) -> Bound:
    """The fractions, the same for maps that are alike.

    The optimum is a corner: it swaps the first of the maps that are alike and
    recomputes the last, say. A mixture is as good to the relaxation, and nearer to
    what it leaves out.
    """
    pointers, alike = _alike(problem)
    swapped, recomputed = bound.swapped.copy(), bound.recomputed.copy()
    for begin, end in itertools.pairwise(pointers.tolist()):
        maps = alike[begin:end]
        swapped[maps] = bound.swapped[maps].mean()
        recomputed[maps] = bound.recomputed[maps].mean()
    return dataclasses.replace(bound, swapped=swapped, recomputed=recomputed)


def _load(search: Search) -> None:
    """On a fresh installation the annealing compiles, which is not planning."""
    began = time.perf_counter()
    nothing = Budget(search, 0, None)
    start = search.evaluate(search.fill(SWAP))
    anneal_round(search, start, 1, 0.0, 0.0, nothing, 0)
    if len(search.problem.maps) > SPREAD_MAPS:
        groups = _alike(search.problem)
        anneal_round(search, start, 1, 0.0, 0.0, nothing, 0, groups)
    load()
    search.simulations = 0
    search.started += time.perf_counter() - began


def _rounded(search: Search, bound: Bound) -> list[Candidate]:
    """The relaxation's fractions made whole, if that can be made to fit.

    Rounding errors are carried on in bytes from map to map in order of production,
    so that every stretch of the network swaps and recomputes what it should.
    """
    problem, a = search.problem, search.problem.arrays
    action = search.fill(KEEP)
    swap_bytes = recompute_bytes = 0.0
    for m in a.by_producer:
        size = float(a.size[m])
        swap_bytes += bound.swapped[m] * size
        recompute_bytes += bound.recomputed[m] * size
        may_recompute = problem.recomputable[m] and bound.recomputed[m] > 0
        if may_recompute and recompute_bytes >= size / 2:
            action[m] = RECOMPUTE
            recompute_bytes -= size
        elif bound.swapped[m] > 0 and swap_bytes >= size / 2:
            action[m] = SWAP
            swap_bytes -= size
    repaired = _repaired(search, action, bound)
    return [repaired] if repaired.fits else []


def _repaired(search: Search, action: np.ndarray, bound: Bound) -> Candidate:
    """Frees memory at the worst operation until the actions fit or nothing is left."""
    problem, a = search.problem, search.problem.arrays
    producer = a.producer[: len(action)]
    wanted = np.maximum(bound.swapped, bound.recomputed)
    current = search.evaluate(action)
    while not current.fits:
        action, k = current.action.copy(), current.worst
        there = (action == KEEP) & (producer < k) & (a.release_from <= k)
        there &= a.first_use > k
        recomputed = np.nonzero(action == RECOMPUTE)[0]
        if there.any():
            maps = np.nonzero(there)[0]
            m = maps[np.lexsort((-a.size[maps], -wanted[maps]))[0]]
            better = bound.recomputed[m] > bound.swapped[m] and problem.recomputable[m]
            action[m] = RECOMPUTE if better else SWAP
        elif len(recomputed):
            m = recomputed[np.argmin(np.abs(a.first_use[recomputed] - k))]
            action[m] = SWAP
        elif (action == KEEP).any():
            action[np.nonzero(action == KEEP)[0][0]] = SWAP
        else:
            break
        current = search.evaluate(action)
    return current


def _hot_round(
    search: Search, start: Candidate, goal: float, budget: Budget, seed: int
) -> Candidate:
    hot = WARMEST * search.problem.in_core_seconds
    steps = budget.take(HOT_SHARE)
    return anneal_round(search, start, steps, hot, goal, budget, seed)


def _refine(
    search: Search,
    best: Candidate,
    goal: float,
    bound_seconds: float,
    budget: Budget,
    seed: int,
) -> Candidate:
    """Warm rounds from the best so far until steps, time or gap run out."""
    number = HOT_ROUNDS
    while best.seconds > goal:
        steps = budget.take(REFINING_SHARE)
        if steps == 0:
            break
        warm = REFINING_WARMTH * (best.seconds - bound_seconds)
        if len(search.problem.maps) > MANY_MAPS:
            warm = min(warm, LARGE_WARMEST * search.problem.in_core_seconds)
        best = anneal_round(search, best, steps, warm, goal, budget, seed + number)
        number += 1
    return best


def _best_rival(
    problem: Problem,
    limit_bytes: int,
    seconds: float,
    bound_seconds: float,
    budget: Budget,
) -> Plan | None:
    """The fastest plan of the other planners; none if none can be faster."""
    best: Plan | None = None
    if seconds <= bound_seconds:
        return None
    few = len(problem.maps) <= RIVAL_MAPS
    slow = few and budget.allows(NODE_BUDGET)
    for rival in RIVALS:
        if not (rival.quick or slow):
            continue
        try:
            plan = rival(problem, limit_bytes)
        except InfeasibleError:
            continue
        if best is None or plan.predicted_seconds < best.predicted_seconds:
            best = plan
    return best


HYBRID = Planner(
    'hybrid',
    hybrid,
    source='this project',
    options={
        'steps': COUNT._replace(optional=True),
        'time_budget': SECONDS._replace(optional=True),
        'tolerance': SHARE,
        'seed': COUNT,
    },
    improvable=True,
)
PLANNERS = (HYBRID,)
