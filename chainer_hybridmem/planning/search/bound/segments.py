"""Rows that say in which part of backward something is replayed.

The linear program counts a replay once, however often what it makes has to leave again
in between. Between operations at which little memory is free little can stay: backward
is divided there, and each part has replays of its own. Why every plan satisfies the
rows is in ``docs/internals/bound.md``.
"""

from __future__ import annotations

import itertools

import numpy as np

from chainer_hybridmem.planning.search.bound.model import (
    Model,
    Row,
    Variables,
    make_row,
)
from chainer_hybridmem.planning.simulation.work import SWAP

TIGHTEST = 16  # operations with the least free memory at which backward is divided
DEAREST = 4  # and those whose memory the linear program pays most for


def choose_divisions(model: Model, prices: np.ndarray) -> list[int]:
    """Operations of backward at which memory is short, ascending.

    Args:
        model: What is divided.
        prices: (n,) seconds per byte.
    """
    a, b0 = model.problem.arrays, model.problem.arrays.first_backward
    used = np.zeros(model.n + 1)
    np.add.at(used, a.first_use, model.scaled.size)
    np.add.at(used, a.last_use + 1, -model.scaled.size)
    load = np.cumsum(used)[: model.n] + a.fixed_peak / model.scaled.scale
    last = model.n - 1  # what comes after it is no part of backward
    tightest = b0 + np.argsort(-load[b0:last], kind='stable')[:TIGHTEST]
    dearest = b0 + np.argsort(-prices[b0:last], kind='stable')[:DEAREST]
    return sorted({*tightest.tolist(), *dearest[prices[dearest] > 0].tolist()})


