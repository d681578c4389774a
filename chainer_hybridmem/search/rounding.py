"""Fractions of the relaxation made whole: where a search may start."""

from __future__ import annotations

import dataclasses
import itertools

from chainer_hybridmem.search.alike import group_alike
from chainer_hybridmem.search.bound import Bound
from chainer_hybridmem.search.candidates import KEEP, RECOMPUTE, SWAP, Candidate, Search
from chainer_hybridmem.search.repairs import free_memory
from chainer_hybridmem.simulation.problem import Problem


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
