"""A bound for every schedule of Checkmate's form: any operation runs at any stage.

Checkmate (Jain et al. 2020, *Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization*, section 4) copies nothing, but may run every operation of forward
and of backward again, as often as it likes, at any stage, and keep whatever it has
made. A plan of this package without swaps is such a schedule.

Stage s ends when operation s has run for the first time; operations do so in recorded
order. For the product v of an operation, with time ``c_v``, and a stage s of backward,
``L(v, s)`` says that v is made for the last time in stage s or later, ``P(v, s)`` that
it is there when stage s begins:

    minimise    sum(c_v) + sum(c_v L(v, first stage after v's own))
    subject to
    order       L(v, s + 1) <= L(v, s)
    sources     1 <= P(u, s) + L(u, s)              if an operation >= s reads u
                L(v, s) <= P(u, s) + L(u, s)        if v reads u
    memory      fixed peak of t + what t reads + P(w, t + 1) of all others <= limit

With a time budget, runs count by part of backward as well. Why every schedule is a
point is in ``docs/internals/bound.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from chainer_hybridmem.jit import clock
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.bound.relaxation import ROUNDING
from chainer_hybridmem.planning.search.bound.reversal import (
    graph_of_schedules,
    seconds_of_passes,
)
from chainer_hybridmem.planning.search.bound.solver import run_solver
from chainer_hybridmem.planning.search.bound.whole import TRUST
from chainer_hybridmem.planning.simulation.in_core import fixed_load
from chainer_hybridmem.planning.simulation.problem import Problem

# Of the time left, for more and more parts of backward. For Checkmate's U-Net in 5 GiB,
# two parts more each time, four stages apart, prove 2.0563 s; three, two stages apart,
# 2.0529 s; one part 2.0325 s.
SHARES = (0.3, 0.3, 0.3, 0.5, 1.0)
PARTS, APART = 2, 4


def bound_of_schedules(
    problem: Problem,
    limit_bytes: int,
    best_seconds: float = math.inf,
    time_budget: float = 0.0,
) -> float:
    """Seconds below which no schedule of Checkmate's form can be.

    Args:
        problem: Its operations read and write what its profile says, and work on
            nothing in place.
        limit_bytes: Memory limit.
        best_seconds: Of the fastest schedule known: what is slower is not looked at.
        time_budget: Seconds for asking whether operations run again as a whole or
            not at all; 0 is content with fractions.

    Returns:
        float: At most ``best_seconds``.
    """
    began = clock()
    program = _ScheduleProgram(problem, limit_bytes)
    seconds = program.solve_further()
    took = clock() - began
    passes = seconds_of_passes(graph_of_schedules(problem.profile, limit_bytes))
    if math.isfinite(passes):  # else no schedule fits
        seconds = max(seconds, (problem.compute_seconds + passes) * (1 - ROUNDING))
    deadline = clock() + time_budget
    for number, share in enumerate(SHARES):
        left = deadline - clock()
        if left <= number * took or not seconds < best_seconds < math.inf:
            break
        if number > 0:
            starts = program.choose_starts()
            if len(starts) == len(program.starts):
                break
            program = _ScheduleProgram(problem, limit_bytes, starts)
            seconds = max(seconds, program.solve_further())
        program.add_gradients(best_seconds - program.solved_seconds)
        left = max(share * (deadline - clock()), 0.0)
        seconds = max(seconds, program.solve_whole(best_seconds, left))
    return min(seconds, best_seconds)


class _Products(NamedTuple):
    """What operations make that may leave, and be made again.

    Attributes:
        ids (list of int): Storage of each.
        maker (list of int): The operation that makes it.
        last (list of int): The last operation that reads it when it runs first.
        readers (list of list of int): Operations that read it, ascending.
    """

    ids: list[int]
    maker: list[int]
    last: list[int]
    readers: list[list[int]]


def _list_products(profile: Profile) -> _Products:
    """Storages that an operation makes and that do not outlive the iteration."""
    readers: list[set[int]] = [set() for _ in profile.storages]
    for op in profile.operations:
        for s in op.reads:
            readers[s].add(op.index)
    products = _Products([], [], [], [])
    for storage in profile.storages:
        if storage.producer < 0 or storage.freed_at < 0:
            continue
        uses = readers[storage.id].union(storage.forward_uses, storage.backward_uses)
        uses = {use for use in uses if use > storage.producer}
        products.ids.append(storage.id)
        products.maker.append(storage.producer)
        products.last.append(max(uses, default=storage.producer))
        products.readers.append(sorted(uses))
    return products


class _ScheduleProgram:
    """Columns and rows; a column's least value is 0, its largest 1.

    Backward's operations have columns only where running them again may pay: without
    any they are not run again, and what that costs at most, by the prices of memory, is
    taken off the bound.

    Args:
        problem (Problem): What is bounded.
        limit_bytes (int): Memory limit.
        starts (sequence of int): Stages at which parts of backward begin, in each of
            which operations run again on their own; none for a single count.

    Attributes:
        starts (list of int): Those stages, and the first one of backward.
        solved_seconds (float): What has been solved last, with the prices there are.
    """

    def __init__(
        self, problem: Problem, limit_bytes: int, starts: Sequence[int] = ()
    ) -> None:
        profile = problem.profile
        self._products = products = _list_products(profile)
        self._first_backward = b0 = profile.first_backward
        self._seconds = [op.device_seconds for op in profile.operations]
        self._base_seconds = problem.compute_seconds
        scale = float(max(limit_bytes, 1))
        self._size = [profile.storages[s].nbytes / scale for s in products.ids]
        _, peak, _ = fixed_load(profile, set(products.ids))
        self._room = (limit_bytes - peak) / scale
        self._made_by: list[list[int]] = [[] for _ in self._seconds]
        for i, v in enumerate(products.maker):
            self._made_by[v].append(i)
        self._cost: list[float] = []
        self._whole: list[int] = []  # columns of operations that run again at all
        self._rows: list[tuple[list[int], list[float], float]] = []  # with right sides
        self._last_made: dict[tuple[int, int], int] = {}  # operation and stage
        self._there: dict[tuple[int, int], int] = {}  # product and stage
        self._prices = np.zeros(len(self._seconds) - b0 + 1)  # of rows of memory
        self.solved_seconds = self._base_seconds
        self.starts = sorted({b0, *starts}) if starts else []
        self._ends = [*self.starts[1:], len(self._seconds)]
        self._runs: dict[tuple[int, int], int] = {}  # operation and start of a part
        reach = self._find_reach()
        for v in range(b0):
            if self._made_by[v]:
                self._add_chain(v, b0, reach[v])
                self._add_runs(v, reach[v])
        for i in range(len(products.ids)):
            self._add_sources(i, reach)
            self._add_sources_of_parts(i)

    def _find_reach(self) -> list[int]:
        """Per operation of forward, the last stage in which running it may help."""
        reach = [0] * self._first_backward
        for v in reversed(range(self._first_backward)):
            for i in self._made_by[v]:
                readers = self._products.readers[i]
                again = [reach[r] for r in readers if r < self._first_backward]
                reach[v] = max([reach[v], self._products.last[i], *again])
        return reach

    def _add_chain(self, v: int, first: int, last: int) -> None:
        """Columns that say that ``v`` is made for the last time in a stage or later."""
        for s in range(first, last + 1):
            column = self._last_made[v, s] = len(self._cost)
            self._cost.append(0.0 if s > first else self._seconds[v])
            if s == first:
                self._whole.append(column)
            else:
                self._rows.append(([column, column - 1], [1.0, -1.0], 0.0))

    def _add_runs(self, v: int, last: int) -> None:
        """Columns that say that ``v`` runs again in a part; they alone cost."""
        for start, end in zip(self.starts, self._ends, strict=False):
            if start > last:
                break
            column = self._runs[v, start] = len(self._cost)
            self._cost.append(self._seconds[v])
            self._whole.append(column)
            columns, values = [self._last_made[v, start], column], [1.0, -1.0]
            if end <= last:
                columns.append(self._last_made[v, end])
                values.append(-1.0)
            self._rows.append((columns, values, 0.0))
        if self.starts and last >= self._first_backward:
            self._cost[self._last_made[v, self._first_backward]] = 0.0

    def _add_sources(self, i: int, reach: list[int]) -> None:
        """Before the last stage that reads a product anyway, rows would say nothing."""
        maker = self._products.maker[i]
        if maker >= self._first_backward:
            return
        begin = max(self._first_backward, self._products.last[i] + 1)
        for s in range(begin, reach[maker] + 1):
            self._there[i, s] = len(self._cost)
            self._cost.append(0.0)
        for r in self._products.readers[i]:
            if r >= self._first_backward or not self._made_by[r]:
                continue
            for s in range(begin, reach[r] + 1):
                columns = [self._last_made[r, s], self._there[i, s]]
                columns.append(self._last_made[maker, s])
                self._rows.append((columns, [1.0, -1.0, -1.0], 0.0))

    def _add_sources_of_parts(self, i: int) -> None:
        """What a part reads is there when it begins, or runs again in it."""
        maker, readers = self._products.maker[i], self._products.readers[i]
        if maker >= self._first_backward:
            return
        for start in self.starts:
            if start <= self._products.last[i]:
                there = self._there[i, start] = len(self._cost)
                self._cost.append(0.0)
                columns = [there, self._last_made[maker, start]]
                self._rows.append((columns, [-1.0, -1.0], -1.0))
        for start, end in zip(self.starts, self._ends, strict=False):
            if (i, start) not in self._there:
                break
            made = [self._there[i, start], self._runs[maker, start]]
            if any(start <= r < end for r in readers):
                self._rows.append((made, [-1.0, -1.0], -1.0))
            for reader in [self._runs.get((r, start)) for r in readers]:
                if reader is not None:
                    self._rows.append(([reader, *made], [1.0, -1.0, -1.0], 0.0))
            if (i, end) in self._there:
                columns = [self._there[i, end], *made]
                self._rows.append((columns, [1.0, -1.0, -1.0], 0.0))

    def choose_starts(self) -> list[int]:
        """Those there are, and the stages behind the operations with dearest memory."""
        dearest = np.argsort(-self._prices, kind='stable') + self._first_backward
        starts = list(self.starts)
        most = len(starts) + PARTS
        for s in dearest.tolist():
            apart = all(abs(s - other) >= APART for other in starts)
            if apart and s < len(self._seconds) and len(starts) < most:
                starts.append(s)
        return starts

    def _memory(self, t: int) -> tuple[list[int], list[float], float]:
        """What is there while ``t`` runs for the first time."""
        products, columns, values = self._products, [], []
        room = float(self._room[t])
        for i, size in enumerate(self._size):
            if products.maker[i] >= t:
                continue  # what t makes is part of the fixed peak
            if t in products.readers[i]:
                room -= size
            elif (i, t + 1) in self._there:
                columns.append(self._there[i, t + 1])
                values.append(size)
            elif t < products.last[i]:
                room -= size
                column = self._last_made.get((products.maker[i], t + 1))
                if column is not None:
                    columns.append(column)
                    values.append(-size)
        return columns, values, room

    def _build(self) -> tuple[Any, np.ndarray]:
        """Matrix and right side; the rows of memory come last."""
        from scipy import sparse

        stages = range(self._first_backward - 1, len(self._seconds))
        memory = [self._memory(t) for t in stages]
        rows = [*self._rows, *memory]
        lengths = [len(columns) for columns, _, _ in rows]
        matrix = sparse.csr_array(
            (
                np.array([value for _, values, _ in rows for value in values]),
                np.array([c for columns, _, _ in rows for c in columns], np.int64),
                np.cumsum([0, *lengths]),
            ),
            shape=(len(rows), len(self._cost)),
        )
        return matrix, np.array([right for _, _, right in rows])

    def solve_further(self) -> float:
        """The optimum with columns for every operation of backward that needs some."""
        seconds = self.solve()
        while self.add_gradients(-ROUNDING * seconds):
            seconds = max(seconds, self.solve())
        return seconds

    def solve(self) -> float:
        """The optimum, made safe against the solver's tolerances."""
        from scipy import optimize

        matrix, right = self._build()
        cost = np.array(self._cost)
        result = run_solver(
            lambda: optimize.linprog(
                cost, A_ub=matrix, b_ub=right, bounds=(0, 1), method='highs-ipm'
            )
        )
        if result.status != 0:  # no schedule fits, or the solver has given up
            return self._base_seconds
        below = np.minimum(result.ineqlin.marginals, 0)
        reduced = cost - matrix.T @ below
        value = float(np.minimum(reduced, 0).sum() + below @ right)
        self._prices = -below[len(self._rows) :]
        value += sum(min(r, 0.0) for r in self._price_gradients().values())
        self.solved_seconds = (self._base_seconds + value) * (1 - ROUNDING)
        return self.solved_seconds

    def _price_gradients(self) -> dict[int, float]:
        """Seconds that it costs at least to run an operation of backward again.

        What that needs is not counted, and it is away in every stage but those that
        read it.
        """
        b0, prices = self._first_backward, self._prices
        result = {}
        for v in range(b0, len(self._seconds)):
            if not self._made_by[v] or (v, v + 1) in self._last_made:
                continue
            won = 0.0
            for i in self._made_by[v]:
                stages = set(range(v + 1, self._products.last[i]))
                stages -= set(self._products.readers[i])
                won += self._size[i] * sum(prices[t - b0 + 1] for t in stages)
            result[v] = self._seconds[v] - won
        return result

    def add_gradients(self, most_seconds: float) -> bool:
        """Columns for what costs less to run again; whether there is any."""
        found = False
        for v, seconds in self._price_gradients().items():
            last = max(self._products.last[i] for i in self._made_by[v])
            if seconds < most_seconds and last > v:
                self._add_chain(v, v + 1, last)
                found = True
        return found

    def solve_whole(self, best_seconds: float, time_budget: float) -> float:
        """What the solver's tree proves if operations run again or do not."""
        from scipy import optimize, sparse

        matrix, right = self._build()
        cost = np.array(self._cost)
        whole = np.zeros(len(cost))
        whole[self._whole] = 1
        most = best_seconds - self._base_seconds
        rows = optimize.LinearConstraint(
            sparse.vstack([matrix, sparse.csr_array(cost[None, :])]),
            -np.inf,
            np.append(right, most),
        )
        result = run_solver(
            lambda: optimize.milp(
                cost,
                integrality=whole,
                bounds=optimize.Bounds(0, 1),
                constraints=rows,
                options={'time_limit': time_budget, 'mip_rel_gap': 1e-7},
            )
        )
        floor: float | None = result.mip_dual_bound
        if result.status == 2 and 'nfeasible' in result.message:
            floor = most
        if floor is None or not math.isfinite(floor):
            return self._base_seconds
        return (self._base_seconds + min(max(floor, 0.0), most)) * (1 - TRUST)
