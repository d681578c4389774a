"""Assignments that do not fit, changed until they do."""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.search.bound import Bound
from chainer_hybridmem.search.candidates import KEEP, RECOMPUTE, SWAP, Candidate, Search


def give_up_recomputes(search: Search, action: np.ndarray) -> tuple[Candidate, int]:
    """Swaps recomputed maps until the assignment fits.

    Returns:
        tuple: The last candidate evaluated, and how many maps were given up. It
        does not fit only if no assignment of swaps does.
    """
    arrays = search.problem.arrays
    current, given_up = search.evaluate(action), 0
    while not current.fits and current.worst >= arrays.first_backward:
        recomputed = np.nonzero(current.action == RECOMPUTE)[0]
        if len(recomputed) == 0:
            break
        distance = np.abs(arrays.first_use[recomputed] - current.worst)
        action = current.action.copy()
        action[recomputed[np.argmin(distance)]] = SWAP
        current, given_up = search.evaluate(action), given_up + 1
    return current, given_up


def free_memory(search: Search, action: np.ndarray, bound: Bound) -> Candidate:
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
