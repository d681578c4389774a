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

Why every plan satisfies them. A map that is swapped is away during k only if it is
released before k or earlier and its swap-in starts before k + 1 or later. The release
waits for the copy, which starts no sooner than forward's last use of the map; all
copies that have ended by the start of operation k and started no sooner than the
wait before operation i share one link within ``W(i, k)``. The swap-in is waited
for no later than before the first use, so the same holds on the way back. A map that
is recomputed is absent only between its release and its replay, which comes no
later than its first use; a map that is kept is there until its last use. Sources of
a replay are there, or a replay in the same place has made them; forward's transients
can only be made. Copies may be issued in any order and anywhere, replays repeated, and
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
    return tightened(Relaxation(problem, limit_bytes))


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
        self.base_seconds = problem.in_core_seconds
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
        self.columns = self.first_eligible + n
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
            ]
        )
        self.cost = np.zeros(self.columns)
        self.cost[self.first_wait : self.first_away] = 1
        self.rows: list[tuple[np.ndarray, np.ndarray, float]] = []
        self.equations: list[tuple[np.ndarray, np.ndarray, float]] = []
        self.pairs: set[tuple[str, int, int]] = set()
        self._choice()
        self._replays()
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

    def _sums(self) -> None:
        """Bytes that may be away, as running sums over the operations."""
        a = self.arrays
        released = _positions(a.release_from, self.n)
        used = _positions(a.first_use, self.n)
        for first, variable in (
            (self.first_remade, self.first_recompute),
            (self.first_eligible, self.first_swap),
        ):
            for k in range(self.n):
                leaving, coming = released[k], used[k]
                before = [first + k - 1] if k else []
                columns = [first + k, *before, *(variable + leaving)]
                columns += [*(variable + coming)]
                values = [1.0, *[-1.0] * len(before), *-self.size[leaving]]
                values += [*self.size[coming]]
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

    def _late_outs(self, x: np.ndarray) -> list[tuple[float, str, int, int]]:
        """Per operation k the i with the most bytes that cannot have left in time."""
        a, swap = self.arrays, x[: self.n_maps] * self.size
        waits = x[self.first_wait : self.first_away]
        before = np.concatenate([[0.0], np.cumsum(waits)])  # waits before operation i
        found = []
        for k in range(self.n):
            away = x[self.first_away + k]
            if away <= 1e-9:
                continue
            eligible = (a.release_from <= k) & (k < a.first_use)
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
        waits = x[self.first_wait : self.first_away]
        before = np.concatenate([[0.0], np.cumsum(waits)])
        found = []
        for k in range(self.n - 1):
            away = x[self.first_away + k]
            if away <= 1e-9:
                continue
            eligible = (a.release_from <= k) & (k < a.first_use)
            used = np.bincount(
                a.first_use[eligible], swap[eligible], minlength=self.n + 1
            )
            # Bytes of maps with first_use > j, for j = k+1 .. n-1.
            later = (used.sum() - np.cumsum(used))[k + 1 : self.n]
            window = before[k + 2 : self.n + 1] - before[k + 1]
            window += self.elapsed[k + 1 : self.n] - self.elapsed[k + 1]
            excess = away - later - self.in_rate * window
            j = int(np.argmax(excess))
            if excess[j] > 1e-7 and ('in', k, k + 1 + j) not in self.pairs:
                found.append((float(excess[j]), 'in', k, k + 1 + j))
        return found

    def _cut_out(self, i: int, k: int) -> None:
        a = self.arrays
        free = (a.release_from <= k) & (k < a.first_use) & (a.copy_from < i)
        self._cut(k, free, i, k, self.out_rate)

    def _cut_in(self, k: int, j: int) -> None:
        a = self.arrays
        free = (a.release_from <= k) & (k < a.first_use) & (a.first_use > j)
        self._cut(k, free, k + 1, j, self.in_rate)

    def _cut(self, k: int, free: np.ndarray, i: int, j: int, rate: float) -> None:
        """``N_k <= bytes of the free maps + rate * W(i, j)``."""
        maps = np.nonzero(free)[0]
        waits = np.arange(self.first_wait + i, self.first_wait + j + 1)
        columns = np.concatenate([[self.first_away + k], maps, waits])
        values = np.concatenate([[1.0], -self.size[maps], np.full(len(waits), -rate)])
        self._row(columns, values, rate * (self.elapsed[j] - self.elapsed[i]))


def _positions(position: np.ndarray, n: int) -> list[np.ndarray]:
    """Maps per position."""
    result: list[list[int]] = [[] for _ in range(n + 1)]
    for m, k in enumerate(position):
        result[k].append(m)
    return [np.array(maps, np.int64) for maps in result]
