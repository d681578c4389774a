"""Compiled: simulates every assignment of actions of a small problem."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.simulation import kernel
from chainer_hybridmem.simulation.arrays import Arrays
from chainer_hybridmem.simulation.problem import Problem
from chainer_hybridmem.simulation.work import Work


def count_assignments(problem: Problem) -> int:
    """Number of ways to keep, swap or recompute every map."""
    return math.prod(3 if able else 2 for able in problem.recomputable.tolist())


@compiled(uses=(kernel, *kernel.PARTS))
def find_fastest(
    a: Arrays,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    barrier: bool,
    recomputable: np.ndarray,
    w: Work,
) -> Any:
    """Simulates every assignment: the first of the fastest, and how many there are."""
    action = np.zeros(len(recomputable), np.int64)
    best = action.copy()
    best_seconds, count, m = np.inf, 0, 0
    while m < len(action):
        seconds = kernel.judge(
            a, action, limit, lead, out_seconds, in_seconds, barrier, best_seconds, w
        ).seconds
        count += 1
        if seconds < best_seconds:
            best_seconds = seconds
            best[:] = action
        m = 0
        while m < len(action):  # count up in a mixed radix
            action[m] += 1
            if action[m] <= (2 if recomputable[m] else 1):
                break
            action[m] = 0
            m += 1
    return best, count