class Segments:
    """Columns and rows about the parts of backward.

    Part g begins before the operation after division g - 1 and ends before division g.
    The columns follow those of the model, which knows of them afterwards.

    Args:
        model (Model): Gets the columns.
        divisions (list of int): Operations of backward, ascending.
        excess (ndarray): (n,) load above the limit if every map were kept.
    """

    def __init__(self, model: Model, divisions: list[int], excess: np.ndarray) -> None:
        self._model, self._arrays = model, model.problem.arrays
        self._divisions = divisions
        self._excess = excess
        b0 = self._arrays.first_backward
        self._firsts = [b0, *(k + 1 for k in divisions)]
        self._lasts = [*divisions, model.n - 1]
        self._begin = self._end = model.columns.end
        self._replayed: dict[tuple[int, int], int] = {}  # operation, part
        self._made: dict[tuple[int, int], int] = {}  # map, division
        self._away: dict[tuple[int, int], int] = {}  # map, division
        self._add_columns()
        known, count = model.variables, self._end - self._begin
        model.columns = model.columns._replace(end=self._end)
        model.variables = Variables(
            np.append(known.lower, np.zeros(count)),
            np.append(known.upper, np.ones(count)),
            np.append(known.cost, np.zeros(count)),
            np.append(known.same_as, self._begin + np.arange(count)),
        )
        self.rows = [
            *self._at_divisions(),
            *self._makings(),
            *self._sources(),
            *self._seconds(),
        ]

    def _new(self) -> int:
        self._end += 1
        return self._end - 1

    def _add_columns(self) -> None:
        a = self._arrays
        able = np.flatnonzero(a.recipe_seconds[: a.first_backward] >= 0).tolist()
        stays = self._stays()
        for op, part in itertools.product(able, range(len(self._firsts))):
            if self._fits(op, part, stays):
                self._replayed[op, part] = self._new()
        for g, k in enumerate(self._divisions):
            leaves = (a.release_from <= k) & (k < a.first_use)
            for m in np.flatnonzero(leaves & self._model.problem.recomputable).tolist():
                self._made[m, g] = self._new()
            for m in np.flatnonzero(leaves & a.allowed[:, SWAP]).tolist():
                self._away[m, g] = self._new()

    def _stays(self) -> np.ndarray:
        """(n,) bytes of maps that have been used before each operation and will be."""
        a, size = self._arrays, self._model.scaled.size
        change = np.zeros(self._model.n + 2)
        np.add.at(change, a.first_use[a.read] + 1, size[a.read])
        np.add.at(change, a.last_use[a.read] + 1, -size[a.read])
        return np.cumsum(change)[: self._model.n]

    def _fits(self, op: int, part: int, stays: np.ndarray) -> bool:
        """Whether memory allows a replay anywhere in a part, were all else away."""
        a, scale = self._arrays, self._model.scaled.scale
        places = np.arange(self._firsts[part], self._lasts[part] + 1)
        load = a.fixed_start[places] / scale + stays[places] + a.recipe_peak[op] / scale
        for item in set(a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist()):
            if a.present[item]:
                continue
            counted = np.zeros(len(places), bool)
            if item < self._model.n_maps:
                counted = (a.first_use[item] < places) & (places <= a.last_use[item])
            load = load + np.where(counted, 0.0, a.size[item] / scale)
        return bool((load <= self._model.scaled.limit * (1 + 1e-12)).any())

    def _at_divisions(self) -> list[Row]:
        """What is away, or made again, while the operations of divisions run."""
        at, size, rows = self._model.columns, self._model.scaled.size, []
        for (m, g), away in self._away.items():
            rows.append(make_row([away, at.swap + m], [1, -1], 0))
            if (m, g - 1) in self._away:
                before = self._away[m, g - 1]
                rows.append(make_row([away, before, at.late + m], [1, -1, -1], 0))
        for (m, g), made in self._made.items():
            rows.append(make_row([made, at.recompute + m], [1, -1], 0))
            if (m, g - 1) in self._made:
                rows.append(make_row([self._made[m, g - 1], made], [1, -1], 0))
        for g, k in enumerate(self._divisions):
            gone = [(c, size[m]) for (m, other), c in self._away.items() if other == g]
            back = [(c, size[m]) for (m, other), c in self._made.items() if other == g]
            columns = [at.away + k, *(c for c, _ in gone)]
            rows.append(make_row(columns, [1.0, *(-s for _, s in gone)], 0))
            columns = [at.remade + k, at.away + k, *(c for c, _ in back)]
            values = [-1.0, -1.0, *(s for _, s in back)]
            rows.append(make_row(columns, values, -float(self._excess[k])))
        return rows

    def _makings(self) -> list[Row]:
        """What is made again in a part takes a replay there."""
        a, rows = self._arrays, []
        for m in np.flatnonzero(self._model.problem.recomputable & a.read).tolist():
            for part, first in enumerate(self._firsts):
                made = self._made.get((m, part))
                if made is None:
                    if not first <= a.first_use[m] <= self._lasts[part]:
                        continue
                    made = self._model.columns.recompute + m
                others = [
                    self._made.get((m, part - 1)),
                    self._replayed.get((int(a.producer[m]), part)),
                ]
                known = [column for column in others if column is not None]
                rows.append(make_row([made, *known], [1.0] + [-1.0] * len(known), 0))
        return rows

    def _sources(self) -> list[Row]:
        """What a replay reads is there in its part, or made in it."""
        a, rows = self._arrays, []
        for (op, part), replayed in self._replayed.items():
            for item in set(a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist()):
                if a.present[item]:
                    continue
                columns, values, right = [replayed], [1.0], 0.0
                made = self._replayed.get((int(a.producer[item]), part))
                if made is not None:
                    columns.append(made)
                    values.append(-1.0)
                if item < self._model.n_maps:
                    if part > 0 and a.first_use[item] < self._firsts[part]:
                        continue  # it has been used, and may be there for longer
                    terms = self._terms_of_map(item, part)
                    columns += [column for column, _ in terms]
                    values += [value for _, value in terms]
                    right = 1.0
                rows.append(make_row(columns, values, right))
        return rows

    def _terms_of_map(self, m: int, part: int) -> list[tuple[int, float]]:
        """1 less these: a map that is not made in a part may be there."""
        at = self._model.columns
        terms = [
            (at.recompute + m, 1.0),
            (at.late + m, -1.0),
            (at.late + self._model.n_maps + m, -1.0),
        ]
        if (m, part) in self._away:
            terms.append((self._away[m, part], 1.0))
        if (m, part - 1) in self._made:
            terms.append((self._made[m, part - 1], -1.0))
        return terms

    def _seconds(self) -> list[Row]:
        """The waits of each part hold one run of all that is replayed in it."""
        at, rows = self._model.columns, []
        for part, (first, last) in enumerate(
            zip(self._firsts, self._lasts, strict=True)
        ):
            columns = [at.waited + first, at.waited + last + 1]
            values = [1.0, -1.0]
            for (op, other), replayed in self._replayed.items():
                if other == part:
                    columns.append(replayed)
                    values.append(float(self._arrays.recipe_seconds[op]))
            rows.append(make_row(columns, values, 0))
        return rows

    @property
    def stops(self) -> set[int]:
        """Positions between which waits are added up."""
        return {*self._firsts, self._model.n}
