"""Compiled local search over keep, swap and recompute together.

Simulated annealing on simulated time: a move changes the actions of a few maps, the
simulator judges the result, and what does not fit is refused. Moves are single
maps, exchanges between two maps, and runs of maps that follow each other in
production, because what helps one layer often helps its neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.simulation import kernel
from chainer_hybridmem.simulation.kernel import KEEP, RECOMPUTE, SWAP, Work
from chainer_hybridmem.simulation.problem import Arrays


@compiled()
def judge(
    a: Arrays,
    action: np.ndarray,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    barrier: bool,
    w: Work,
) -> float:
    """Simulated seconds; infinite if the actions do not fit."""
    seconds = kernel.evaluate(
        a, action, limit, lead, out_seconds, in_seconds, True, barrier, w
    ).seconds
    if seconds == np.inf:
        for m in range(len(action)):
            if action[m] == RECOMPUTE:
                seconds = kernel.evaluate(
                    a, action, limit, lead, out_seconds, in_seconds, False, barrier, w
                ).seconds
                break
    return seconds


@compiled()
def _other(action: int, recomputable: bool) -> int:
    """Another action, at random."""
    if action == KEEP:
        return RECOMPUTE if recomputable and np.random.random() < 0.5 else SWAP
    if action == SWAP:
        return RECOMPUTE if recomputable and np.random.random() < 0.5 else KEEP
    return SWAP if np.random.random() < 0.5 else KEEP


@compiled()
def anneal(
    a: Arrays,
    start: np.ndarray,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    barrier: bool,
    recomputable: np.ndarray,
    steps: int,
    warm: float,
    cold: float,
    goal: float,
    seed: int,
    w: Work,
) -> Any:
    """Simulated annealing from a feasible start.

    Args:
        steps: Candidates to judge.
        warm: First temperature in seconds.
        cold: Last temperature in seconds.
        goal: Stop when a plan is this fast.
        seed: Of the random moves.

    Returns:
        tuple: Best actions, their seconds, candidates judged.
    """
    np.random.seed(seed)
    n_maps = len(start)
    current = start.copy()
    best = start.copy()
    now = judge(a, current, limit, lead, out_seconds, in_seconds, barrier, w)
    best_seconds = now
    touched = np.empty(n_maps, np.int64)
    before = np.empty(n_maps, np.int64)
    cooling = (cold / warm) ** (1.0 / max(steps, 1))
    temperature = warm
    done = 0
    while done < steps and best_seconds > goal:
        done += 1
        temperature *= cooling
        kind = np.random.random()
        length = 0
        m = np.random.randint(n_maps)
        if kind < 0.4:
            touched[0], before[0], length = m, current[m], 1
            current[m] = _other(current[m], recomputable[m])
        elif kind < 0.8:
            other = np.random.randint(n_maps)
            for _ in range(8):
                if current[other] != current[m]:
                    break
                other = np.random.randint(n_maps)
            if current[other] == current[m]:
                continue
            if current[other] == RECOMPUTE and not recomputable[m]:
                continue
            if current[m] == RECOMPUTE and not recomputable[other]:
                continue
            touched[0], before[0] = m, current[m]
            touched[1], before[1] = other, current[other]
            current[m], current[other] = before[1], before[0]
            length = 2
        else:
            run = 2 + np.random.randint(5)
            target = _other(current[m], recomputable[m])
            for i in range(m, min(m + run, n_maps)):
                if current[i] == target:
                    continue
                if target == RECOMPUTE and not recomputable[i]:
                    continue
                touched[length], before[length] = i, current[i]
                current[i] = target
                length += 1
        seconds = judge(a, current, limit, lead, out_seconds, in_seconds, barrier, w)
        if seconds <= now or np.random.random() < np.exp((now - seconds) / temperature):
            now = seconds
            if now < best_seconds:
                best_seconds = now
                best[:] = current
        else:
            for i in range(length):
                current[touched[i]] = before[i]
    return best, best_seconds, done
