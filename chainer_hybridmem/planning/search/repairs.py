"""Assignments that do not fit, changed until they do; and what leaves for nothing."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.bound import Bound
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Candidate,
    Search,
    group_alike,
)
from chainer_hybridmem.planning.simulation.problem import Problem


def find_start(search: Search) -> Candidate:
    """Everything swapped; under rules the first assignment found that fits, if any.

    Rules may forbid that maps are swapped. Then as much as possible is recomputed, and
    kept where that takes too much; or it is kept, and recomputed where that is too
    much.
    """
    first = search.evaluate(search.fill(SWAP))
    if first.fits or not search.problem.rules:
        return first
    second, _ = give_up_recomputes(search, first.action)
    if second.fits:
        return second
    may_swap = search.problem.arrays.allowed[:, SWAP]
    third = free_memory(search, np.where(may_swap, SWAP, KEEP))
    return min(first, second, third, key=lambda c: (c.seconds, c.peak_bytes))


def give_up_recomputes(search: Search, action: np.ndarray) -> tuple[Candidate, int]:
    """Swaps recomputed maps until the assignment fits; what may not be swapped stays.

    Returns:
        tuple: The last candidate evaluated, and how many maps were given up. It
        does not fit only if no assignment of swaps does.
    """
    arrays = search.problem.arrays
    current, given_up = search.evaluate(action), 0
    fixed = ~(arrays.allowed[:, SWAP] | arrays.allowed[:, KEEP])
    while not current.fits and current.worst >= arrays.first_backward:
        recomputed = np.nonzero((current.action == RECOMPUTE) & ~fixed)[0]
        if len(recomputed) == 0:
            break
        distance = np.abs(arrays.first_use[recomputed] - current.worst)
        m = recomputed[np.argmin(distance)]
        action = current.action.copy()
        action[m] = SWAP if arrays.allowed[m, SWAP] else KEEP
        fixed[m] = True
        current, given_up = search.evaluate(action), given_up + 1
    return current, given_up


def free_memory(
    search: Search,
    action: np.ndarray,
    bound: Bound | None = None,
    most_steps: int | None = None,
) -> Candidate:
    """Frees memory at the worst operation until the actions fit or nothing is left.

    Args:
        search: Judges the actions.
        action: (M,) KEEP, SWAP or RECOMPUTE.
        bound: Tells which maps should leave; None: large ones first.
        most_steps: Maps after which it gives up; None: any number.
    """
    problem, a = search.problem, search.problem.arrays
    n_maps = len(action)
    producer = a.producer[:n_maps]
    swapped = np.zeros(n_maps) if bound is None else bound.swapped
    recomputed = np.zeros(n_maps) if bound is None else bound.recomputed
    wanted = np.maximum(swapped, recomputed)
    current = search.evaluate(action)
    may_leave = a.allowed[:, SWAP] | a.allowed[:, RECOMPUTE]
    may_swap = a.allowed[:, SWAP].copy()
    for step in itertools.count():
        if current.fits or step == most_steps:
            break
        action, k = current.action.copy(), current.worst
        kept = (action == KEEP) & may_leave
        there = kept & (producer < k) & (a.release_from <= k)
        there &= a.first_use > k
        made_again = np.nonzero((action == RECOMPUTE) & may_swap)[0]
        if there.any():
            maps = np.nonzero(there)[0]
            m = maps[np.lexsort((-a.size[maps], -wanted[maps]))[0]]
            better = recomputed[m] > swapped[m] and problem.recomputable[m]
            action[m] = RECOMPUTE if better or not a.allowed[m, SWAP] else SWAP
            may_leave[m] = False
        elif len(made_again):
            m = made_again[np.argmin(np.abs(a.first_use[made_again] - k))]
            action[m] = SWAP
            may_swap[m] = False
        elif kept.any():
            m = np.nonzero(kept)[0][0]
            action[m] = SWAP if a.allowed[m, SWAP] else RECOMPUTE
            may_leave[m] = False
        else:
            break
        current = search.evaluate(action)
    return current


# -- fractions of the relaxation made whole -----------------------------------
def round_bound(search: Search, bound: Bound) -> list[Candidate]:
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
    repaired = free_memory(search, action, bound)
    return [repaired] if repaired.fits else []


def even_out(problem: Problem, bound: Bound) -> Bound:
    """The fractions, the same for maps that are alike.

    The optimum is a corner: it swaps the first of the maps that are alike and
    recomputes the last, say. A mixture is as good to the relaxation, and nearer to
    what it leaves out.
    """
    pointers, alike = group_alike(problem)
    swapped, recomputed = bound.swapped.copy(), bound.recomputed.copy()
    for begin, end in itertools.pairwise(pointers.tolist()):
        maps = alike[begin:end]
        swapped[maps] = bound.swapped[maps].mean()
        recomputed[maps] = bound.recomputed[maps].mean()
    return dataclasses.replace(bound, swapped=swapped, recomputed=recomputed)


# -- what leaves for nothing --------------------------------------------------
MOST_WORK = 20_000_000  # operations simulated


def move_large_maps(search: Search) -> Candidate:
    """Few maps leave, the largest ones where memory is short; may not fit.

    Every map that leaves costs the interpreter as much, whatever its size: in a program
    of small functions more than what is copied.
    """
    most_steps = MOST_WORK // len(search.problem.arrays.seconds)
    return free_memory(search, search.fill(KEEP), most_steps=most_steps)


def count_moves(candidate: Candidate) -> int:
    """How many maps leave."""
    return int(np.count_nonzero(candidate.action != KEEP))


def undo_useless_moves(search: Search, best: Candidate) -> Candidate:
    """Keeps as many maps as it finds to cost nothing, many at a time first.

    Where copies hide behind compute, a plan that swaps everything is as fast, by the
    simulator, as one that swaps little. But every copy costs the interpreter, the
    memory bus and the link something that no simulator sees.

    Args:
        search: Judges.
        best: Fits.

    Returns:
        Candidate: Not slower, with no more maps that leave.
    """
    leaving = np.flatnonzero(best.action != KEEP)
    order = np.argsort(-search.problem.arrays.producer[leaving], kind='stable')
    chunks = [leaving[order]]  # what lives shortest comes first
    trials = MOST_WORK // len(search.problem.arrays.seconds)
    while chunks and trials > 0:
        chunk = chunks.pop()
        action = best.action.copy()
        action[chunk] = KEEP
        found = search.evaluate(action)
        trials -= 1
        if found.fits and found.seconds <= best.seconds:
            best = found
        elif len(chunk) > 1:
            middle = len(chunk) // 2
            chunks += [chunk[middle:], chunk[:middle]]
    return best


# -- drops that nothing needs -------------------------------------------------
LARGEST_BYTES = 2**20  # functions that make more take longer than a look for it


def defer_drops(
    problem: Problem, plan: Plan, room: float = 1.0, largest_bytes: int = LARGEST_BYTES
) -> Plan:
    """Leaves as many kept maps to the graph as memory allows, small ones first.

    Planners drop what is kept after its last use. Where memory is not short by then,
    that can wait for the death of the graph, as in plain Chainer: a function whose maps
    a plan leaves alone costs an iteration nothing (ledger, [noted functions]).

    Args:
        problem: What the plan is for.
        plan: Any plan that can be executed.
        room: Share of the memory that is free under the plan's highest load, and that
            may be taken.
        largest_bytes: Larger maps are dropped as planned.

    Returns:
        Plan: With the same actions, times and replays; its peak is not higher. The same
        plan if the graph outlives the iteration.

    Raises:
        PlanError: If the plan is for another profile or cannot be executed.
    """
    profile = problem.profile
    storages = profile.storages
    dropped = [
        entry
        for entry in plan.maps
        if entry.action is Action.KEEP
        and entry.drop_before >= 0
        and not storages[entry.storage].persistent
        and storages[entry.storage].nbytes <= largest_bytes
    ]
    if not dropped or profile.graph_end_event >= len(profile.events):
        return plan
    loads = np.array(check_plan(profile, plan))
    peak_bytes = int(loads.max())
    free_bytes = ((peak_bytes - loads) * room).astype(np.int64)
    left: set[int] = set()
    for entry in sorted(dropped, key=lambda m: storages[m.storage].nbytes):
        nbytes = storages[entry.storage].nbytes
        later = free_bytes[entry.drop_before :]
        if nbytes <= later.min(initial=peak_bytes):
            later -= nbytes
            left.add(entry.storage)
    if not left:
        return plan
    maps = tuple(
        dataclasses.replace(entry, drop_before=-1) if entry.storage in left else entry
        for entry in plan.maps
    )
    result = dataclasses.replace(plan, maps=maps)
    if max(check_plan(profile, result)) > peak_bytes:
        return plan
    return result


# -- maps that outlive the iteration ------------------------------------------
def drop_after_use(problem: Problem, plan: Plan, limit_bytes: int) -> Plan:
    """Drops what is kept after its last use, if the next iteration has no room for it.

    Where the program keeps a variable, as with a loss that the next one replaces, its
    graph lives on while the next one grows. No backward asks for it any more, but what
    is short of memory would copy its maps out.

    Args:
        problem: What the plan is for.
        plan: Any plan that can be executed.
        limit_bytes: Of both graphs.

    Returns:
        Plan: With the same actions and times; the same plan if the graph dies in the
        iteration, or both fit.

    Raises:
        PlanError: If the plan is for another profile or cannot be executed.
    """
    profile = problem.profile
    if profile.graph_end_event < len(profile.events):
        return plan
    storages = profile.storages
    kept = {
        entry.storage
        for entry in plan.maps
        if entry.action is Action.KEEP
        and entry.drop_before < 0
        and not storages[entry.storage].persistent
    }
    lasting_bytes = sum(storages[storage].nbytes for storage in kept)
    if plan.predicted_peak_bytes + lasting_bytes <= limit_bytes:
        return plan
    maps = tuple(
        dataclasses.replace(m, drop_before=storages[m.storage].backward_uses[-1] + 1)
        if m.storage in kept
        else m
        for m in plan.maps
    )
    result = dataclasses.replace(plan, maps=maps)
    peak_bytes = int(max(check_plan(profile, result)))
    return dataclasses.replace(result, predicted_peak_bytes=peak_bytes)
