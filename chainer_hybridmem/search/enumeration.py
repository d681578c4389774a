"""Compiled: simulates every assignment of actions of a small problem."""

from __future__ import annotations

import math

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.simulation import kernel
from chainer_hybridmem.simulation.arrays import Arrays
from chainer_hybridmem.simulation.problem import Problem
from chainer_hybridmem.simulation.work import Work


def count_assignments(problem: Problem) -> int:
    """Number of ways to keep, swap or recompute every map, as far as it may."""
    return math.prod(problem.arrays.allowed.sum(axis=1).tolist())


@compiled(uses=(kernel, *kernel.PARTS))
def find_fastest(
    a: Arrays,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    barrier: bool,
    w: Work,
    best: np.ndarray,
) -> int:
    """Simulates every assignment, and writes the first of the fastest into ``best``.

    Returns:
        int: How many there are.
    """
    allowed = a.allowed
    action = np.zeros(len(allowed), np.int64)
    for i in range(len(action)):
        while not allowed[i, action[i]]:
            action[i] += 1
    best[:] = action
    best_seconds, count, m = np.inf, 0, 0
    while m < len(action):
        seconds = kernel.judge(
            a, action, limit, lead, out_seconds, in_seconds, barrier, best_seconds, w
        )[0]
        count += 1
        if seconds < best_seconds:
            best_seconds = seconds
            best[:] = action
        m = 0
        while m < len(action):  # count up in a mixed radix
            action[m] += 1
            while action[m] <= 2 and not allowed[m, action[m]]:
                action[m] += 1
            if action[m] <= 2:
                break
            action[m] = 0
            while not allowed[m, action[m]]:
                action[m] += 1
            m += 1
    return count
