"""What every planner shares: candidates, their evaluation, the final plan."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import types

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.jit import clock, compiled
from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan, Replay, Tier
from chainer_hybridmem.planning.records.rules import pairs_of
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.simulation import kernel
from chainer_hybridmem.planning.simulation.arrays import ProblemArrays
from chainer_hybridmem.planning.simulation.fitting import fitted
from chainer_hybridmem.planning.simulation.obedience import (
    NUMBERS,
    keeps_everything,
    obeyed,
)
from chainer_hybridmem.planning.simulation.problem import Problem, with_rules
from chainer_hybridmem.planning.simulation.timeline import (
    plan_from_positions,
    run_lanes,
)
from chainer_hybridmem.planning.simulation.work import (
    KEEP,
    LATE,
    PASSED,
    RECOMPUTE,
    SWAP,
    Outcome,
    Work,
    copy_into,
    make_work,
)
from chainer_hybridmem.units import format_apart

__all__ = [
    'KEEP',
    'LATE',
    'PASSED',
    'NUMBERS',
    'RECOMPUTE',
    'SWAP',
    'Candidate',
    'Search',
    'accept',
    'check_host',
    'infeasible',
    'kept_load',
    'least_memory',
]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An assignment of actions and what the simulator says about it.

    Attributes:
        action (ndarray): (M,) KEEP, SWAP, RECOMPUTE, LATE or PASSED.
        seconds (float): Simulated time; infinite if it does not fit.
        peak_bytes (int): Highest load.
        worst (int): Operation with the highest load.
        collective (bool): Whether replays keep what they pass.
        release_stall (ndarray): (M,) seconds compute waits for each swap-out.
        need_stall (ndarray): (M,) seconds compute waits for each swap-in.
    """

    action: np.ndarray
    seconds: float
    peak_bytes: int
    worst: int
    collective: bool
    release_stall: np.ndarray
    need_stall: np.ndarray

    @property
    def fits(self) -> bool:
        """Whether the load stays inside the limit at every moment."""
        return self.seconds < float('inf')


