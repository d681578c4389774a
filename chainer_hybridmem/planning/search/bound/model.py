"""The linear program of one problem under one limit, without what cuts add to it.

Bytes are divided by the limit, so that all numbers are of one order.
"""

from __future__ import annotations

import bisect
import functools
from typing import Any, NamedTuple

import numpy as np

from chainer_hybridmem.planning.search.bound.possible import Possible, find_possible
from chainer_hybridmem.planning.simulation.arrays import find_maker
from chainer_hybridmem.planning.simulation.problem import Problem
from chainer_hybridmem.planning.simulation.work import KEEP, SWAP

# -- rows, and sums over the operations that become rows ----------------------
Row = tuple[np.ndarray, np.ndarray, float]
"""Columns, values and right side of ``sum(values * x[columns]) <= right``."""


def make_row(columns: Any, values: Any, right: float) -> Row:
    """A row of plain arrays."""
    return np.asarray(columns, np.int64), np.asarray(values, float), float(right)


class Events:
    """Changes of a sum over the operations.

    Args:
        parts (list): Positions, columns and values of changes: from the position on
            the sum is higher by the value times the column.
        slots (list or None): Per part, a second position of each change.
    """

    def __init__(
        self,
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
        slots: list[np.ndarray] | None = None,
    ) -> None:
        position, column, value = (
            np.concatenate([part[i] for part in parts]) for i in range(3)
        )
        order = np.argsort(position, kind='stable')
        self.position, self.column = position[order], column[order]
        self.value = value[order].astype(float)
        self.slot = np.concatenate(slots)[order] if slots else self.position

    def sums(self, x: np.ndarray, n: int) -> np.ndarray:
        """(n,) the sum at every operation."""
        changes = np.bincount(
            self.position, self.value * x[self.column], minlength=n + 1
        )
        return np.cumsum(changes)[:n]

    def amounts(
        self, x: np.ndarray, n: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pointers by position, slots and values times columns."""
        pointers = np.searchsorted(self.position, np.arange(n + 1))
        return pointers, self.slot, self.value * x[self.column]

    def between(self, positions: np.ndarray, first: int) -> list[Row]:
        """Equations that make ``first + k`` the sum at every one of the positions."""
        ends = np.searchsorted(self.position, positions, side='right')
        rows: list[Row] = []
        begin, before = 0, -1
        for k, end in zip(positions.tolist(), ends.tolist(), strict=True):
            others = [first + k] if before < 0 else [first + k, first + before]
            signs = [1.0, -1.0][: len(others)]
            columns = np.concatenate([others, self.column[begin:end]])
            values = np.concatenate([signs, -self.value[begin:end]])
            rows.append(make_row(columns, values, 0))
            begin, before = end, k
        return rows


# -- chains: what replays lead to ---------------------------------------------
LONGEST = 2  # operations a chain of replays is followed at most


class ReplayChains:
    """What the replay of a map leads to, a few operations back.

    Args:
        problem (Problem): What is planned.

    Attributes:
        made (dict): Column offset of ``(x, operation)``: the operation is replayed
            by the first use of map x.
        edges (list): ``(x, operation, item, again)``: the operation needs the item,
            which is first used after x; ``again`` makes it, -1 if nothing can.
        breaks (list): Per map the positions at which it is known to be back.
    """

    def __init__(self, problem: Problem) -> None:
        self._arrays = a = problem.arrays
        self._n_maps = len(problem.maps)
        self.made: dict[tuple[int, int], int] = {}
        self.edges: list[tuple[int, int, int, int]] = []
        for x in np.flatnonzero(problem.recomputable & a.read).tolist():
            self._follow(x)
        breaks: list[set[int]] = [set() for _ in range(self._n_maps)]
        for x, _, item, _ in self.edges:
            if item < self._n_maps:
                breaks[item].add(int(a.first_use[x]))
        self.breaks = [sorted(positions) for positions in breaks]

    def _follow(self, x: int) -> None:
        a = self._arrays
        queue = [int(a.producer[x])]
        self.made[x, queue[0]] = len(self.made)
        for op in queue:
            for item in a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist():
                if a.present[item]:
                    continue
                if item < self._n_maps and a.first_use[item] <= a.first_use[x]:
                    continue
                again = find_maker(a, item)
                if again >= 0 and (x, again) not in self.made:
                    if len(queue) >= LONGEST:
                        continue
                    self.made[x, again] = len(self.made)
                    queue.append(again)
                self.edges.append((x, op, item, again))


# -- columns: where the variables stand, and their ranges ---------------------
BEYOND = 10.0  # what a second costs beyond the wait that is asked for


class Columns(NamedTuple):
    """First column of each group of variables; n operations, M maps.

    Attributes:
        swap (int): M fractions swapped.
        recompute (int): M fractions recomputed.
        replay (int): One for each forward operation: whether it is replayed.
        waited (int): n + 1 waits before each operation, added up.
        away (int): n bytes of swapped maps that are away.
        remade (int): n bytes of recomputed maps that are not there.
        eligible (int): n bytes of swapped maps that may be away.
        late (int): 2 M fractions swapped and recomputed that are released after the
            first backward operation.
        back (int): One for each break of each map: whether it is back by then.
        back_of (tuple of int): Of these, the first one of each map.
        made (int): One for each pair of :attr:`.ReplayChains.made`.
        held (int): One for each map that only replays read: whether it, or what is
            made of it, is there.
        beyond (int): The wait beyond what is asked for, where decisions are whole.
        single (int): M for each of n operations, or none: whether the map is swapped
            and away.
        end (int): Columns in all.
    """

    swap: int
    recompute: int
    replay: int
    waited: int
    away: int
    remade: int
    eligible: int
    late: int
    back: int
    back_of: tuple[int, ...]
    made: int
    held: int
    beyond: int
    single: int
    end: int


def lay_out_columns(problem: Problem, chains: ReplayChains, singles: bool) -> Columns:
    """The columns, one group after the other.

    Args:
        problem: What is planned.
        chains: What replays lead to.
        singles: Whether there are columns for single maps at single operations.
    """
    n, n_maps = len(problem.arrays.seconds), len(problem.maps)
    replay = 2 * n_maps
    waited = replay + problem.arrays.first_backward
    away = waited + n + 1
    late = away + 3 * n
    back = late + 2 * n_maps
    counts = [len(positions) for positions in chains.breaks]
    starts = back + np.concatenate([[0], np.cumsum(counts)])
    made = back + sum(counts)
    held = made + len(chains.made)
    beyond = held + int((~problem.arrays.read).sum())
    single = beyond + 1
    return Columns(
        swap=0,
        recompute=n_maps,
        replay=replay,
        waited=waited,
        away=away,
        remade=away + n,
        eligible=away + 2 * n,
        late=late,
        back=back,
        back_of=tuple(starts.astype(int).tolist()),
        made=made,
        held=held,
        beyond=beyond,
        single=single,
        end=single + (n * n_maps if singles else 0),
    )


class Variables(NamedTuple):
    """What is known of each column by itself.

    Attributes:
        lower (ndarray): Its least value.
        upper (ndarray): Its largest value.
        cost (ndarray): What one of it adds to the time.
        same_as (ndarray): The column that it always equals, perhaps itself.
    """

    lower: np.ndarray
    upper: np.ndarray
    cost: np.ndarray
    same_as: np.ndarray


def make_variables(
    problem: Problem, columns: Columns, longest: float, total: float
) -> Variables:
    """Ranges and costs of all columns.

    Args:
        problem: What is planned.
        columns: Where they are.
        longest: The longest wait in seconds.
        total: Bytes of all maps, over the limit.
    """
    a, n = problem.arrays, len(problem.arrays.seconds)
    upper = np.concatenate(
        [
            a.allowed[:, SWAP].astype(float),
            problem.recomputable.astype(float),
            np.ones(a.first_backward),
            np.full(n + 1, longest),
            np.full(3 * n, total),
            np.tile(a.first_use > a.first_backward, 2).astype(float),
            np.ones(columns.end - columns.back),
        ]
    )
    upper[columns.waited], upper[columns.beyond] = 0, longest
    cost = np.zeros(columns.end)
    cost[columns.waited + n], cost[columns.beyond] = 1, BEYOND
    lower = np.zeros(columns.end)
    return Variables(lower, upper, cost, np.arange(columns.end))


# -- the linear program -------------------------------------------------------
MOST_LANE_ROWS = 16  # in each direction


class Scaled(NamedTuple):
    """Bytes over the limit, and rates likewise.

    Attributes:
        scale (float): Bytes of one unit.
        limit (float): The limit, 1 unless it is zero.
        size (ndarray): (M,) of each map.
        out_rate (float): A second, of swap-outs.
        in_rate (float): A second, of swap-ins.
    """

    scale: float
    limit: float
    size: np.ndarray
    out_rate: float
    in_rate: float


def scale_problem(problem: Problem, limit_bytes: int) -> Scaled:
    """Sizes and rates over the limit; of two tiers the faster one counts."""
    scale = float(max(limit_bytes, 1))
    links = [problem.profile.link]
    if problem.profile.disk_link is not None and problem.arrays.tiered:
        links.append(problem.profile.disk_link)
    return Scaled(
        scale=scale,
        limit=limit_bytes / scale,
        size=problem.arrays.size[: len(problem.maps)] / scale,
        out_rate=max(x.d2h_bytes_per_second for x in links) / scale,
        in_rate=max(x.h2d_bytes_per_second for x in links) / scale,
    )


class Held(NamedTuple):
    """Memory that a source or what is made of it takes, from the end of forward on.

    Attributes:
        column (int): Whether it does.
        until (int): The operation before which that is not known any more.
        size (float): How much.
    """

    column: int
    until: int
    size: float


class Model:
    """Variables, and the rows of choice, host, replays and sources.

    Args:
        problem (Problem): What is planned.
        limit_bytes (int): Memory limit.
        ranks (int): Processes that share the problem's link, each with a plan and a
            start of its own; the model is about their average.
        singles (bool): Whether there are columns for single maps at single operations.

    Attributes:
        problem (Problem): Likewise.
        scaled (Scaled): Its bytes over the limit.
        chains (ReplayChains): What replays lead to.
        columns (Columns): Where the variables are.
        variables (Variables): Their ranges and costs.
        base_seconds (float): Time of all operations.
        fixed (ndarray): (n,) bytes that are there while each operation runs, whatever
            is done with maps.
        elapsed (ndarray): (n+1,) seconds of compute before each operation.
        longest (float): The longest wait in seconds.
        rows (list): Those that are always there.
    """

    def __init__(
        self,
        problem: Problem,
        limit_bytes: int,
        ranks: int = 1,
        singles: bool = False,
    ) -> None:
        self.problem = problem
        self.n, self.n_maps = len(problem.arrays.seconds), len(problem.maps)
        self.scaled = scale_problem(problem, limit_bytes)
        self.fixed = find_fixed(problem)
        self.base_seconds = problem.compute_seconds
        self.elapsed = np.cumsum([0.0, *problem.arrays.seconds])
        self.chains = ReplayChains(problem)
        self.columns = lay_out_columns(problem, self.chains, singles)
        self.longest = ranks * _longest_wait(problem)
        total = float(self.scaled.size.sum())
        self.variables = make_variables(problem, self.columns, self.longest, total)
        self.rows: list[Row] = []
        self._add_choice(find_possible(problem, limit_bytes, self.fixed))
        self._add_lanes()
        if ranks > 1:
            self._add_sharing(ranks)
        self._add_host()
        self.held: list[Held] = []
        self._add_replays()
        self._add_held()
        self._add_sources()

    def add_row(self, columns: Any, values: Any, right: float) -> None:
        """Adds ``sum(values * x[columns]) <= right``."""
        self.rows.append(make_row(columns, values, right))

    def between(self, i: int, j: int) -> tuple[list[int], list[float], float]:
        """``-W(i, j)`` as columns and values, and the compute that is part of it."""
        columns = [self.columns.waited + j + 1, self.columns.waited + i]
        return columns, [-1.0, 1.0], float(self.elapsed[j] - self.elapsed[i])

    def _add_choice(self, possible: Possible) -> None:
        a, at = self.problem.arrays, self.columns
        self.variables.upper[at.recompute : at.replay] = possible.recompute
        for m in range(self.n_maps):
            columns = [at.swap + m, at.recompute + m]
            self.add_row(columns, [1, 1], 1)
            if not (a.allowed[m, KEEP] and possible.keep[m]):
                self.add_row(columns, [-1, -1], -1)
        for g, most_bytes in enumerate(a.kept_most.tolist()):
            group = a.kept_members[a.kept_pointers[g] : a.kept_pointers[g + 1]]
            size = self.scaled.size[group]
            either = np.concatenate([at.swap + group, at.recompute + group])
            most = most_bytes / self.scaled.scale
            self.add_row(either, np.concatenate([-size, -size]), most - size.sum())

    def _add_lanes(self) -> None:
        """Copies of maps that rules ask to leave fit between their uses.

        Elsewhere only what is away has to be copied: nothing else is worth a swap.
        """
        a = self.problem.arrays
        asked = ~a.allowed[:, KEEP]
        asked[a.kept_members] = True
        leaving = np.flatnonzero(a.allowed[:, SWAP] & asked)
        if not len(leaving):
            return
        uses = np.unique(a.first_use[leaving])
        for j in uses[np.linspace(0, len(uses) - 1, MOST_LANE_ROWS).astype(int)]:
            maps = leaving[a.first_use[leaving] <= j]
            ends, signs, within = self.between(int(a.copy_from[maps].min()), int(j))
            columns = [*self.columns.swap + maps, *ends]
            for seconds in least_copy_seconds(self.problem):
                self.add_row(columns, [*seconds[maps], *signs], within)

    def _add_sharing(self, ranks: int) -> None:
        """All copies of all ranks cross the link within the iteration."""
        maps = self.columns.swap + np.arange(self.n_maps)
        columns = [*maps, self.columns.waited, self.columns.waited + self.n]
        for rate in (self.scaled.out_rate, self.scaled.in_rate):
            seconds = ranks * self.scaled.size / rate
            self.add_row(columns, [*seconds, 1.0, -1.0], self.base_seconds)

    def _add_host(self) -> None:
        """RAM for host copies is limited; what goes to the disk takes longer."""
        a, problem, disk = (
            self.problem.arrays,
            self.problem,
            self.problem.profile.disk_link,
        )
        if not a.tiered:
            return
        maps = self.columns.swap + np.arange(self.n_maps)
        room = a.host_limit / self.scaled.scale
        if disk is None:
            self.add_row(maps, self.scaled.size, room)
            return
        # All copies of one direction share a lane within the iteration.
        link = problem.profile.link
        ends = [self.columns.waited, self.columns.waited + self.n]
        rates = (
            (link.d2h_bytes_per_second, disk.d2h_bytes_per_second),
            (link.h2d_bytes_per_second, disk.h2d_bytes_per_second),
        )
        for seconds, (fast, slow) in zip(
            least_copy_seconds(self.problem), rates, strict=True
        ):
            # A byte on the disk takes so much longer, whatever the latencies.
            longer = max(self.scaled.scale / slow - self.scaled.scale / fast, 0.0)
            if disk.latency_seconds < link.latency_seconds:
                longer = 0.0
            self.add_row(
                np.concatenate([maps, ends]),
                np.concatenate([seconds + longer * self.scaled.size, [1.0, -1.0]]),
                self.base_seconds + longer * room,
            )

    def _add_replays(self) -> None:
        """What is made again needs replays; a replay with one reason equals it."""
        a, b0 = self.problem.arrays, self.problem.arrays.first_backward
        reasons: list[list[int]] = [[] for _ in range(b0)]
        for m in range(self.n_maps):
            if a.read[m] and self.variables.upper[self.columns.recompute + m] > 0:
                reasons[int(a.producer[m])].append(self.columns.recompute + m)
        for op in range(b0):
            if a.recipe_seconds[op] < 0:
                self.variables.upper[self.columns.replay + op] = 0
                continue
            for source in sorted(set(self._dropped_sources(op))):
                if self.variables.upper[self.columns.replay + source] == 0:
                    self.variables.upper[self.columns.replay + op] = 0
                reasons[source].append(self.columns.replay + op)
        # These may run for other reasons, too: for a map that is swapped itself.
        others = set(a.producer[: self.n_maps][~a.read].tolist())
        others |= {op for x, op in self.chains.made if op != a.producer[x]}
        for op in reversed(range(b0)):
            replay = self.columns.replay + op
            asked = {int(self.variables.same_as[column]) for column in reasons[op]}
            if len(asked) == 1 and op not in others:
                column = asked.pop()
                self.variables.same_as[replay] = column
                self.variables.upper[column] = min(
                    self.variables.upper[column], self.variables.upper[replay]
                )
                continue
            for column in sorted(asked):
                self.add_row([column, replay], [1, -1], 0)
        used = np.nonzero(a.recipe_seconds[:b0] > 0)[0]
        waited = [self.columns.waited + b0, self.columns.waited + self.n]
        self.add_row(
            np.concatenate([self.columns.replay + used, waited]),
            np.concatenate([a.recipe_seconds[used], [1.0, -1.0]]),
            0,
        )
        lost = self._lost_seconds()
        if lost.any():
            maps = self.columns.swap + np.arange(self.n_maps)
            self.add_row(
                np.concatenate([self.columns.replay + used, maps, waited[1:]]),
                np.concatenate([a.recipe_seconds[used], lost, [-1.0]]),
                0,
            )

    def _add_held(self) -> None:
        """What only replays read stays for them, or is made again.

        Until the last map that is made of it has been, it or that map is there.
        """
        a, at, size = self.problem.arrays, self.columns, self.scaled.size
        for op in np.flatnonzero(a.recipe_seconds[: a.first_backward] >= 0).tolist():
            for item in set(a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist()):
                if item < self.n_maps and not a.read[item]:
                    maker = at.replay + int(a.producer[item])
                    columns = [at.replay + op, maker, at.recompute + item]
                    self.add_row(columns, [1, -1, 1], 1)
        for place, t in enumerate(np.flatnonzero(~a.read).tolist()):
            found = self._last_made_of(t)
            if found is None:
                continue
            x, between = found
            held = at.held + place
            columns = [at.recompute + x, at.replay + int(a.producer[t]), held]
            columns += [at.recompute + other for other in between]
            self.add_row(columns, [1.0, -1, -1, *[1] * len(between)], len(between))
            self.held.append(Held(held, int(a.first_use[x]), min(size[x], size[t])))

    def _last_made_of(self, t: int) -> tuple[int, list[int]] | None:
        """The map needed last whose chain reads a source, and sources between."""
        a = self.problem.arrays
        best: tuple[int, list[int]] | None = None
        queue: list[tuple[int, list[int]]] = [(t, [])]
        seen = {t}
        for item, between in queue:
            for op in self.readers.get(item, ()):
                for made in a.products[a.product_ptr[op] : a.product_ptr[op + 1]]:
                    made = int(made)
                    if made in seen:
                        continue
                    seen.add(made)
                    if made < self.n_maps and a.read[made]:
                        if best is None or a.first_use[made] > a.first_use[best[0]]:
                            best = made, between
                    elif made < self.n_maps:
                        queue.append((made, [*between, made]))
                    elif not a.present[made]:
                        queue.append((made, between))
        return best

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """Operations that replay, by item that they read."""
        a = self.problem.arrays
        readers: dict[int, list[int]] = {}
        for op in np.flatnonzero(a.recipe_seconds[: a.first_backward] >= 0).tolist():
            for item in set(a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist()):
                readers.setdefault(item, []).append(op)
        return readers

    def _lost_seconds(self) -> np.ndarray:
        """(M,) seconds by which each map's copies delay the iteration at least."""
        a = self.problem.arrays
        beside_both = a.out_compute_share * (1 - a.in_compute_share)
        out_seconds, in_seconds = least_copy_seconds(self.problem)
        lost = (1 - a.out_compute_share) * out_seconds
        return np.asarray(lost + beside_both * in_seconds + 2 * a.move_seconds)

    def _dropped_sources(self, op: int) -> list[int]:
        """Operations that make what a replay reads and forward drops."""
        a = self.problem.arrays
        items = a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist()
        return [
            int(a.producer[item])
            for item in items
            if item >= self.n_maps and not a.present[item]
        ]

    def column_back(self, m: int, k: int) -> int:
        """Column that says that a map is known to be back before k; -1 for none."""
        place = bisect.bisect_right(self.chains.breaks[m], k) - 1
        if place < 0:
            return -1
        return self.columns.back_of[m] + place

    def _add_sources(self) -> None:
        """What replays need is back or made again by the time they run."""
        chains, at = self.chains, self.columns
        counts = [len(positions) for positions in chains.breaks]
        late_s, late_r = at.late, at.late + self.n_maps
        for m in range(self.n_maps):
            self.add_row([late_s + m, at.swap + m], [1, -1], 0)
            self.add_row([late_r + m, at.recompute + m], [1, -1], 0)
            for back in range(at.back_of[m], at.back_of[m] + counts[m]):
                columns = [back, late_s + m, at.swap + m]
                self.add_row(columns, [1, 1, -1], 0)
                if back > at.back_of[m]:
                    self.add_row([back - 1, back], [1, -1], 0)
        for (x, op), place in chains.made.items():
            made = at.made + place
            self.add_row([made, at.replay + op], [1, -1], 0)
            if op == self.problem.arrays.producer[x]:
                self.add_row([at.recompute + x, made], [1, -1], 0)
        for x, op, item, again in chains.edges:
            columns = [at.made + chains.made[x, op]]
            values = [1.0]
            if again >= 0:
                columns.append(at.made + chains.made[x, again])
                values.append(-1.0)
            if item < self.n_maps:
                back = self.column_back(item, int(self.problem.arrays.first_use[x]))
                columns += [at.swap + item, at.recompute + item]
                columns += [late_s + item, late_r + item, back]
                values += [1.0, 1.0, -1.0, -1.0, -1.0]
            self.add_row(columns, values, float(item < self.n_maps))


def find_fixed(problem: Problem) -> np.ndarray:
    """(n,) bytes that are there while each operation runs, without maps.

    Where the graph dies, maps that are left to it count at the first moment only.
    """
    a, profile = problem.arrays, problem.profile
    firsts = np.array([op.first_event for op in profile.operations])
    ends = np.append(firsts[1:], len(profile.events) + 1)
    dies = (firsts <= profile.graph_end_event) & (profile.graph_end_event < ends)
    return np.where(dies, a.fixed_start, a.fixed_peak)


def least_copy_seconds(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(M,) seconds of each map's copies in the faster tier."""
    a = problem.arrays
    out_seconds, in_seconds = problem.swap_out_seconds, problem.swap_in_seconds
    if not a.tiered:
        return out_seconds, in_seconds
    return (
        np.minimum(out_seconds, a.disk_out_seconds),
        np.minimum(in_seconds, a.disk_in_seconds),
    )


def _longest_wait(problem: Problem) -> float:
    """Seconds that no wait exceeds: everything copied and replayed, nothing hidden."""
    a = problem.arrays
    copies = np.maximum(problem.swap_out_seconds, a.disk_out_seconds).sum()
    copies += np.maximum(problem.swap_in_seconds, a.disk_in_seconds).sum()
    recipes = np.maximum(problem.arrays.recipe_seconds, 0).sum()
    moves = 2 * a.move_seconds.sum()
    return float(copies + recipes + moves) + 1.0
