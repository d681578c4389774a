"""A proven lower bound: no executable plan is faster.

The bound is the optimum of a linear program in which every plan that passes
:mod:`chainer_hybridmem.validation` is feasible. Notation: before operation k compute
waits and replays for ``w_k`` seconds, then runs it for ``c_k``; ``W(i, j)`` is the time
from the beginning of the wait before operation i to the beginning of operation j.

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
sources
    what a replay reads by the first use of map x is back, or made again, by then: a
    swapped map so needed early leaves the sums and cuts above from there on
    (``first_back``), unless it is released only after the first backward
    operation (``first_late``; such a map is not away until then).

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
through forward. Copies may be issued in any order and anywhere, replays repeated, and
maps kept for longer: none of this lowers a load or shortens a wait below what is asked
for here. The graph may die within an operation; maps left to it then count at the
operation's first moment only.

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
from typing import Any

import numpy as np

from chainer_hybridmem.simulation.problem import Problem

ROUNDS = 30
CUTS_PER_ROUND = 60
ROUNDING = 1e-9  # share given away for sums in floating point
CHAIN = 2  # operations a chain of replays is followed at most
PATIENCE = 2  # rounds without progress after which the bound is left as it is


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
    while done < ROUNDS and stuck < PATIENCE:
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


class Relaxation:
    """The linear program of one problem under one limit, in seconds and limits.

    Bytes are divided by the limit, so that all numbers are of one order.
    """

    def __init__(self, problem: Problem, limit_bytes: int) -> None:
        a = problem.arrays
        self.arrays = a
        self.n, self.n_maps = len(a.seconds), len(problem.maps)
        self.scale = float(max(limit_bytes, 1))
        self.limit = limit_bytes / self.scale
        self.size = a.size[: self.n_maps] / self.scale
        self.out_rate = problem.profile.link.d2h_bytes_per_second / self.scale
        self.in_rate = problem.profile.link.h2d_bytes_per_second / self.scale
        self.base_seconds = problem.compute_seconds
        # Compute time before each operation.
        self.elapsed = np.concatenate([[0.0], np.cumsum(a.seconds)])
        n, n_maps = self.n, self.n_maps
        self.first_swap = 0
        self.first_recompute = n_maps
        self.first_replay = 2 * n_maps
        self.first_wait = self.first_replay + a.first_backward
        self.first_away = self.first_wait + n
        self.first_remade = self.first_away + n
        self.first_eligible = self.first_remade + n
        self.first_late = self.first_eligible + n  # s and r released after b0
        self.first_back = self.first_late + 2 * n_maps
        chains = _Chains(problem)
        self.breaks = chains.breaks
        self.first_made = self.first_back + sum(map(len, self.breaks))
        self.columns = self.first_made + len(chains.made)
        total = float(self.size.sum())
        self.longest = longest = self._longest_wait(problem)
        self.lower = np.zeros(self.columns)
        self.upper = np.concatenate(
            [
                np.ones(n_maps),
                problem.recomputable.astype(float),
                np.ones(a.first_backward),
                np.full(n, longest),
                np.full(3 * n, total),
                np.tile(a.first_use > a.first_backward, 2).astype(float),
                np.ones(self.columns - self.first_back),
            ]
        )
        self.cost = np.zeros(self.columns)
        self.cost[self.first_wait : self.first_away] = 1
        self.rows: list[tuple[np.ndarray, np.ndarray, float]] = []
        self.equations: list[tuple[np.ndarray, np.ndarray, float]] = []
        self.pairs: set[tuple[str, int, int]] = set()
        self._choice()
        self._replays()
        self._sources(chains)
        self._sums()
        self._memory(problem)

    def _longest_wait(self, problem: Problem) -> float:
        """As long as everything copied and replayed, nothing hidden, and a second."""
        copies = problem.swap_out_seconds.sum() + problem.swap_in_seconds.sum()
        recipes = np.maximum(problem.arrays.recipe_seconds, 0).sum()
        return float(copies + recipes) + 1.0

    def _row(self, columns: Any, values: Any, right: float) -> None:
        """``sum(values * x[columns]) <= right``."""
        pair = np.broadcast_arrays(
            np.asarray(columns, np.int64), np.asarray(values, float)
        )
        self.rows.append((pair[0].ravel(), pair[1].ravel(), float(right)))

    def _choice(self) -> None:
        for m in range(self.n_maps):
            self._row([self.first_swap + m, self.first_recompute + m], [1, 1], 1)

    def _replays(self) -> None:
        a = self.arrays
        for m in range(self.n_maps):
            if self.upper[self.first_recompute + m] > 0:
                made_by = self.first_replay + int(a.producer[m])
                self._row([self.first_recompute + m, made_by], [1, -1], 0)
        for op in range(a.first_backward):
            if a.recipe_seconds[op] < 0:
                self.upper[self.first_replay + op] = 0
                continue
            for j in range(a.input_ptr[op], a.input_ptr[op + 1]):
                item = int(a.inputs[j])
                source = int(a.producer[item])
                if item < self.n_maps or a.present[item]:
                    continue
                if a.recipe_seconds[source] < 0:
                    self.upper[self.first_replay + op] = 0
                else:
                    columns = [self.first_replay + op, self.first_replay + source]
                    self._row(columns, [1, -1], 0)
        used = np.nonzero(a.recipe_seconds[: a.first_backward] > 0)[0]
        waits = np.arange(self.first_wait + a.first_backward, self.first_wait + self.n)
        self._row(
            np.concatenate([self.first_replay + used, waits]),
            np.concatenate([a.recipe_seconds[used], -np.ones(len(waits))]),
            0,
        )

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

    def _sums(self) -> None:
        """Bytes that may be away, as running sums over the operations."""
        a = self.arrays
        released = _positions(a.release_from, self.n)
        used = _positions(a.first_use, self.n)
        b0 = a.first_backward
        steps: list[list[tuple[int, float]]] = [[] for _ in range(self.n + 1)]
        for m, positions in enumerate(self.breaks):
            size = float(self.size[m])
            for place, k in enumerate(positions):
                steps[k].append((self.back_of[m] + place, size))
                if place:
                    steps[k].append((self.back_of[m] + place - 1, -size))
            if positions:
                steps[a.first_use[m]].append(
                    (self.back_of[m] + len(positions) - 1, -size)
                )
        for first, variable, late in (
            (self.first_remade, self.first_recompute, self.first_late + self.n_maps),
            (self.first_eligible, self.first_swap, self.first_late),
        ):
            for k in range(self.n):
                leaving, coming = released[k], used[k]
                before = [first + k - 1] if k else []
                columns = [first + k, *before, *(variable + leaving)]
                columns += [*(variable + coming)]
                values = [1.0, *[-1.0] * len(before), *-self.size[leaving]]
                values += [*self.size[coming]]
                # Nothing that is released after b0 is away up to b0.
                early = leaving[a.first_use[leaving] > b0]
                columns += [*(late + early)]
                values += [*self.size[early]]
                if k == b0 + 1:
                    maps = np.nonzero(a.first_use > b0)[0]
                    columns += [*(late + maps)]
                    values += [*-self.size[maps]]
                if late == self.first_late:
                    columns += [column for column, _ in steps[k]]
                    values += [value for _, value in steps[k]]
                self.equations.append(
                    (np.array(columns, np.int64), np.array(values), 0.0)
                )
        for k in range(self.n):
            self._row([self.first_away + k, self.first_eligible + k], [1, -1], 0)

    def _memory(self, problem: Problem) -> None:
        a, profile = self.arrays, problem.profile
        ends = [op.first_event for op in profile.operations[1:]]
        ends.append(len(profile.events) + 1)
        for k in range(self.n):
            alive = (a.producer[: self.n_maps] < k) & (k <= a.last_use)
            dies = profile.operations[k].first_event <= profile.graph_end_event
            dies = dies and profile.graph_end_event < ends[k]
            fixed = a.fixed_start[k] if dies else a.fixed_peak[k]
            load = fixed / self.scale + self.size[alive].sum()
            if load <= self.limit:
                continue
            columns = [self.first_remade + k, self.first_away + k]
            self._row(columns, [-1, -1], self.limit - load)

    def solve(self) -> Solution | None:
        """The optimum, made safe against the solver's tolerances."""
        from scipy import optimize

        matrix, right = self._matrix(self.rows)
        equal, equal_right = self._matrix(self.equations)
        result = optimize.linprog(
            self.cost,
            A_ub=matrix,
            b_ub=right,
            A_eq=equal,
            b_eq=equal_right,
            bounds=np.stack([self.lower, self.upper], axis=1),
            method='highs',
        )
        if result.status != 0:
            return None
        # Multipliers of <= rows must not be positive in scipy's convention.
        below = np.minimum(result.ineqlin.marginals, 0)
        reduced = self.cost - matrix.T @ below - equal.T @ result.eqlin.marginals
        attained = np.where(reduced > 0, self.lower, self.upper) * reduced
        value = float(
            attained.sum() + below @ right + result.eqlin.marginals @ equal_right
        )
        seconds = self.base_seconds + min(value, self.longest)
        return Solution(seconds * (1 - ROUNDING), result.x)

    def _matrix(
        self, rows: list[tuple[np.ndarray, np.ndarray, float]]
    ) -> tuple[Any, np.ndarray]:
        from scipy import sparse

        lengths = [len(columns) for columns, _, _ in rows]
        matrix = sparse.csr_array(
            (
                np.concatenate([values for _, values, _ in rows]),
                np.concatenate([columns for columns, _, _ in rows]),
                np.cumsum([0, *lengths]),
            ),
            shape=(len(rows), self.columns),
        )
        matrix.sum_duplicates()
        return matrix, np.array([right for _, _, right in rows])

    def fractions(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Swapped and recomputed fraction of each map."""
        recompute = slice(self.first_recompute, self.first_recompute + self.n_maps)
        return x[: self.n_maps].copy(), x[recompute].copy()

    def cut(self, x: np.ndarray) -> bool:
        """Adds the pairs of operations that the solution violates most."""
        found = sorted([*self._late_outs(x), *self._late_ins(x)], reverse=True)
        for _, kind, left, right in found[:CUTS_PER_ROUND]:
            self.pairs.add((kind, left, right))
            if kind == 'out':
                self._cut_out(left, right)
            else:
                self._cut_in(left, right)
        return bool(found)

    def _may_be_away(self, k: int) -> np.ndarray:
        """(M,) whether a map can be without memory while operation k runs."""
        return (self.arrays.release_from <= k) & (k < self.arrays.first_use)

    def _waits_before(self, x: np.ndarray) -> np.ndarray:
        """(n+1,) waits in all before the one of each operation."""
        waits = x[self.first_wait : self.first_away]
        return np.concatenate([[0.0], np.cumsum(waits)])

    def _late_outs(self, x: np.ndarray) -> list[tuple[float, str, int, int]]:
        """Per operation k the i with the most bytes that cannot have left in time."""
        a, swap = self.arrays, x[: self.n_maps] * self.size
        before = self._waits_before(x)
        found = []
        for k in range(self.n):
            away = x[self.first_away + k]
            if away <= 1e-9:
                continue
            eligible = self._may_be_away(k)
            done = np.bincount(
                a.copy_from[eligible], swap[eligible], minlength=self.n + 1
            )
            # Bytes of maps with copy_from < i, for i = 0 .. k.
            earlier = np.concatenate([[0.0], np.cumsum(done)])[: k + 1]
            window = before[k + 1] - before[: k + 1]
            window += self.elapsed[k] - self.elapsed[: k + 1]
            excess = away - earlier - self.out_rate * window
            i = int(np.argmax(excess))
            if excess[i] > 1e-7 and ('out', i, k) not in self.pairs:
                found.append((float(excess[i]), 'out', i, k))
        return found

    def _late_ins(self, x: np.ndarray) -> list[tuple[float, str, int, int]]:
        """Per operation k the j with the most bytes that cannot be back in time."""
        a, swap = self.arrays, x[: self.n_maps] * self.size
        before = self._waits_before(x)
        found = []
        for k in range(self.n - 1):
            away = x[self.first_away + k]
            if away <= 1e-9:
                continue
            eligible = self._may_be_away(k)
            used = np.bincount(
                a.first_use[eligible], swap[eligible], minlength=self.n + 1
            )
            # Bytes of maps with first_use > j, for j = k+1 .. n-1.
            later = (used.sum() - np.cumsum(used))[k + 1 : self.n]
            later = later - self._back_bytes(x, eligible)[k + 1 : self.n]
            window = before[k + 2 : self.n + 1] - before[k + 1]
            window += self.elapsed[k + 1 : self.n] - self.elapsed[k + 1]
            excess = away - later - self.in_rate * window
            j = int(np.argmax(excess))
            if excess[j] > 1e-7 and ('in', k, k + 1 + j) not in self.pairs:
                found.append((float(excess[j]), 'in', k, k + 1 + j))
        return found

    def _back_bytes(self, x: np.ndarray, maps: np.ndarray) -> np.ndarray:
        """Per operation, bytes of the maps known to be back, but not in use yet."""
        result = np.zeros(self.n + 1)
        for m in np.nonzero(maps)[0].tolist():
            for place, k in enumerate(self.breaks[m]):
                nexts = [*self.breaks[m][place + 1 :], int(self.arrays.first_use[m])]
                result[k : nexts[0]] += self.size[m] * x[self.back_of[m] + place]
        return result

    def _cut_out(self, i: int, k: int) -> None:
        free = self._may_be_away(k) & (self.arrays.copy_from < i)
        self._cut(k, free, i, k, self.out_rate, k)

    def _cut_in(self, k: int, j: int) -> None:
        free = self._may_be_away(k) & (self.arrays.first_use > j)
        self._cut(k, free, k + 1, j, self.in_rate, j)

    def _cut(
        self, k: int, free: np.ndarray, i: int, j: int, rate: float, by: int
    ) -> None:
        """``N_k <= bytes of the free maps not back before by + rate * W(i, j)``."""
        maps = np.nonzero(free)[0]
        waits = np.arange(self.first_wait + i, self.first_wait + j + 1)
        pairs = [(self._back(m, by), self.size[m]) for m in maps.tolist()]
        back = np.array([c for c, _ in pairs if c >= 0], np.int64)
        sizes = np.array([v for c, v in pairs if c >= 0], float)
        columns = np.concatenate([[self.first_away + k], maps, back, waits])
        values = np.concatenate(
            [[1.0], -self.size[maps], sizes, np.full(len(waits), -rate)]
        )
        self._row(columns, values, rate * (self.elapsed[j] - self.elapsed[i]))


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
        made = a.products[a.product_ptr[op] : a.product_ptr[op + 1]]
        return op if a.recipe_seconds[op] >= 0 and item in made else -1


def _positions(position: np.ndarray, n: int) -> list[np.ndarray]:
    """Maps per position."""
    result: list[list[int]] = [[] for _ in range(n + 1)]
    for m, k in enumerate(position):
        result[k].append(m)
    return [np.array(maps, np.int64) for maps in result]