class Search:
    """Evaluates candidates of one problem under one limit, and counts them.

    Args:
        problem (Problem): What to plan.
        limit_bytes (int): Memory limit.
        lead (ndarray or None): (n,) earliest position of a swap-in by the
            operation that needs it. None: as early as memory allows.
        barrier (bool): Whether backward starts when every swap-out has finished.
    """

    def __init__(
        self,
        problem: Problem,
        limit_bytes: int,
        lead: np.ndarray | None = None,
        barrier: bool = True,
    ) -> None:
        self.problem = problem
        self.limit_bytes = limit_bytes
        n = len(problem.arrays.seconds)
        earliest = np.full(n, problem.arrays.first_backward, np.int64)
        self.lead = earliest if lead is None else np.maximum(lead, earliest)
        self.barrier = barrier
        self.work = make_work(problem.arrays)
        self.simulations = 0
        self.started = clock()
        with self.uncounted():  # loads what is compiled
            self.evaluate(self.fill(SWAP))

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Excludes this block from planning time and counts."""
        began, simulations = clock(), self.simulations
        try:
            yield
        finally:
            self.started += clock() - began
            self.simulations = simulations

    def fill(self, action: int) -> np.ndarray:
        """An assignment with the same action for every map that may have it."""
        return self.obeyed(np.full(len(self.problem.maps), action, np.int64))

    def obeyed(self, action: np.ndarray) -> np.ndarray:
        """The assignment, changed where the rules do not allow it."""
        return obeyed(self.problem.arrays, action)

    def evaluate(self, action: np.ndarray, free: int = -1) -> Candidate:
        """Simulates one assignment, or what the rules make of it.

        Args:
            action: (M,) KEEP, SWAP, RECOMPUTE, LATE or PASSED.
            free: Index of a map whose copies take no time, to measure what
                swapping it costs; -1 for none.
        """
        self.simulations += 1
        action = self.obeyed(action)
        out_seconds = self.problem.swap_out_seconds
        in_seconds = self.problem.swap_in_seconds
        if free >= 0:
            out_seconds, in_seconds = out_seconds.copy(), in_seconds.copy()
            out_seconds[free] = in_seconds[free] = 0.0
        seconds, peak_bytes, worst, _, collective = kernel.judge(
            self.problem.arrays,
            action,
            self.limit_bytes,
            self.lead,
            out_seconds,
            in_seconds,
            self.barrier,
            np.inf,
            self.work,
        )
        stalls = self.work.stalls.copy()
        return Candidate(action.copy(), seconds, peak_bytes, worst, collective, *stalls)

    def positions(self, candidate: Candidate) -> Work:
        """Where everything of a candidate happens, replays included."""
        entries = 0
        for _ in range(2):  # the second time, the program has the room it needs
            work = make_work(self.problem.arrays, entries)
            result = kernel.evaluate(
                self.problem.arrays,
                candidate.action,
                self.limit_bytes,
                self.lead,
                self.problem.swap_out_seconds,
                self.problem.swap_in_seconds,
                candidate.collective,
                self.barrier,
                np.inf,
                work,
            )
            entries = Outcome(*result).entries
        return work

    def find_fastest(self) -> Candidate:
        """The first of the fastest assignments, after all have been simulated."""
        action = self.fill(SWAP)
        self.simulations += find_fastest(
            self.problem.arrays,
            self.limit_bytes,
            self.lead,
            self.problem.swap_out_seconds,
            self.problem.swap_in_seconds,
            self.barrier,
            self.work,
            action,
        )
        return self.evaluate(action)

    def in_core_fits(self) -> bool:
        """Whether all fits with every map kept, and the rules allow it.

        Functions run in parts as the problem has them: in-core is this without any.
        """
        fits = self.problem.in_core_peak_bytes <= self.limit_bytes
        return fits and keeps_everything(self.problem.arrays)

    def seconds(self, work: Work) -> float:
        """Simulated time with everything at the given positions."""
        self.simulations += 1
        return run_lanes(self.problem, work)

    def finish(self, planner: str, candidate: Candidate, **options: Any) -> Plan:
        """Turns the chosen candidate into a checked plan.

        Raises:
            InfeasibleError: If it does not fit.
        """
        if not candidate.fits:
            raise infeasible(self.problem, self.limit_bytes, planner, candidate)
        work = self.positions(candidate)
        return self._plan(planner, candidate.action, work, candidate.seconds, options)

    def finish_at(
        self, planner: str, action: np.ndarray, work: Work, **options: Any
    ) -> Plan:
        """Like :meth:`finish`, for positions of the planner's own.

        Args:
            planner: Name of the planner.
            action: (M,) KEEP, SWAP, RECOMPUTE, LATE or PASSED.
            work: That of :meth:`positions`, with releases and swap-ins moved.
            options: What the planner ran with.

        Raises:
            InfeasibleError: If it does not fit.
        """
        seconds = self.seconds(work)
        return self._plan(planner, action, work, seconds, options)

    def _plan(
        self,
        planner: str,
        action: np.ndarray,
        work: Work,
        seconds: float,
        options: dict[str, Any],
    ) -> Plan:
        if self.problem.profile.disk_link is None:
            work.on_disk[:] = False  # what has no room is beyond the limit
        maps, replays, sources = plan_from_positions(self.problem, action, work)
        plan = self._plan_with(planner, maps, replays, seconds, 0, options)
        plan = dataclasses.replace(plan, sources=sources)
        check_host(self.problem, plan)
        loads = check_plan(self.problem.profile, plan)
        peak_bytes = max(loads)
        if peak_bytes > self.limit_bytes:
            worst = loads.index(peak_bytes)
            raise _too_much(self.problem, self.limit_bytes, planner, peak_bytes, worst)
        return dataclasses.replace(plan, predicted_peak_bytes=peak_bytes)

    def finish_in_core(self, planner: str, **options: Any) -> Plan:
        """The plan that leaves every map to Chainer.

        Raises:
            InfeasibleError: If that does not fit.
            OptionError: If the rules do not allow it.
        """
        if not keeps_everything(self.problem.arrays):
            says = '; '.join(map(str, self.problem.rules))
            raise OptionError(
                f'Planner {planner!r} cannot obey the rules, for it keeps everything: '
                f'{says}.'
            )
        if not self.in_core_fits():
            raise infeasible(self.problem, self.limit_bytes, planner, None)
        problem = self.problem
        return self._plan_with(
            planner,
            tuple(MapPlan(s.id, Action.KEEP) for s in problem.maps),
            (),
            problem.still_seconds,
            problem.in_core_peak_bytes,
            options,
        )

    def _plan_with(
        self,
        planner: str,
        maps: tuple[MapPlan, ...],
        replays: tuple[Replay, ...],
        seconds: float,
        peak_bytes: int,
        options: dict[str, Any],
    ) -> Plan:
        problem = self.problem
        return Plan(
            planner=planner,
            options=options,
            profile_fingerprint=problem.profile.fingerprint(),
            memory_limit_bytes=self.limit_bytes,
            maps=maps,
            replays=replays,
            predicted_seconds=seconds,
            predicted_peak_bytes=peak_bytes,
            in_core_seconds=problem.in_core_seconds,
            lower_bound_seconds=problem.still_seconds,
            planning_seconds=clock() - self.started,
            simulations=self.simulations,
            host_limit_bytes=problem.host_limit_bytes,
            parts=problem.parts,
            rules=pairs_of(problem.rules),
        )


def accept(problem: Problem, plan: Plan, limit_bytes: int | None = None) -> Plan:
    """Checks a finished plan: the one place for it, with :func:`.check_plan` inside.

    Args:
        problem: What the plan is for.
        plan: Obeys the rules that it names.
        limit_bytes: Most bytes at any moment; None takes no notice of memory.

    Returns:
        Plan: With its peak.

    Raises:
        InfeasibleError: If host copies have no place.
        PlanError: If it is for another profile, cannot be executed, breaks a rule or
            exceeds the limit.
    """
    check_host(problem, plan)
    loads = check_plan(problem.profile, plan, limit_bytes)
    return dataclasses.replace(plan, predicted_peak_bytes=max(loads))


def check_host(problem: Problem, plan: Plan) -> None:
    """Refuses a plan whose host copies have no place.

    Raises:
        InfeasibleError: With what it needs and the limit.
    """
    limit_bytes = problem.host_limit_bytes
    needed = plan.tier_bytes(problem.profile, Tier.RAM)
    if limit_bytes is None or needed <= limit_bytes:
        return
    needs, limit = format_apart(needed, limit_bytes)
    where = 'Raise host_limit, give swap_dir a folder'
    if problem.profile.disk_link is not None:
        where = 'Raise host_limit'
    raise InfeasibleError(
        f'Planner {plan.planner!r} does not fit the host: what it swaps takes '
        f'{needs} ({needed} bytes) of host memory, host_limit is {limit} '
        f'({limit_bytes} bytes). {where}, raise the memory '
        "limit, or use planner='hybrid', which keeps and recomputes instead where it "
        'can.',
        needed,
        limit_bytes,
    )


def kept_load(problem: Problem) -> np.ndarray:
    """(n,) highest load of each operation if every map is kept to its last use."""
    a, n_maps = problem.arrays, len(problem.maps)
    change = np.zeros(len(a.seconds) + 1, np.int64)
    np.add.at(change, a.producer[:n_maps] + 1, a.size[:n_maps])
    np.add.at(change, a.last_use + 1, -a.size[:n_maps])
    load: np.ndarray = np.cumsum(change)[:-1] + a.fixed_peak
    return load


def least_memory(problem: Problem) -> tuple[int, int]:
    """Smallest limit under which any plan exists, and the operation that sets it.

    Everything is swapped, released as soon as possible and brought back at
    the last moment: what remains is what single operations need, in as many parts as
    can be. Where rules forbid to swap, plans that recompute may do with less.
    """
    search = Search(fitted(problem, 0), 0)
    candidate = search.evaluate(search.fill(SWAP))
    return candidate.peak_bytes, candidate.worst


def infeasible(
    problem: Problem, limit_bytes: int, planner: str, candidate: Candidate | None
) -> InfeasibleError:
    """The error for a limit that the planner cannot keep, with numbers."""
    if candidate is None:
        plain, kept = problem.in_core.plain_peak_bytes, problem.in_core_peak_bytes
        needed = kept if plain is None else plain
        return _too_much(problem, limit_bytes, planner, needed, None)
    peak_bytes, worst = int(candidate.peak_bytes), int(candidate.worst)
    return _too_much(problem, limit_bytes, planner, peak_bytes, worst)


def _too_much(
    problem: Problem, limit_bytes: int, planner: str, needed: int, at: int | None
) -> InfeasibleError:
    """The error for a plan whose operation ``at`` needs too much; None: in-core.

    Its numbers are what plans need. Without a plan, a session may train below them.
    """
    least, worst = least_memory(with_rules(problem, ()))
    label = problem.profile.operations[worst].label
    limit, smallest, need = (
        f'{text} ({nbytes} bytes)'
        for text, nbytes in zip(
            format_apart(limit_bytes, least, needed),
            (limit_bytes, least, needed),
            strict=True,
        )
    )
    if least > limit_bytes:
        message = (
            f'Operation {worst} ({label}) alone needs {smallest}, parameters and all '
            f'else that never leaves included, more than the memory limit of {limit}. '
            f'The least memory of any plan is {least} bytes; raise the limit or lower '
            'the batch size.'
        )
        return InfeasibleError(message, least, limit_bytes)
    if at is None:
        what = 'plain Chainer, whose graph holds every feature map to its end,'
    else:
        what = f'operation {at} ({problem.profile.operations[at].label})'
    advice = f"Planner 'swap-all' has a plan from {smallest} on"
    if problem.rules and at is not None:
        says = '; '.join(map(str, problem.rules))
        advice = (
            f'Loosen a rule ({says}) or raise the limit: without rules, planner '
            f"'swap-all' has a plan from {smallest} on"
        )
    message = (
        f'Planner {planner!r} does not fit: {what} needs {need}, the memory limit is '
        f'{limit}. {advice}.'
    )
    return InfeasibleError(message, needed, limit_bytes)


def count_assignments(problem: Problem) -> int:
    """Number of ways to keep, swap or recompute every map, as far as it may."""
    return math.prod(problem.arrays.allowed.sum(axis=1).tolist())


_i64, _f64, _bool = types.int64, types.float64, types.boolean


@compiled(
    _i64(
        ProblemArrays.compiled,
        _i64,
        _i64[::1],
        _f64[::1],
        _f64[::1],
        _bool,
        Work.compiled,
        _i64[::1],
    ),
    apart=True,
    uses=(kernel, *kernel.PARTS),
)
def find_fastest(
    a: ProblemArrays,
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
    copy_into(best, action)
    best_seconds, count, m = np.inf, 0, 0
    while m < len(action):
        seconds = kernel.judge(
            a, action, limit, lead, out_seconds, in_seconds, barrier, best_seconds, w
        )[0]
        count += 1
        if seconds < best_seconds:
            best_seconds = seconds
            copy_into(best, action)
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


def is_convolution(function: str) -> bool:
    """Whether a function name is that of a convolution."""
    return 'convolution' in function.lower()


def number_kinds(problem: Problem) -> np.ndarray:
    """(M,) number of the function that makes each map; states are one kind, too."""
    operations = problem.profile.operations
    names = [
        s.category.value if s.persistent else operations[s.producer].function
        for s in problem.maps
    ]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def group_alike(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Maps by group of those of one kind, size and choice: pointers, and the maps."""
    n_maps = len(problem.maps)
    a = problem.arrays
    rows = [number_kinds(problem), a.size[:n_maps], *a.allowed.T]
    group = np.unique(np.stack(rows), axis=1, return_inverse=True)[1].ravel()
    pointers = np.concatenate([[0], np.cumsum(np.bincount(group))]).astype(np.int64)
    return pointers, np.lexsort((np.arange(n_maps), group)).astype(np.int64)
