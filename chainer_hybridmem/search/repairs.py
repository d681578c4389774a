"""Assignments that do not fit, changed until they do."""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.search.bound import Bound
from chainer_hybridmem.search.candidates import KEEP, RECOMPUTE, SWAP, Candidate, Search


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
    search: Search, action: np.ndarray, bound: Bound | None = None
) -> Candidate:
    """Frees memory at the worst operation until the actions fit or nothing is left.

    Args:
        search: Judges the actions.
        action: (M,) KEEP, SWAP or RECOMPUTE.
        bound: Tells which maps should leave; None: large ones first.
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
    while not current.fits:
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
