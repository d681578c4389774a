"""Sums over the operations that the rows of memory, swap-out and swap-in are about."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chainer_hybridmem.search.bound.events import Events
from chainer_hybridmem.search.bound.model import Model


class Sums(NamedTuple):
    """At which position which column changes what may be away, and by how much.

    Attributes:
        remade (Events): Bytes of recomputed maps that are not there.
        eligible (Events): Bytes of swapped maps that may be away.
        leaving (Events): Of ``eligible``, with the position from which each map's copy
            may start.
        coming (Events): Likewise, with the position by which each map must be back.
    """

    remade: Events
    eligible: Events
    leaving: Events
    coming: Events


def make_sums(model: Model) -> Sums:
    """The sums of a model."""
    a, size, at = model.problem.arrays, model.scaled.size, model.columns
    b0 = a.first_backward
    maps = np.arange(model.n_maps)
    # Nothing that is released after b0 is away up to b0.
    late = maps[a.first_use > b0] if model.chains.followed else maps[:0]
    sums = []
    for variable, delayed in (
        (at.recompute, at.late + model.n_maps),
        (at.swap, at.late),
    ):
        sums.append(
            [
                (a.release_from, variable + maps, size),
                (a.first_use, variable + maps, -size),
                (a.release_from[late], delayed + late, -size[late]),
                (np.full(len(late), b0 + 1), delayed + late, size[late]),
            ]
        )
    back = _list_back_steps(model)
    sums[1].append((back[0], back[1], -back[2]))
    remade, eligible = (Events(parts) for parts in sums)
    # The same for single maps: what is away by the end of its copy, or its use.
    at_start = (a.release_from, at.swap + maps, size)
    at_end = (a.first_use, at.swap + maps, -size)
    leaving = Events(
        [at_start, at_end, (back[0], back[1], -back[2])],
        [a.copy_from, a.copy_from, a.copy_from[back[3]]],
    )
    early = a.release_from[back[3]]
    coming = Events(
        [
            at_start,
            at_end,
            (early, back[1], back[2]),
            (a.first_use[back[3]], back[1], -back[2]),
        ],
        [a.first_use, a.first_use, back[0], back[0]],
    )
    return Sums(remade, eligible, leaving, coming)


def _list_back_steps(model: Model) -> tuple[np.ndarray, ...]:
    """Position, column, bytes and map of every step towards being back."""
    steps: list[tuple[int, int, float, int]] = []
    for m, positions in enumerate(model.chains.breaks):
        size = float(model.scaled.size[m])
        use = int(model.problem.arrays.first_use[m])
        for place, k in enumerate(positions):
            column = model.columns.back_of[m] + place
            following = [*positions[place + 1 :], use]
            steps.append((k, column, size, m))
            steps.append((following[0], column, -size, m))
    table = np.array(steps, float).reshape(-1, 4)
    whole = table[:, [0, 1, 3]].astype(np.int64)
    return whole[:, 0], whole[:, 1], table[:, 2], whole[:, 2]


def sum_excess(model: Model) -> np.ndarray:
    """(n,) load above the limit if every map were kept."""
    a, profile = model.problem.arrays, model.problem.profile
    alive = np.zeros(model.n + 2)
    np.add.at(alive, a.producer[: model.n_maps] + 1, model.scaled.size)
    np.add.at(alive, a.last_use + 1, -model.scaled.size)
    firsts = np.array([op.first_event for op in profile.operations])
    ends = np.append(firsts[1:], len(profile.events) + 1)
    dies = (firsts <= profile.graph_end_event) & (profile.graph_end_event < ends)
    fixed = np.where(dies, a.fixed_start, a.fixed_peak)
    base = fixed / model.scaled.scale
    return base + np.cumsum(alive)[: model.n] - model.scaled.limit
