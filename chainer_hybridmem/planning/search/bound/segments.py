"""Rows that say in which part of an iteration something is copied or made again.

The linear program counts a replay once, however often what it makes has to leave again
in between, and a copy wherever there is time. Between operations at which little memory
is free little can stay: the iteration is divided there, and each part has replays and
copies of its own. Why every plan satisfies the rows is in ``docs/internals/bound.md``.
"""

from __future__ import annotations

import itertools

import numpy as np

from chainer_hybridmem.planning.search.bound.model import (
    Model,
    Row,
    Variables,
    least_copy_seconds,
    make_row,
)
from chainer_hybridmem.planning.simulation.work import SWAP

WIDE_GAP = 0.02  # of a plan above its bound, beyond which parts are told apart
TIGHTEST = 16  # operations of backward with the least free memory
FULLEST = 8  # operations of forward with most that cannot have left
DEAREST = 4  # and those of it whose memory the linear program pays most for
FOLLOWED = 2  # maps that a chain of replays behind a copy is followed through


def choose_divisions(model: Model, prices: np.ndarray) -> list[int]:
    """Operations at which memory is short, and the last one of forward, ascending.

    Args:
        model: What is divided.
        prices: (n,) seconds per byte.
    """
    a, b0 = model.problem.arrays, model.problem.arrays.first_backward
    size, n_maps = model.scaled.size, model.n_maps
    used = np.zeros(model.n + 2)
    np.add.at(used, a.producer[:n_maps] + 1, size)
    np.add.at(used, a.release_from, -size)
    np.add.at(used, a.first_use, size)
    np.add.at(used, a.last_use + 1, -size)
    load = np.cumsum(used)[: model.n] + a.fixed_peak / model.scaled.scale
    last = model.n - 1  # what comes after it is no part of backward
    chosen = {b0 - 1, *(b0 + _highest(load[b0:last], TIGHTEST)).tolist()}
    around = np.concatenate([[0.0], load[:b0], [0.0]])
    stands_out = (load[:b0] >= around[:-2]) & (load[:b0] > around[2:])
    peaks = np.flatnonzero(stands_out)
    chosen.update(peaks[_highest(load[peaks], FULLEST)].tolist())
    dearest = b0 + _highest(prices[b0:last], DEAREST)
    chosen.update(dearest[prices[dearest] > 0].tolist())
    return sorted(chosen)


def _highest(values: np.ndarray, most: int) -> np.ndarray:
    return np.argsort(-values, kind='stable')[:most]


