"""A proven lower bound: no executable plan is faster.

The bound is the optimum of a linear program in which every plan that passes
:mod:`chainer_hybridmem.records.validation` is feasible. Notation: before operation k
compute waits and replays for ``w_k`` seconds, then runs it for ``c_k``; ``W(i, j)`` is
the time from the beginning of the wait before operation i to the beginning of operation
j.

Variables: per feature map the fractions ``s`` swapped and ``r`` recomputed (the rest
is kept), per forward operation whether it is replayed at all (``R``), per operation k
the wait ``w_k`` and the bytes ``N_k`` of swapped maps that are away while it runs.
Minimise ``sum(c) + sum(w)`` subject to

memory
    fixed load + maps alive - recomputed maps not yet made again - ``N_k`` <= limit, at
    every operation k.
away
    ``N_k`` <= bytes of swapped maps that may be away at k: released at the earliest
    before k, not needed before k + 1.
swap-out, for operations i <= k
    of ``N_k``, what forward has finished with only before operation i or later has been
    copied within ``W(i, k)``.
swap-in, for operations k < j
    of ``N_k``, what is needed before operation j at the latest is copied within
    ``W(k + 1, j)``.
replays
    the waits of backward hold one run of all that is replayed; what needs an array
    that forward has dropped needs a replay of its producer.
host
    if host copies in RAM are limited: without a disk, the swapped bytes are no more
    than the limit; with one, the copies of each direction, those beyond the limit at
    the disk's speed, fit one after the other into the iteration.
contention
    all waits hold one run of all that is replayed and what copies take from compute,
    ``1 - share`` of their time, that of swap-ins as if all were beside swap-outs.
sources
    what a replay reads by the first use of map x is back, or made again, by then: a
    swapped map so needed early leaves the sums and cuts above from there on
    (``first_back``), unless it is released only after the first backward
    operation (``first_late``; such a map is not away until then).

What crosses iterations is a map like any other: it is there before operation 0, no copy
of it begins before the iteration does, and it is back before its first use.

Why every plan satisfies them. A map that is swapped is away during k only if it is
released before k or earlier and its swap-in starts before k + 1 or later. The release
waits for the copy, which starts no sooner than forward's last use of the map; all
copies that have ended by the start of operation k and started no sooner than the
wait before operation i share one link within ``W(i, k)``. The swap-in is waited
for no later than before the first use, so the same holds on the way back. A map that
is recomputed is absent only between its release and its replay, which comes no
later than its first use; a map that is kept is there until its last use. Sources of
a replay are there, or a replay in the same place has made them; forward's transients
can only be made. Replays run in backward only: a source released by its first
operation can be there without being made again only if its swap-in has been waited for,
and from then on it stays until its last use; one released later is there all
through forward. Where copies slow compute down, ``w_k`` holds what operation k - 1 has
lost as well: a second of two copies beside compute loses ``1 - share_out * share_in``,
a second of one of them no less than its part of that, and a second of a copy while
compute waits costs a whole one. Copies may be issued in any order and anywhere, replays
repeated, and maps kept for longer: none of this lowers a load or shortens a wait below
what is asked for here. The graph may die within an operation; maps left to it then
count at the operation's first moment only.

The pairs (i, k) and (k, j) are added as they turn out to be violated. Leaving pairs
out only lowers the optimum: each round's value is a bound. The reported value does
not rely on the solver's tolerances: it is the Lagrangian bound of the
solver's multipliers, evaluated over the variables' ranges (Neumaier and Shcherbina,
"Safe bounds in linear and mixed-integer linear programming", 2004). The range of a
wait ends at ``longest``: a plan that waits longer anywhere is slower than the in-core
time and ``longest`` together, and the reported value is never above that.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.simulation.problem import Problem

ROUNDS = 12
STRETCHES = 30  # of operations, with one row and two pairs a round at most
VIOLATED = 1e-7  # of the limit
ROUNDING = 1e-9  # share given away for sums in floating point
CHAIN = 2  # operations a chain of replays is followed at most
# Rounds without progress after which the bound is left as it is: small programs may
# take more of them.
LEAST_PATIENCE, MOST_PATIENCE = 2, 12
PATIENCE_TIMES_OPERATIONS = 4000


@dataclasses.dataclass(frozen=True)
class Bound:
    """A proven bound and the fractions at which the relaxation attains it.

    Attributes:
        seconds (float): No executable plan is faster; always finite.
        swapped (ndarray): (M,) fraction of each map that is swapped.
        recomputed (ndarray): (M,) fraction of each map that is recomputed.
        rounds (int): Linear programs solved.
    """

    seconds: float
    swapped: np.ndarray
    recomputed: np.ndarray
    rounds: int


def lower_bound(problem: Problem, limit_bytes: int) -> Bound:
    """Seconds below which no executable plan under this limit can be.

    The problem remembers the result.

    Args:
        problem: What is planned.
        limit_bytes: Memory limit.
    """
    if limit_bytes not in problem.bounds:
        problem.bounds[limit_bytes] = _lower_bound(problem, limit_bytes)
    bound: Bound = problem.bounds[limit_bytes]
    return bound


def load() -> None:
    """On a fresh installation what is compiled here compiles now."""
    whole, number = np.zeros(0, np.int64), np.zeros(0)
    pointers = np.zeros(1, np.int64)
    changes = (pointers, whole, number)
    _least(changes, changes, number, np.zeros(1), number, 0, 1.0, 1.0)
    from scipy import optimize, sparse  # noqa: F401


def _lower_bound(problem: Problem, limit_bytes: int) -> Bound:
    n_maps = len(problem.maps)
    nothing = np.zeros(n_maps)
    if problem.in_core_peak_bytes <= limit_bytes or n_maps == 0:
        return Bound(problem.in_core_seconds, nothing, nothing, 0)
    bound = tightened(Relaxation(problem, limit_bytes))
    # The relaxation does not know that the host has to issue everything.
    seconds = max(bound.seconds, problem.in_core_seconds)
    return dataclasses.replace(bound, seconds=seconds)


def tightened(relaxation: Relaxation) -> Bound:
    """Adds violated pairs until there are none, or until they do not help."""
    best, stuck, done = relaxation.base_seconds, 0, 0
    swapped = recomputed = np.zeros(relaxation.n_maps)
    relaxation.cut(relaxation.everything_swapped())
    patience = PATIENCE_TIMES_OPERATIONS // max(relaxation.n, 1)
    patience = min(max(patience, LEAST_PATIENCE), MOST_PATIENCE)
    while done < ROUNDS and stuck < patience:
        done += 1
        solution = relaxation.solve()
        if solution is None:  # the solver gave up; what is proven stays proven
            break
        stuck = 0 if solution.seconds > best * (1 + 1e-6) or done == 1 else stuck + 1
        best = max(best, solution.seconds)
        swapped, recomputed = relaxation.fractions(solution.x)
        if not relaxation.cut(solution.x):
            break
    return Bound(best, swapped, recomputed, done)


@dataclasses.dataclass(frozen=True)
class Solution:
    """A solved relaxation: a safe value and the point where it is attained."""

    seconds: float
    x: np.ndarray


@dataclasses.dataclass(frozen=True)
class Program:
    """Rows over the columns that are in use.

    Attributes:
        used (ndarray): The columns.
        matrix (Any): Of ``matrix @ x[used] <= right``.
        right (ndarray): Likewise.
        equal (Any): Of ``equal @ x[used] == 0``.
        cost (ndarray): Of the columns in use.
        bounds (ndarray): Their ranges.
    """

    used: np.ndarray
    matrix: Any
    right: np.ndarray
    equal: Any
    cost: np.ndarray
    bounds: np.ndarray


Row = tuple[np.ndarray, np.ndarray, float]


class Relaxation:
    """The linear program of one problem under one limit, in seconds and limits.

    Bytes are divided by the limit, so that all numbers are of one order. Rows for
    single operations are there for ``positions`` only, pairs for ``pairs`` only.

    Args:
        problem (Problem): What is planned.
        limit_bytes (int): Memory limit.
        sources (bool): Whether to ask for the sources of replays.
    """

    def __init__(
        self, problem: Problem, limit_bytes: int, sources: bool = True
    ) -> None:
        a = problem.arrays
        self.problem, self.arrays = problem, a
        self.n, self.n_maps = len(a.seconds), len(problem.maps)
        self.scale = float(max(limit_bytes, 1))
        self.limit = limit_bytes / self.scale
        self.size = a.size[: self.n_maps] / self.scale
        links = [problem.profile.link]
        if problem.profile.disk_link is not None and a.tiered:
            links.append(problem.profile.disk_link)
        self.out_rate = max(x.d2h_bytes_per_second for x in links) / self.scale
        self.in_rate = max(x.h2d_bytes_per_second for x in links) / self.scale
        self.base_seconds = problem.compute_seconds
        # Compute time before each operation.
        self.elapsed = np.concatenate([[0.0], np.cumsum(a.seconds)])
        self.sources = sources
        self.breaks: list[list[int]] = [[] for _ in range(self.n_maps)]
        chains = None
        if sources:
            chains = _Chains(problem)
            self.breaks = chains.breaks
        self.longest = self._longest_wait(problem)
        self._lay_out(problem, chains)
        self.rows: list[Row] = []
        self.positions: set[int] = set()
        self.pairs: dict[tuple[str, int, int], None] = {}  # in order
        self._choice()
        self._host()
        self._replays()
        if chains is not None:
            self._sources(chains)
        self._events()
        self.excess = self._excess(problem)

    def _lay_out(self, problem: Problem, chains: _Chains | None) -> None:
        """Where the columns are, their ranges and costs."""
        a, n, n_maps = self.arrays, self.n, self.n_maps
        self.first_swap = 0
        self.first_recompute = n_maps
        self.first_replay = 2 * n_maps
        self.first_waited = self.first_replay + a.first_backward
        self.first_away = self.first_waited + n + 1
        self.first_remade = self.first_away + n
        self.first_eligible = self.first_remade + n
        self.first_late = self.first_eligible + n  # s and r released after b0
        self.first_back = self.first_late + 2 * n_maps
        self.first_made = self.first_back + sum(map(len, self.breaks))
        self.columns = self.first_made + (len(chains.made) if chains else 0)
        self.same_as = np.arange(self.columns)
        total = float(self.size.sum())
        self.lower = np.zeros(self.columns)
        self.upper = np.concatenate(
            [
                np.ones(n_maps),
                problem.recomputable.astype(float),
                np.ones(a.first_backward),
                np.full(n + 1, self.longest),
                np.full(3 * n, total),
                np.tile(a.first_use > a.first_backward, 2).astype(float),
                np.ones(self.columns - self.first_back),
            ]
        )
        self.upper[self.first_waited] = 0
        self.cost = np.zeros(self.columns)
        self.cost[self.first_waited + n] = 1

    def _longest_wait(self, problem: Problem) -> float:
        """As long as everything copied and replayed, nothing hidden, and a second."""
        a = problem.arrays
        copies = np.maximum(problem.swap_out_seconds, a.disk_out_seconds).sum()
        copies += np.maximum(problem.swap_in_seconds, a.disk_in_seconds).sum()
        recipes = np.maximum(problem.arrays.recipe_seconds, 0).sum()
        return float(copies + recipes) + 1.0

    def _row(self, columns: Any, values: Any, right: float) -> None:
        """``sum(values * x[columns]) <= right``."""
        self.rows.append(_row(columns, values, right))

    def _choice(self) -> None:
        for m in range(self.n_maps):
            self._row([self.first_swap + m, self.first_recompute + m], [1, 1], 1)

    def _host(self) -> None:
        """RAM for host copies is limited; what goes to the disk takes longer."""
        a, problem, disk = self.arrays, self.problem, self.problem.profile.disk_link
        if not a.tiered:
            return
        maps = self.first_swap + np.arange(self.n_maps)
        room = a.host_limit / self.scale
        if disk is None:
            self._row(maps, self.size, room)
            return
        # All copies of one direction share a lane within the iteration.
        link = problem.profile.link
        ends = [self.first_waited, self.first_waited + self.n]
        rates = (
            (link.d2h_bytes_per_second, disk.d2h_bytes_per_second),
            (link.h2d_bytes_per_second, disk.h2d_bytes_per_second),
        )
        for seconds, (fast, slow) in zip(
            self._least_copy_seconds(), rates, strict=True
        ):
            # A byte on the disk takes so much longer, whatever the latencies.
            longer = max(self.scale / slow - self.scale / fast, 0.0)
            if disk.latency_seconds < link.latency_seconds:
                longer = 0.0
            self._row(
                np.concatenate([maps, ends]),
                np.concatenate([seconds + longer * self.size, [1.0, -1.0]]),
                self.base_seconds + longer * room,
            )

    def _replays(self) -> None:
        """What is made again needs replays; a replay with one reason equals it."""
        a, b0 = self.arrays, self.arrays.first_backward
        reasons: list[list[int]] = [[] for _ in range(b0)]
        for m in range(self.n_maps):
            if self.upper[self.first_recompute + m] > 0:
                reasons[int(a.producer[m])].append(self.first_recompute + m)
        for op in range(b0):
            if a.recipe_seconds[op] < 0:
                self.upper[self.first_replay + op] = 0
                continue
            for source in sorted(set(self._dropped_sources(op))):
                if self.upper[self.first_replay + source] == 0:
                    self.upper[self.first_replay + op] = 0
                reasons[source].append(self.first_replay + op)
        for op in reversed(range(b0)):
            replay = self.first_replay + op
            asked = {int(self.same_as[column]) for column in reasons[op]}
            if len(asked) == 1:
                column = asked.pop()
                self.same_as[replay] = column
                self.upper[column] = min(self.upper[column], self.upper[replay])
                continue
            for column in sorted(asked):
                self._row([column, replay], [1, -1], 0)
        used = np.nonzero(a.recipe_seconds[:b0] > 0)[0]
        waited = [self.first_waited + b0, self.first_waited + self.n]
        self._row(
            np.concatenate([self.first_replay + used, waited]),
            np.concatenate([a.recipe_seconds[used], [1.0, -1.0]]),
            0,
        )
        lost = self._lost_seconds()
        if lost.any():
            maps = self.first_swap + np.arange(self.n_maps)
            self._row(
                np.concatenate([self.first_replay + used, maps, waited[1:]]),
                np.concatenate([a.recipe_seconds[used], lost, [-1.0]]),
                0,
            )

    def _lost_seconds(self) -> np.ndarray:
        """(M,) seconds by which each map's copies delay the iteration at least."""
        a = self.arrays
        beside_both = a.out_compute_share * (1 - a.in_compute_share)
        out_seconds, in_seconds = self._least_copy_seconds()
        lost = (1 - a.out_compute_share) * out_seconds
        return np.asarray(lost + beside_both * in_seconds)

    def _least_copy_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """(M,) seconds of each map's copies in the faster tier."""
        a, problem = self.arrays, self.problem
        out_seconds, in_seconds = problem.swap_out_seconds, problem.swap_in_seconds
        if not a.tiered:
            return out_seconds, in_seconds
        return (
            np.minimum(out_seconds, a.disk_out_seconds),
            np.minimum(in_seconds, a.disk_in_seconds),
        )

    def _dropped_sources(self, op: int) -> list[int]:
        """Operations that make what a replay reads and forward drops."""
        a = self.arrays
        items = a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist()
        return [
            int(a.producer[item])
            for item in items
            if item >= self.n_maps and not a.present[item]
        ]

    def _back(self, m: int, k: int) -> int:
        """Column that says that a map is known to be back before k; -1 for none."""
        place = int(np.searchsorted(self.breaks[m], k, side='right')) - 1
        if place < 0:
            return -1
        return self.back_of[m] + place

    def _sources(self, chains: _Chains) -> None:
        """What replays need is back or made again by the time they run."""
        counts = [len(positions) for positions in self.breaks]
        starts = self.first_back + np.concatenate([[0], np.cumsum(counts)])
        self.back_of = starts.astype(int).tolist()
        late_s, late_r = self.first_late, self.first_late + self.n_maps
        for m in range(self.n_maps):
            self._row([late_s + m, self.first_swap + m], [1, -1], 0)
            self._row([late_r + m, self.first_recompute + m], [1, -1], 0)
            for back in range(self.back_of[m], self.back_of[m] + counts[m]):
                columns = [back, late_s + m, self.first_swap + m]
                self._row(columns, [1, 1, -1], 0)
                if back > self.back_of[m]:
                    self._row([back - 1, back], [1, -1], 0)
        for (x, op), place in chains.made.items():
            made = self.first_made + place
            self._row([made, self.first_replay + op], [1, -1], 0)
            if op == self.arrays.producer[x]:
                self._row([self.first_recompute + x, made], [1, -1], 0)
        for x, op, item, again in chains.edges:
            columns = [self.first_made + chains.made[x, op]]
            values = [1.0]
            if again >= 0:
                columns.append(self.first_made + chains.made[x, again])
                values.append(-1.0)
            if item < self.n_maps:
                back = self._back(item, int(self.arrays.first_use[x]))
                columns += [self.first_swap + item, self.first_recompute + item]
                columns += [late_s + item, late_r + item, back]
                values += [1.0, 1.0, -1.0, -1.0, -1.0]
            self._row(columns, values, float(item < self.n_maps))

    def _events(self) -> None:
        """At which position which column changes what may be away, and by how much."""
        a, size, b0 = self.arrays, self.size, self.arrays.first_backward
        maps = np.arange(self.n_maps)
        # Nothing that is released after b0 is away up to b0.
        late = maps[a.first_use > b0] if self.sources else maps[:0]
        sums = []
        for variable, delayed in (
            (self.first_recompute, self.first_late + self.n_maps),
            (self.first_swap, self.first_late),
        ):
            sums.append(
                [
                    (a.release_from, variable + maps, size),
                    (a.first_use, variable + maps, -size),
                    (a.release_from[late], delayed + late, -size[late]),
                    (np.full(len(late), b0 + 1), delayed + late, size[late]),
                ]
            )
        back = self._back_events()
        sums[1].append((back[0], back[1], -back[2]))
        self.remade, self.eligible = (_Events(parts) for parts in sums)
        # The same for single maps: what is away by the end of its copy, or its use.
        at_start = (a.release_from, self.first_swap + maps, size)
        at_end = (a.first_use, self.first_swap + maps, -size)
        self.leaving = _Events(
            [at_start, at_end, (back[0], back[1], -back[2])],
            [a.copy_from, a.copy_from, a.copy_from[back[3]]],
        )
        early = a.release_from[back[3]]
        self.coming = _Events(
            [
                at_start,
                at_end,
                (early, back[1], back[2]),
                (a.first_use[back[3]], back[1], -back[2]),
            ],
            [a.first_use, a.first_use, back[0], back[0]],
        )

    def _back_events(self) -> tuple[np.ndarray, ...]:
        """Position, column, bytes and map of every step towards being back."""
        steps: list[tuple[int, int, float, int]] = []
        for m, positions in enumerate(self.breaks):
            size, use = float(self.size[m]), int(self.arrays.first_use[m])
            for place, k in enumerate(positions):
                column = self.back_of[m] + place
                following = [*positions[place + 1 :], use]
                steps.append((k, column, size, m))
                steps.append((following[0], column, -size, m))
        table = np.array(steps, float).reshape(-1, 4)
        whole = table[:, [0, 1, 3]].astype(np.int64)
        return whole[:, 0], whole[:, 1], table[:, 2], whole[:, 2]

    def _excess(self, problem: Problem) -> np.ndarray:
        """(n,) load above the limit if every map were kept."""
        a, profile = self.arrays, problem.profile
        alive = np.zeros(self.n + 2)
        np.add.at(alive, a.producer[: self.n_maps] + 1, self.size)
        np.add.at(alive, a.last_use + 1, -self.size)
        firsts = np.array([op.first_event for op in profile.operations])
        ends = np.append(firsts[1:], len(profile.events) + 1)
        dies = (firsts <= profile.graph_end_event) & (profile.graph_end_event < ends)
        fixed = np.where(dies, a.fixed_start, a.fixed_peak)
        return fixed / self.scale + np.cumsum(alive)[: self.n] - self.limit

    def program(self, extra: list[Row] | None = None) -> Program:
        """The rows there are, those of ``extra`` included, over the columns in use."""
        rows = [*self.rows, *(extra or [])]
        positions = np.array(sorted(self.positions), np.int64)
        for k in positions.tolist():
            away, remade = self.first_away + k, self.first_remade + k
            rows.append(_row([remade, away], [-1, -1], -float(self.excess[k])))
            rows.append(_row([away, self.first_eligible + k], [1, -1], 0))
        stops = {self.arrays.first_backward, self.n}
        for kind, left, right in self.pairs:
            stops |= {left, right + 1} if kind == 'out' else {left + 1, right + 1}
        order = self.first_waited + np.array(sorted(stops), np.int64)
        for one, other in itertools.pairwise(order.tolist()):
            rows.append(_row([one, other], [1, -1], 0))
        rows += [self._pair(*pair) for pair in self.pairs]
        equations = [
            *self.remade.between(positions, self.first_remade),
            *self.eligible.between(positions, self.first_eligible),
        ]
        matrix, equal = self._matrix(rows), self._matrix(equations)
        used = np.zeros(self.columns, bool)
        used[matrix.indices] = used[equal.indices] = True
        columns = np.nonzero(used)[0]
        return Program(
            used=columns,
            matrix=matrix[:, columns],
            right=np.array([right for _, _, right in rows]),
            equal=equal[:, columns],
            cost=self.cost[columns],
            bounds=np.stack([self.lower[columns], self.upper[columns]], axis=1),
        )

    def _matrix(self, rows: list[Row]) -> Any:
        from scipy import sparse

        if not rows:
            return sparse.csr_array((0, self.columns))
        lengths = [len(columns) for columns, _, _ in rows]
        matrix = sparse.csr_array(
            (
                np.concatenate([values for _, values, _ in rows]),
                self.same_as[np.concatenate([columns for columns, _, _ in rows])],
                np.cumsum([0, *lengths]),
            ),
            shape=(len(rows), self.columns),
        )
        matrix.sum_duplicates()
        return matrix

    def expanded(self, program: Program, x: np.ndarray) -> np.ndarray:
        """Values of all columns; what is not in use is 0."""
        whole = np.zeros(self.columns)
        whole[program.used] = x
        waited = whole[self.first_waited : self.first_away]
        np.maximum.accumulate(waited, out=waited)
        return whole[self.same_as]

    def solve(self) -> Solution | None:
        """The optimum, made safe against the solver's tolerances."""
        from scipy import optimize

        program = self.program()
        result = optimize.linprog(
            program.cost,
            A_ub=program.matrix,
            b_ub=program.right,
            A_eq=program.equal,
            b_eq=np.zeros(program.equal.shape[0]),
            bounds=program.bounds,
            method='highs-ds',
        )
        if result.status != 0:
            return None
        # Multipliers of <= rows must not be positive in scipy's convention.
        below = np.minimum(result.ineqlin.marginals, 0)
        reduced = program.cost - program.matrix.T @ below
        reduced -= program.equal.T @ result.eqlin.marginals
        lower, upper = program.bounds.T
        attained = np.where(reduced > 0, lower, upper) * reduced
        value = float(attained.sum() + below @ program.right)
        seconds = self.base_seconds + min(value, self.longest)
        return Solution(seconds * (1 - ROUNDING), self.expanded(program, result.x))

    def fractions(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Swapped and recomputed fraction of each map."""
        recompute = slice(self.first_recompute, self.first_recompute + self.n_maps)
        return x[: self.n_maps].copy(), x[recompute].copy()

    def everything_swapped(self) -> np.ndarray:
        """The point at which every map is swapped and nothing waits."""
        x = np.zeros(self.columns)
        x[: self.n_maps] = 1
        x[self.first_eligible : self.first_late] = self.eligible.sums(x, self.n)
        return x

    def cut(self, x: np.ndarray) -> bool:
        """Adds rows and pairs that a point violates, the worst of every stretch."""
        need = self.excess - self.remade.sums(x, self.n)
        eligible = self.eligible.sums(x, self.n)
        waited = x[self.first_waited : self.first_away]
        start = waited + self.elapsed
        run = waited[1:] + self.elapsed[:-1]
        out_bytes, out_from, in_bytes, in_to = _least(
            self.leaving.amounts(x, self.n),
            self.coming.amounts(x, self.n),
            need,
            start,
            run,
            self.arrays.first_backward,
            self.out_rate,
            self.in_rate,
        )
        width = -(-self.n // STRETCHES)
        found = False
        for kind, most in (('at', eligible), ('out', out_bytes), ('in', in_bytes)):
            missing = need - most
            for left in range(0, self.n, width):
                k = left + int(np.argmax(missing[left : left + width]))
                if missing[k] <= VIOLATED:
                    continue
                pair = (kind, k, k)
                if kind == 'out':
                    pair = (kind, int(out_from[k]), k)
                elif kind == 'in':
                    pair = (kind, k, int(in_to[k]))
                if kind == 'at' or pair in self.pairs:
                    new = k not in self.positions
                else:
                    new = True
                    self.pairs[pair] = None
                self.positions.add(k)
                found = found or new
        return found

    def _pair(self, kind: str, left: int, right: int) -> Row:
        """``N_k <= bytes of the free maps not back by then + rate * W(i, j)``."""
        a = self.arrays
        k = right if kind == 'out' else left
        free = (a.release_from <= k) & (k < a.first_use)
        if kind == 'out':
            free &= a.copy_from < left
            i, j, rate, by = left, right, self.out_rate, k
        else:
            free &= a.first_use > right
            i, j, rate, by = left + 1, right, self.in_rate, right
        maps = np.nonzero(free)[0]
        back = []
        if self.sources:
            places = [(self._back(m, by), self.size[m]) for m in maps.tolist()]
            back = [(column, size) for column, size in places if column >= 0]
        columns = [self.first_away + k, *maps, *(column for column, _ in back)]
        values = [1.0, *-self.size[maps], *(size for _, size in back)]
        columns += [self.first_waited + j + 1, self.first_waited + i]
        values += [-rate, rate]
        return _row(columns, values, rate * (self.elapsed[j] - self.elapsed[i]))


def _row(columns: Any, values: Any, right: float) -> Row:
    return np.asarray(columns, np.int64), np.asarray(values, float), float(right)


class _Events:
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
            rows.append(_row(columns, values, 0))
            begin, before = end, k
        return rows


@compiled()
def _least(
    outs: tuple[np.ndarray, np.ndarray, np.ndarray],
    ins: tuple[np.ndarray, np.ndarray, np.ndarray],
    need: np.ndarray,
    start: np.ndarray,
    run: np.ndarray,
    first_backward: int,
    out_rate: float,
    in_rate: float,
) -> Any:
    """The pairs that allow the fewest bytes to be away.

    Args:
        outs: Pointers by position, slots and bytes: from the position on so many
            more bytes may be away whose copy may start at the slot.
        ins: Likewise, with what must have been copied back by the slot.
        need: (n,) bytes that have to be away; where none, nothing is looked for.
        start: (n+1,) time at which the wait before each operation begins.
        run: (n,) time at which each operation begins.

    Returns:
        tuple: Per operation k the bytes that may have left by then, the i of that
        pair, the bytes that can be back in time, the j of that pair.
    """
    out_pointers, out_slots, out_values = outs
    in_pointers, in_slots, in_values = ins
    n = len(need)
    out_bytes, in_bytes = np.full(n, np.inf), np.full(n, np.inf)
    out_from, in_to = np.zeros(n, np.int64), np.zeros(n, np.int64)
    leaving, coming = np.zeros(n + 1), np.zeros(n + 1)
    for k in range(n):
        for e in range(out_pointers[k], out_pointers[k + 1]):
            leaving[out_slots[e]] += out_values[e]
        for e in range(in_pointers[k], in_pointers[k + 1]):
            coming[in_slots[e]] += in_values[e]
        if need[k] <= 0:
            continue
        earlier = 0.0
        for i in range(k + 1):
            allowed = earlier + out_rate * (run[k] - start[i])
            if allowed < out_bytes[k]:
                out_bytes[k], out_from[k] = allowed, i
            earlier += leaving[i]
        later = 0.0
        for j in range(first_backward, n):
            later += coming[j]
        for j in range(first_backward, n):
            later -= coming[j]
            if j > k:
                allowed = later + in_rate * (run[j] - start[k + 1])
                if allowed < in_bytes[k]:
                    in_bytes[k], in_to[k] = allowed, j
    return out_bytes, out_from, in_bytes, in_to


class _Chains:
    """What the replay of a map leads to, a few operations back.

    Attributes:
        made (dict): Column offset of ``(x, operation)``: the operation is replayed
            by the first use of map x.
        edges (list): ``(x, operation, item, again)``: the operation needs the item,
            which is first used after x; ``again`` makes it, -1 if nothing can.
        breaks (list): Per map the positions at which it is known to be back.
    """

    def __init__(self, problem: Problem) -> None:
        self.arrays = a = problem.arrays
        self.n_maps = len(problem.maps)
        self.made: dict[tuple[int, int], int] = {}
        self.edges: list[tuple[int, int, int, int]] = []
        for x in np.nonzero(problem.recomputable)[0].tolist():
            self._follow(x)
        breaks: list[set[int]] = [set() for _ in range(self.n_maps)]
        for x, _, item, _ in self.edges:
            if item < self.n_maps:
                breaks[item].add(int(a.first_use[x]))
        self.breaks = [sorted(positions) for positions in breaks]

    def _follow(self, x: int) -> None:
        a = self.arrays
        queue = [int(a.producer[x])]
        self.made[x, queue[0]] = len(self.made)
        for op in queue:
            for item in a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist():
                if a.present[item]:
                    continue
                if item < self.n_maps and a.first_use[item] <= a.first_use[x]:
                    continue
                again = self._maker(item)
                if again >= 0 and (x, again) not in self.made:
                    if len(queue) >= CHAIN:
                        continue
                    self.made[x, again] = len(self.made)
                    queue.append(again)
                self.edges.append((x, op, item, again))

    def _maker(self, item: int) -> int:
        """Operation whose replay makes an item; -1 if none does."""
        a, op = self.arrays, int(self.arrays.producer[item])
        if op < 0:
            return -1
        made = a.products[a.product_ptr[op] : a.product_ptr[op + 1]]
        return op if a.recipe_seconds[op] >= 0 and item in made else -1
