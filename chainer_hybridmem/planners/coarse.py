"""Compiled search over many maps at once, for networks of thousands of functions.

Maps made by the same kind of function, of the same size, are alike. A move takes a
stretch of alike maps in order of production and gives every so-many-th map of one
action another action: evenly spread changes are what large networks of repeated blocks
need, and single maps are too small a step there. :mod:`.local_search` does the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planners import local_search
from chainer_hybridmem.simulation import kernel, problem
from chainer_hybridmem.simulation.kernel import RECOMPUTE, Work
from chainer_hybridmem.simulation.problem import Arrays

SPARSEST = 16  # of so many maps one changes


@compiled()
def _spread(
    current: np.ndarray,
    recomputable: np.ndarray,
    pointers: np.ndarray,
    alike: np.ndarray,
    proposed: np.ndarray,
) -> int:
    """Writes one evenly spread change into ``proposed``; maps changed."""
    # A group is drawn by its number of maps.
    place = np.random.randint(len(alike))
    group = np.searchsorted(pointers, place, side='right') - 1
    begin, end = pointers[group], pointers[group + 1]
    whole = end - begin
    length = whole
    if np.random.random() < 0.7:
        length = int(np.exp(np.random.random() * np.log(whole + 0.999)))
    first = begin + np.random.randint(whole - length + 1)
    old = current[alike[place]]
    new = (old + 1 + np.random.randint(2)) % 3
    if new == RECOMPUTE and not recomputable[alike[place]]:
        return 0
    every = int(np.exp(np.random.random() * np.log(SPARSEST + 0.999)))
    phase = np.random.randint(every)
    changed = 0
    for i in range(first, first + length):
        m = alike[i]
        if current[m] != old:
            continue
        phase += 1
        if phase >= every:
            phase = 0
            proposed[m] = new
            changed += 1
    return changed


@compiled(uses=(kernel, problem, local_search), nogil=True)
def anneal_spread(
    a: Arrays,
    start: np.ndarray,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    barrier: bool,
    recomputable: np.ndarray,
    pointers: np.ndarray,
    alike: np.ndarray,
    steps: int,
    warm: float,
    cold: float,
    goal: float,
    seed: int,
    w: Work,
) -> Any:
    """Simulated annealing from a feasible start, by evenly spread changes.

    Args:
        pointers: Beginnings of the groups in ``alike``, and its end.
        alike: (M,) maps by group, within each in order of production.
        steps: Candidates to judge.
        warm: First temperature in seconds.
        cold: Last temperature in seconds.
        goal: Stop when a plan is this fast.
        seed: Of the random moves.

    Returns:
        tuple: Best actions, their seconds, candidates judged.
    """
    np.random.seed(seed)
    current, proposed, best = start.copy(), start.copy(), start.copy()
    now = local_search.judge(
        a, current, limit, lead, out_seconds, in_seconds, barrier, w
    )
    best_seconds = now
    cooling = (cold / warm) ** (1.0 / max(steps, 1))
    temperature = warm
    done = 0
    while done < steps and best_seconds > goal:
        done += 1
        temperature *= cooling
        changed = _spread(current, recomputable, pointers, alike, proposed)
        if np.random.random() < 0.5:  # a change that may pay for the first
            changed += _spread(current, recomputable, pointers, alike, proposed)
        if changed == 0:
            continue
        seconds = local_search.judge(
            a, proposed, limit, lead, out_seconds, in_seconds, barrier, w
        )
        if seconds <= now or np.random.random() < np.exp((now - seconds) / temperature):
            now = seconds
            current[:] = proposed
            if now < best_seconds:
                best_seconds = now
                best[:] = current
        else:
            proposed[:] = current
    return best, best_seconds, done