class Segments:
    """Columns and rows about the parts of an iteration.

    Part i begins before the operation after division i - 1 and ends before division i.
    The columns follow those of the model, which knows of them afterwards.

    Args:
        model (Model): Gets the columns.
        divisions (list of int): Operations, ascending; the last of forward is one.
        excess (ndarray): (n,) load above the limit if every map were kept.

    Attributes:
        rows (list): Those about the parts.
        stops (set of int): Positions between which waits are added up.
        whole (list of int): Columns that are 0 or 1 in every plan.
    """

    def __init__(self, model: Model, divisions: list[int], excess: np.ndarray) -> None:
        self._model, self._arrays = model, model.problem.arrays
        self._divisions, self._excess = divisions, excess
        self._firsts = [0, *(k + 1 for k in divisions)]
        self._lasts = [*divisions, model.n - 1]
        self._backward = divisions.index(self._arrays.first_backward - 1) + 1
        self._out_seconds, self._in_seconds = least_copy_seconds(model.problem)
        self._begin = self._end = model.columns.end
        self._replayed: dict[tuple[int, int], int] = {}  # operation, part
        # Maps at divisions: made again for good, away, completely back, and not yet
        # released, to be swapped or recomputed.
        self._made: dict[tuple[int, int], int] = {}
        self._away: dict[tuple[int, int], int] = {}
        self._back: dict[tuple[int, int], int] = {}
        self._held: tuple[dict[tuple[int, int], int], ...] = ({}, {})
        self._add_whole()
        self.whole = list(range(self._begin, self._end))
        # Shares of copies: in parts, and back while divisions run, or in forward.
        self._out: dict[tuple[int, int], int] = {}
        self._in: dict[tuple[int, int], int] = {}
        self._beside: dict[tuple[int, int], int] = {}
        self._early: dict[int, int] = {}
        self._add_shares()
        known, count = model.variables, self._end - self._begin
        model.columns = model.columns._replace(end=self._end)
        model.variables = Variables(
            np.append(known.lower, np.zeros(count)),
            np.append(known.upper, np.ones(count)),
            np.append(known.cost, np.zeros(count)),
            np.append(known.same_as, self._begin + np.arange(count)),
        )
        self.rows: list[Row] = []
        self.stops = {*self._firsts[self._backward :], model.n}
        self._add_divisions()
        self._add_held()
        self._add_makings()
        self._add_sources()
        self._add_seconds()
        self._add_copies_out()
        self._add_copies_in()
        self._add_order()

    # -- columns --------------------------------------------------------------
    def _new(self) -> int:
        self._end += 1
        return self._end - 1

    def _add_whole(self) -> None:
        a, n_maps = self._arrays, self._model.n_maps
        able = np.flatnonzero(a.recipe_seconds[: a.first_backward] >= 0).tolist()
        stays = self._stays()
        parts = range(self._backward, len(self._firsts))
        asked = self._last_asked()
        for op, part in itertools.product(able, parts):
            if self._firsts[part] <= asked[op] and self._fits(op, part, stays):
                self._replayed[op, part] = self._new()
        may_recompute = self._model.problem.recomputable
        is_source = np.zeros(len(a.size), bool)
        is_source[a.inputs] = True
        for i, k in enumerate(self._divisions):
            leaves = (a.release_from <= k) & (k < a.first_use)
            for m in np.flatnonzero(leaves & a.allowed[:, SWAP]).tolist():
                self._away[m, i] = self._new()
            if i < self._backward:
                continue
            for m in np.flatnonzero(leaves & may_recompute).tolist():
                self._made[m, i] = self._new()
            for m in np.flatnonzero(leaves & a.allowed[:, SWAP]).tolist():
                self._back[m, i] = self._new()
            for held, may in zip(
                self._held, (a.allowed[:, SWAP], may_recompute), strict=True
            ):
                for m in np.flatnonzero(leaves & may & is_source[:n_maps]).tolist():
                    held[m, i] = self._new()

    def _add_shares(self) -> None:
        a = self._arrays
        for m in np.flatnonzero(a.allowed[:, SWAP]).tolist():
            self._early[m] = self._new()
            for i, (first, last) in enumerate(
                zip(self._firsts, self._lasts, strict=True)
            ):
                before_use = last < a.first_use[m]
                if before_use and a.copy_from[m] <= last:
                    self._out[m, i] = self._new()
                if i >= self._backward and first <= a.first_use[m]:
                    self._in[m, i] = self._new()
                    if before_use:
                        self._beside[m, i] = self._new()

    def _last_asked(self) -> list[int]:
        """The last first use of a map that a replay of each operation may lead to."""
        a, n_maps = self._arrays, self._model.n_maps
        asked = [-1] * a.first_backward
        for op in reversed(range(a.first_backward)):
            for made in a.products[a.product_ptr[op] : a.product_ptr[op + 1]].tolist():
                reasons = [
                    asked[reader] for reader in self._model.readers.get(made, ())
                ]
                if made < n_maps and a.read[made]:
                    reasons.append(int(a.first_use[made]))
                asked[op] = max([asked[op], *reasons])
        return asked

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

    # -- rows -----------------------------------------------------------------
    def _add(self, terms: list[tuple[int, float]], right: float = 0.0) -> None:
        columns, values = zip(*terms, strict=True)
        self.rows.append(make_row(columns, values, right))

    def _add_within(
        self, terms: list[tuple[int, float]], i: int, j: int, more: float = 0.0
    ) -> None:
        """The terms take no more than ``W(i, j)`` and ``more`` seconds."""
        columns, signs, within = self._model.between(i, j)
        self.stops |= {i, j + 1}
        self._add([*terms, *zip(columns, signs, strict=True)], within + more)

    def _at(
        self, columns: dict[tuple[int, int], int], i: int
    ) -> list[tuple[int, float]]:
        size = self._model.scaled.size
        return [(c, float(size[m])) for (m, other), c in columns.items() if other == i]

    def _add_divisions(self) -> None:
        """What is away, or made again, while the operations of divisions run."""
        at = self._model.columns
        for (m, i), made in self._made.items():
            self._add([(made, 1.0), (at.recompute + m, -1.0)])
            if (m, i - 1) in self._made:
                self._add([(self._made[m, i - 1], 1.0), (made, -1.0)])
        for i, k in enumerate(self._divisions):
            gone = [(c, -size) for c, size in self._at(self._away, i)]
            self._add([(at.away + k, 1.0), *gone])
            there = self._at(self._made, i)
            if k > self._arrays.first_backward:  # up to there the model knows of them
                there += self._at(self._held[1], i)
            terms = [(at.remade + k, -1.0), (at.away + k, -1.0), *there]
            self._add(terms, -float(self._excess[k]))

    def _add_held(self) -> None:
        """A map is not yet released, then away once, then back or made again."""
        at = self._model.columns
        lates = at.late, at.late + self._model.n_maps
        for held, late in zip(self._held, lates, strict=True):
            for (m, i), column in held.items():
                self._add([(column, 1.0), (held.get((m, i - 1), late + m), -1.0)])
        for (m, i), column in self._held[1].items():
            made = self._made[m, i]
            self._add([(column, 1.0), (made, 1.0), (at.recompute + m, -1.0)])
        for (m, i), away in self._away.items():
            terms = [(away, 1.0), (at.swap + m, -1.0)]
            for others in (self._back, self._held[0]):
                if (m, i) in others:
                    terms.append((others[m, i], 1.0))
            self._add(terms)
            if i > self._backward and (m, i - 1) in self._away:
                held_before = self._held[0].get((m, i - 1), at.late + m)
                before = self._away[m, i - 1]
                self._add([(away, 1.0), (before, -1.0), (held_before, -1.0)])

    def _add_makings(self) -> None:
        """What is made again in a part takes a replay there."""
        a = self._arrays
        for m in np.flatnonzero(self._model.problem.recomputable & a.read).tolist():
            for part in range(self._backward, len(self._firsts)):
                made = self._made.get((m, part))
                if made is None:
                    if not self._firsts[part] <= a.first_use[m] <= self._lasts[part]:
                        continue
                    made = self._model.columns.recompute + m
                others = [
                    self._made.get((m, part - 1)),
                    self._replayed.get((int(a.producer[m]), part)),
                ]
                known = [(column, -1.0) for column in others if column is not None]
                self._add([(made, 1.0), *known])

    def _add_sources(self) -> None:
        """What a replay reads is there in its part, or made in it."""
        a = self._arrays
        for (op, part), replayed in self._replayed.items():
            for item in set(a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist()):
                if a.present[item] or self._may_be_used(item, part):
                    continue
                terms = [(replayed, 1.0)]
                made = self._replayed.get((int(a.producer[item]), part))
                if made is not None:
                    terms.append((made, -1.0))
                is_map = item < self._model.n_maps
                self._add(terms + self._missing(item, part), float(is_map))

    def _may_be_used(self, item: int, part: int) -> bool:
        """Whether an item is a map that may be there for longer than it is needed."""
        if item >= self._model.n_maps or part == self._backward:
            return False
        return bool(self._arrays.first_use[item] < self._firsts[part])

    def _missing(self, m: int, part: int) -> list[tuple[int, float]]:
        """1 less these: a map that is not made in a part may be there; none of others.

        It is if it is kept, not yet released, back by the end of the part, or if it was
        made again before.
        """
        if m >= self._model.n_maps:
            return []
        at = self._model.columns
        terms = [(at.recompute + m, 1.0)]
        if (m, part) in self._back:
            terms += [(at.swap + m, 1.0), (self._back[m, part], -1.0)]
        lates = at.late, at.late + self._model.n_maps
        before = self._divisions[part - 1]
        known = part > self._backward and before >= self._arrays.release_from[m]
        for held, late in zip(self._held, lates, strict=True):
            column = held.get((m, part - 1)) if known else late + m
            if column is not None:
                terms.append((column, -1.0))
        if (m, part - 1) in self._made:
            terms.append((self._made[m, part - 1], -1.0))
        return terms

    def _add_seconds(self) -> None:
        """The waits of each part hold one run of all that is replayed in it."""
        at = self._model.columns
        for part in range(self._backward, len(self._firsts)):
            terms = [
                (at.waited + self._firsts[part], 1.0),
                (at.waited + self._lasts[part] + 1, -1.0),
            ]
            for (op, other), replayed in self._replayed.items():
                if other == part:
                    terms.append((replayed, float(self._arrays.recipe_seconds[op])))
            self._add(terms)

    def _add_copies_out(self) -> None:
        """What is away has been copied, one map after the other."""
        a = self._arrays
        for (m, i), away in self._away.items():
            shares = [self._out[m, h] for h in range(i + 1) if (m, h) in self._out]
            self._add([(away, 1.0), *((share, -1.0) for share in shares)])
        for i, last in enumerate(self._divisions):
            maps = [m for m, other in self._out if other == i]
            first = self._firsts[i]
            for s in sorted({first, *a.copy_from[maps].tolist()}):
                # Of the others, copies may go on while the division before runs.
                more = float(a.seconds[first - 1]) if s <= first and i else 0.0
                terms = [
                    (self._out[m, i], float(self._out_seconds[m]))
                    for m in maps
                    if s <= first or a.copy_from[m] >= s
                ]
                if terms and s >= first:
                    self._add_within(terms, s, last, more)

    def _shares_in(self, m: int, i: int, beside: bool) -> list[tuple[int, float]]:
        """Shares of a copy back by the beginning, or end, of a division."""
        columns = [self._early[m]]
        for h in range(self._backward, i + 1):
            if (m, h) in self._in:
                columns.append(self._in[m, h])
            if (m, h) in self._beside and (beside or h < i):
                columns.append(self._beside[m, h])
        return [(column, 1.0) for column in columns]

    def _add_copies_in(self) -> None:
        """What was away is copied back when it has memory, before it is needed."""
        a, at = self._arrays, self._model.columns
        for (m, i), back in self._back.items():
            swapped = (at.swap + m, -1.0)
            shares = self._shares_in(m, i, beside=True)
            self._add([*shares, (self._away[m, i], 1.0), swapped])
            shares = self._shares_in(m, i, beside=False)
            self._add([(back, 1.0), *((share, -1.0) for share, _ in shares)])
            if (m, i - 1) in self._back:
                self._add([(self._back[m, i - 1], 1.0), (back, -1.0)])
        for m in self._early:
            shares = self._shares_in(m, len(self._lasts) - 1, beside=True)
            self._add([(at.swap + m, 1.0), *((share, -1.0) for share, _ in shares)])
        for i in range(self._backward, len(self._firsts)):
            first, last = self._firsts[i], self._lasts[i]
            maps = np.array([m for m, other in self._in if other == i], np.int64)
            uses = np.minimum(a.first_use[maps], last)
            for j in np.unique(uses).tolist():
                terms = [
                    (self._in[m, i], float(self._in_seconds[m]))
                    for m in maps[uses <= j].tolist()
                ]
                self._add_within(terms, first, j)
            terms = [
                (column, float(self._in_seconds[m]))
                for (m, other), column in self._beside.items()
                if other == i
            ]
            if terms:
                self._add(terms, float(a.seconds[last]))

    def _add_order(self) -> None:
        """What is made of a map follows its copy back, if that is in the same part."""
        for (m, part), share in self._in.items():
            if part > self._backward:
                terms, more = self._follow(m, part)
                if terms:
                    ends = self._firsts[part], self._lasts[part]
                    terms.append((share, float(self._in_seconds[m])))
                    self._add_within(terms, *ends, more)

    def _follow(self, m: int, part: int) -> tuple[list[tuple[int, float]], float]:
        """Seconds of replays that need a map, and what to take off them as a sum."""
        a = self._arrays
        terms: list[tuple[int, float]] = []
        taken_off, seen = 0.0, set[int]()
        again = self._replayed.get((int(a.producer[m]), part))
        # A replay may make it for others, although it is copied.
        first = [] if again is None else [(again, -1.0)]
        queue: list[tuple[int, list[tuple[int, float]], int]] = [(m, first, 0)]
        for item, missing, maps in queue:
            for op in self._model.readers.get(item, ()):
                if op in seen or (op, part) not in self._replayed:
                    continue
                seen.add(op)
                seconds = float(a.recipe_seconds[op])
                terms.append((self._replayed[op, part], seconds))
                terms += [(column, seconds * value) for column, value in missing]
                taken_off += seconds * maps
                for made in a.products[a.product_ptr[op] : a.product_ptr[op + 1]]:
                    made = int(made)
                    if a.producer[made] != op or a.present[made]:
                        continue
                    if made >= self._model.n_maps:
                        queue.append((made, missing, maps))
                    elif maps == FOLLOWED or not a.read[made]:
                        continue
                    elif not self._may_be_used(made, part):
                        more = self._missing(made, part)
                        queue.append((made, missing + more, maps + 1))
        return terms, taken_off
