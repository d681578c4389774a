"""The default planner: keep, swap and recompute decided together.

A problem of a few feature maps has all its assignments simulated. Else:

1. Where memory is short, the largest maps leave. If that is as fast as training
   without a limit, it is the plan; it is also taken in the end if no other one is
   faster and fewer maps leave.
2. The relaxation of ``planning/search/bound`` gives the proven bound and, per feature
   map, the fractions at which it is attained.
3. Simulated annealing on simulated time (``planning/search/local_search``): hot rounds
   from everything swapped and from the relaxation rounded, each twice, because single
   rounds get stuck now and then. Where the relaxation swaps nothing, it is asked for
   its best whole decisions as well, which are then nearly a plan, and for passes.
   With more than ``MANY_MAPS`` feature maps, rounds one after the other from the
   relaxation rounded, evened out over maps that are alike; with more than
   ``SPREAD_MAPS`` the first of them change many maps at once (``spread``).
4. Unless the plan is already as close to the bound as ``tolerance``: the other
   planners' plans (for more than ``RIVAL_MAPS`` feature maps only those of the quick
   ones).
5. Warm rounds from the best so far, until the steps or the time are used up or
   the plan is as close to the bound as ``tolerance``.
6. A few rounds more that also decide which recomputed maps do not stay when a replay
   for others passes them, never (LATE) or not the first time (PASSED): what stays
   takes the memory of what is needed later.
   Where nothing is copied, rounds in which sources may stay follow: from the best so
   far, and in turns from the relaxation rounded and from all that can be made again.
7. What leaves without making the plan faster stays (``undo_useless_moves``).
8. Where the gap is wide, the bound of ``planning/search/bound/segments`` proves more.

So the result is not slower than what the planners asked find, or than the bound by
more than ``tolerance``, and it says how far from the best possible it can be at most.
With the same options and without a time budget, it is the same in every process.

Why annealing: the space is rough, because one more kept map can make a chain of replays
fit or not; neighbours cost one simulation; and the bound says when to stop. Annealing
proves nothing by itself, the gap does.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.jit import clock, make_ready
from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.planners.pooch import FASTER_STAGE, NODE_BUDGET
from chainer_hybridmem.planning.planners.superneurons import SUPERNEURONS
from chainer_hybridmem.planning.planners.uniform import SWAP_ALL
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.search import local_search
from chainer_hybridmem.planning.search.annealing import (
    MANY_MAPS,
    TOLERANCE,
    WARMEST,
    Annealer,
    Budget,
    actions_of,
    count_steps,
)
from chainer_hybridmem.planning.search.bound import (
    TRUST,
    WIDE_GAP,
    Bound,
    WholeRelaxation,
    bound_of_parts,
    find_passes,
    lower_bound,
    tighten,
    warm_up,
)
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    LATE,
    RECOMPUTE,
    Candidate,
    Search,
    count_assignments,
    group_alike,
)
from chainer_hybridmem.planning.search.planner_options import COUNT, SECONDS, SHARE
from chainer_hybridmem.planning.search.repairs import (
    count_moves,
    even_out,
    find_start,
    free_memory,
    move_large_maps,
    round_bound,
    undo_useless_moves,
)
from chainer_hybridmem.planning.simulation.problem import (
    Problem,
    find_sources,
    with_sources,
)

FEW_ASSIGNMENTS = 3**6  # that are simulated in less time than annealing takes
HOT_SHARE = 0.18  # of the steps, for each of the hot rounds
HOT_ROUNDS = 4
WHOLE_ROUNDS = 3  # of asking the relaxation for whole decisions
WHOLE_NODES = 200  # of the solver's tree in each of them
REFINING_SHARE = 0.14
REFINING_WARMTH = 0.2  # their first temperature, of what is above the bound
LATE_SHARE = 0.28  # of the steps, on top of these
LATE_GAP = 0.01  # up to which plans that copy do not gain by it
LEAST_FOR_PARTS = 5.0  # seconds of a time budget, which that goes beyond
LATE_TIME = 0.5  # of the time, if it is limited
# Many short rounds find more than few long ones.
LATE_STEPS = 20_000  # of a round at most
LATE_STEPS_PER_MAP = 100  # likewise
SOURCES_SHARE = 2.5  # of the steps, for what sources may stay
DOUBT = 0.4  # share of its price that a source must save if there is time to try
QUICK_MAPS = 100  # feature maps, up to which there always is
LEAST_SAVED = 2e-4  # of the in-core time, by each of them
LEAST_GAINED = 1e-5  # of the in-core time, by all of them together
SOURCE_WARMTHS = (5e-4, 2e-3)  # first temperatures from the best, of the in-core time
LATE_WARMTHS = (0.2, 0.05, 0.0125, 1.0)  # in turns, as REFINING_WARMTH
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
        steps: Candidates the annealing judges, but for ``LATE_SHARE`` more. None: as
            many as the time budget allows; without one, a number that falls with the
            operations.
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
    with search.uncounted():  # any planner's search has judged it once
        best = _find_start(search)
    if not best.fits:
        return search.finish('hybrid', best)  # raises, with the numbers
    few = count_assignments(problem) <= FEW_ASSIGNMENTS
    _warm_up(search, few)
    first = None if time_budget is None else time_budget * (1 - LATE_TIME)
    budget = Budget(search, 0 if few else steps, first)
    annealer = Annealer(search, budget)
    large = move_large_maps(search)
    at_floor = large.seconds <= problem.still_seconds * (1 + tolerance)
    if at_floor:
        best = large
        bound = lower_bound(search.problem, search.limit_bytes)
    elif few:
        best = _try_late(search, search.find_fastest())
        bound = lower_bound(search.problem, search.limit_bytes)
    else:
        explore = _many_starts if len(problem.maps) <= MANY_MAPS else _one_start
        best, bound = explore(annealer, best, tolerance, seed)
    goal = bound.seconds * (1 + tolerance)
    rival = None
    if best.seconds > goal:
        rival = _best_rival(problem, limit_bytes, budget)
    if rival is not None:
        start = search.evaluate(actions_of(rival))
        best = min(best, start, key=lambda c: c.seconds)
    best = _refine(annealer, best, goal, bound.seconds, seed)
    copies = bound.swapped.any() and best.seconds <= bound.seconds * (1 + LATE_GAP)
    if not (few or copies or at_floor):
        search, best, bound = _decide_more(
            annealer, best, bound, tolerance, steps, time_budget, seed
        )
    options = {
        'steps': steps,
        'time_budget': time_budget,
        'tolerance': tolerance,
        'seed': seed,
    }
    if rival is not None and rival.predicted_seconds < best.seconds:
        plan = dataclasses.replace(
            rival,
            planner='hybrid',
            options={**options, 'found_by': rival.planner},
            planning_seconds=clock() - search.started,
            simulations=search.simulations + rival.simulations,
        )
    else:
        if search.problem is problem:  # else sources are decided about, too
            best = min(best, large, key=lambda c: (c.seconds, count_moves(c)))
        plan = search.finish('hybrid', undo_useless_moves(search, best), **options)
    proven = bound.seconds
    is_wide = plan.predicted_seconds > proven * (1 + WIDE_GAP)
    has_time = time_budget is None or time_budget >= LEAST_FOR_PARTS
    if is_wide and has_time and search.problem is problem:
        proven = max(proven, bound_of_parts(problem, limit_bytes))
    bound_seconds = min(proven, plan.predicted_seconds)
    return dataclasses.replace(plan, lower_bound_seconds=bound_seconds)


def _find_start(search: Search) -> Candidate:
    """What fits if anything does; under rules that is a search of its own."""
    best = find_start(search)
    if best.fits or not search.problem.rules:
        return best
    bound = lower_bound(search.problem, search.limit_bytes)
    return min([best, *round_bound(search, bound)], key=lambda c: c.seconds)


def _warm_up(search: Search, few: bool) -> None:
    """On a fresh installation the search compiles, which is not planning."""
    with search.uncounted():
        warm_up()
        if not few:
            make_ready(local_search.anneal)


def _many_starts(
    annealer: Annealer, out: Candidate, tolerance: float, seed: int
) -> tuple[Candidate, Bound]:
    """Hot rounds from everything swapped and from the relaxation rounded."""
    search = annealer.search
    pilot = annealer.run_round(out, PILOT_STEPS, 0.0, 0.0, seed)
    annealer.budget.share_out()
    # Something good first: with little time, the bound alone uses it up.
    found = _hot_round(annealer, out, 0.0, seed)
    bound = lower_bound(search.problem, search.limit_bytes)
    starts = [out, *round_bound(search, bound)]
    best = min(found, pilot, *starts, key=lambda c: c.seconds)
    best, bound, _ = _ask_whole(annealer, best, bound)
    goal = bound.seconds * (1 + tolerance)
    for number in range(1, HOT_ROUNDS):
        if best.seconds <= goal:
            break
        start = starts[number % len(starts)]
        found = _hot_round(annealer, start, goal, seed + number)
        best = min(best, found, key=lambda c: c.seconds)
    return best, bound


def _ask_whole(
    annealer: Annealer, best: Candidate, bound: Bound
) -> tuple[Candidate, Bound, list[Candidate]]:
    """The relaxation's best whole decisions, and what they prove, if it swaps nothing.

    Without copies little is left out of the relaxation: what it says is a plan, or
    nearly one. With them, whole decisions are as far from a plan as fractions are.

    Returns:
        tuple: The best candidate, what is proven, and what the decisions become that
        do not fit.
    """
    search, floor = annealer.search, bound.seconds
    starts: list[Candidate] = []
    if bound.swapped.any() or best.seconds <= floor * (1 + 2 * TRUST):
        return best, bound, starts
    passes = search.evaluate(find_passes(search.problem, search.limit_bytes))
    best = min(best, passes, key=lambda c: c.seconds)
    if best.seconds <= floor * (1 + 2 * TRUST):
        return best, bound, starts
    whole = WholeRelaxation(search.problem, search.limit_bytes)
    tighten(whole.relaxation)
    for _ in range(WHOLE_ROUNDS):
        left = annealer.budget.left_seconds
        if left <= 0:
            break
        answer = whole.solve(best.seconds, left, WHOLE_NODES)
        floor = max(floor, answer.floor)
        if answer.x is None:
            break
        found = search.evaluate(whole.action_at(answer.x))
        if not found.fits:
            starts.append(free_memory(search, found.action, bound))
        best = min(best, found, key=lambda c: c.seconds)
        if best.seconds <= floor * (1 + 2 * TRUST) or not whole.cut(answer.x):
            break
    starts = [start for start in starts if start.fits]
    return best, dataclasses.replace(bound, seconds=floor), starts


def _one_start(
    annealer: Annealer, out: Candidate, tolerance: float, seed: int
) -> tuple[Candidate, Bound]:
    """Rounds one after the other from the relaxation rounded."""
    search, budget = annealer.search, annealer.budget
    problem = search.problem
    bound = lower_bound(problem, search.limit_bytes)
    goal = bound.seconds * (1 + tolerance)
    starts = round_bound(search, even_out(problem, bound)) or round_bound(search, bound)
    starts.append(out)
    best = min(starts, key=lambda c: c.seconds)
    best = annealer.run_round(best, PILOT_STEPS, 0.0, goal, seed)
    budget.share_out()
    spread = len(problem.maps) > SPREAD_MAPS
    groups = group_alike(problem)
    number = 0
    for warm, share in SPREAD_ROUNDS if spread else ():
        warm *= problem.in_core_seconds
        steps = budget.take(share)
        best = annealer.run_round(best, steps, warm, goal, seed + number, groups)
        number += 1
    for warm, share in LARGE_ROUNDS_AFTER if spread else LARGE_ROUNDS:
        warm *= problem.in_core_seconds
        steps = budget.take(share)
        best = annealer.run_round(best, steps, warm, goal, seed + number)
        number += 1
    return best, bound


def _hot_round(
    annealer: Annealer, start: Candidate, goal: float, seed: int
) -> Candidate:
    hot = WARMEST * annealer.search.problem.in_core_seconds
    steps = annealer.budget.take(HOT_SHARE)
    return annealer.run_round(start, steps, hot, goal, seed)


def _refine(
    annealer: Annealer,
    best: Candidate,
    goal: float,
    bound_seconds: float,
    seed: int,
) -> Candidate:
    """Warm rounds from the best so far until steps, time or gap run out."""
    problem, number = annealer.search.problem, HOT_ROUNDS
    while best.seconds > goal:
        steps = annealer.budget.take(REFINING_SHARE)
        if steps == 0:
            break
        warm = REFINING_WARMTH * (best.seconds - bound_seconds)
        if len(problem.maps) > MANY_MAPS:
            warm = min(warm, LARGE_WARMEST * problem.in_core_seconds)
        best = annealer.run_round(best, steps, warm, goal, seed + number)
        number += 1
    return best


def _decide_more(
    annealer: Annealer,
    best: Candidate,
    bound: Bound,
    tolerance: float,
    steps: int | None,
    time_budget: float | None,
    seed: int,
) -> tuple[Search, Candidate, Bound]:
    """What is late and, where nothing is swapped, which sources stay.

    Returns:
        tuple: The search that judges the best candidate, that, and what is proven.
    """
    search, budget, wider = annealer.search, annealer.budget, None
    if not bound.swapped.any():
        wider = _allow_sources(search.problem, search.limit_bytes, bound, time_budget)
    until = 1.0 if wider is None else 1 - LATE_TIME / 2
    more = _more(budget, search, LATE_SHARE, steps, time_budget, until)
    goal = bound.seconds * (1 + tolerance)
    best = _decide_late(Annealer(search, more), best, goal, bound.seconds, seed)
    if wider is not None:
        search, best = _look_wider(search, best, wider)
        more = _more(budget, search, SOURCES_SHARE, steps, time_budget, 1.0)
        best, bound = _keep_sources(Annealer(search, more), best, bound, seed)
    return search, best, bound


def _keep_sources(
    annealer: Annealer, best: Candidate, bound: Bound, seed: int
) -> tuple[Candidate, Bound]:
    """What is found if sources may stay for replays, and what is proven then.

    Args:
        annealer: Of the problem in which they may stay.
        best: The best assignment without.
        bound: What is proven without.
        seed: Of the random moves.
    """
    search = annealer.search
    proven = lower_bound(search.problem, search.limit_bytes)
    best, proven, others = _ask_whole(annealer, best, proven)
    # What is best without sources is many decisions away from what is best with them.
    others += [*round_bound(search, proven), *_make_again(search)]
    seconds, number = min(bound.seconds, proven.seconds), 0
    while best.seconds > seconds * (1 + TOLERANCE):
        steps = min(annealer.budget.take(REFINING_SHARE), LATE_STEPS)
        if steps == 0:
            break
        turn, from_others = divmod(number, 2)
        if from_others and others:
            start, warm = others[turn % len(others)], WARMEST
        else:
            start, warm = best, SOURCE_WARMTHS[turn % len(SOURCE_WARMTHS)]
        warm *= search.problem.in_core_seconds
        found = annealer.run_round(start, steps, warm, 0.0, seed + number, late=True)
        best = min(best, found, key=lambda c: c.seconds)
        number += 1
    return best, dataclasses.replace(bound, seconds=seconds)


def _make_again(search: Search) -> list[Candidate]:
    """Whatever can be made again is, late, and all sources stay, if that fits."""
    a, recomputable = search.problem.arrays, search.problem.recomputable
    action = np.where(recomputable & a.read, LATE, search.fill(KEEP))
    found = search.evaluate(action)
    return [found] if found.fits else []


def _look_wider(
    old: Search, best: Candidate, problem: Problem
) -> tuple[Search, Candidate]:
    """A search in which sources may stay, and the same candidate in it."""
    search = Search(problem, old.limit_bytes, barrier=False)
    search.started, search.simulations = old.started, old.simulations
    dropped = np.full(len(problem.sources), RECOMPUTE)
    return search, search.evaluate(np.concatenate([best.action, dropped]))


def _allow_sources(
    problem: Problem, limit_bytes: int, bound: Bound, time_budget: float | None
) -> Problem | None:
    """The problem in which sources may stay, if that promises something.

    Where time is short, the relaxation has to gain by it.
    """
    patient = time_budget is not None or len(problem.maps) <= QUICK_MAPS
    sources = _find_worthy(problem, bound, DOUBT if patient else 1.0)
    if not sources:
        return None
    wider = with_sources(problem, sources)
    plain, gained = (lower_bound(p, limit_bytes).seconds for p in (problem, wider))
    least = LEAST_GAINED * problem.in_core_seconds
    return wider if patient or plain - gained > least else None


def _find_worthy(problem: Problem, bound: Bound, doubt: float) -> tuple[int, ...]:
    """Sources that may save more than the memory is worth that they take in forward.

    They stay until the first map made of them is needed. Prices are those of the
    relaxation; what is saved is at most the time of all that makes them from maps.

    Args:
        problem: Without sources.
        bound: What is proven of it, with prices.
        doubt: Share of its price that each of them must save.
    """
    a, items = problem.arrays, {s: i for i, s in enumerate(problem.items)}
    worthy = []
    for source in find_sources(problem):
        item = items[source]
        uses = problem.profile.storages[source].forward_uses
        stay = slice(max(uses, default=0) + 1, _first_asked(problem, item))
        price = float(bound.prices[stay].sum()) * int(a.size[item])
        saved = _seconds_to_make(problem, item)
        if saved > max(price * doubt, LEAST_SAVED * problem.in_core_seconds):
            worthy.append(source)
    return tuple(worthy)


def _first_asked(problem: Problem, item: int) -> int:
    """The first use of the maps that replays make of an item."""
    a, n_maps = problem.arrays, len(problem.maps)
    first, queue = len(a.seconds), [item]
    for other in queue:
        for place in np.flatnonzero(a.inputs == other):
            op = int(np.searchsorted(a.input_ptr, place, side='right')) - 1
            for made in a.products[a.product_ptr[op] : a.product_ptr[op + 1]].tolist():
                if made < n_maps:
                    first = min(first, int(a.first_use[made]))
                elif made not in queue:
                    queue.append(made)
    return first


def _seconds_to_make(problem: Problem, item: int) -> float:
    """Of all replays that make it from maps."""
    a, n_maps, seconds = problem.arrays, len(problem.maps), 0.0
    queue, seen = [int(a.producer[item])], set[int]()
    for op in queue:
        if op in seen:
            continue
        seen.add(op)
        seconds += max(float(a.recipe_seconds[op]), 0.0)
        reads = a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]]
        queue += [int(a.producer[i]) for i in reads if i >= n_maps and not a.present[i]]
    return seconds


def _more(
    budget: Budget,
    search: Search,
    more: float,
    steps: int | None,
    time_budget: float | None,
    until: float,
) -> Budget:
    """A share more of the steps, until a share of the time is over."""
    if steps is None and time_budget is None:
        steps = count_steps(search.problem)
    allowed = None if steps is None else int(more * steps)
    seconds = None if time_budget is None else until * time_budget
    result = Budget(search, allowed, seconds)
    result.seconds_per_step = budget.seconds_per_step
    return result


def _try_late(search: Search, best: Candidate) -> Candidate:
    """Whether it is faster if some of the recomputed maps are late, one by one."""
    for m in np.flatnonzero(best.action == RECOMPUTE):
        action = best.action.copy()
        action[m] = LATE
        best = min(best, search.evaluate(action), key=lambda c: c.seconds)
    return best


def _decide_late(
    annealer: Annealer,
    best: Candidate,
    goal: float,
    bound_seconds: float,
    seed: int,
) -> Candidate:
    """Rounds that decide what is late, until steps, time or gap run out."""
    budget, number = annealer.budget, 0
    share = REFINING_SHARE / LATE_SHARE
    most = min(LATE_STEPS, LATE_STEPS_PER_MAP * len(annealer.search.problem.maps))
    while best.seconds > goal:
        steps = min(budget.take(share), most)
        if steps == 0:
            break
        warmth = LATE_WARMTHS[number % len(LATE_WARMTHS)]
        warm = warmth * (best.seconds - bound_seconds)
        best = annealer.run_round(best, steps, warm, goal, seed + number, late=True)
        number += 1
    return best


def _best_rival(
    problem: Problem,
    limit_bytes: int,
    budget: Budget,
) -> Plan | None:
    """The fastest plan of the other planners; none if they find none."""
    best: Plan | None = None
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
)
PLANNERS = (HYBRID,)
