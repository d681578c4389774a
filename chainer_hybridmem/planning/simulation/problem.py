"""What a planner plans: a profile, and what follows from it once."""

from __future__ import annotations

import bisect
import dataclasses
import inspect
from typing import Any, NamedTuple

import numpy as np

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.records.plan import Part, Plan
from chainer_hybridmem.planning.records.profile import (
    PERSISTENT,
    Category,
    Profile,
    SlotKind,
    Storage,
)
from chainer_hybridmem.planning.records.profile_file import check_profile
from chainer_hybridmem.planning.records.rules import Rules, check_rules
from chainer_hybridmem.planning.records.splits import (
    EXACT,
    Splitting,
    check_splitting,
    in_parts,
)
from chainer_hybridmem.planning.simulation.arrays import (
    ProblemArrays,
    list_recipes,
)
from chainer_hybridmem.planning.simulation.in_core import (
    between_phases,
    fixed_load,
    held_by_graph,
    in_core_peak_bytes,
    in_core_peaks,
    in_core_seconds,
    last_forward,
    still_seconds,
)
from chainer_hybridmem.planning.simulation.obedience import (
    rule_arrays,
    with_free_choice,
)
from chainer_hybridmem.planning.simulation.work import RECOMPUTE

# -- what crosses iterations --------------------------------------------------
CrossIteration = bool | str
STATES, ALL = 'states', 'all'
CROSSINGS: dict[CrossIteration, frozenset[Category]] = {
    False: frozenset(),
    STATES: frozenset({Category.OPTIMIZER_STATE}),
    ALL: PERSISTENT,
    True: PERSISTENT,
}


def crossing_of(cross_iteration: CrossIteration) -> frozenset[Category]:
    """What may leave between its uses of two iterations.

    Args:
        cross_iteration: ``'states'`` for optimizer states, ``'all'`` or True for
            parameters as well, False for nothing.

    Raises:
        OptionError: If it is something else.
    """
    if isinstance(cross_iteration, bool | str) and cross_iteration in CROSSINGS:
        return CROSSINGS[cross_iteration]
    raise OptionError(
        f'cross_iteration is {cross_iteration!r}; False, True, {STATES!r} or {ALL!r} '
        'is needed.'
    )


def decided_by(profile: Profile, plan: Plan) -> CrossIteration:
    """What crosses iterations under a plan, as ``make_problem`` wants it."""
    kinds = {
        profile.storages[entry.storage].category
        for entry in plan.maps
        if 0 <= entry.storage < len(profile.storages)
    }
    if Category.PARAMETER in kinds:
        return ALL
    return STATES if Category.OPTIMIZER_STATE in kinds else False


BEYOND = 10.0  # what host copies without a place cost, of all else there is to do


# -- the problem --------------------------------------------------------------
class InCore(NamedTuple):
    """The iteration in which every map stays.

    Attributes:
        peak_bytes (int): Highest load, with functions in parts as the profile and the
            problem's ``parts`` have them.
        plain_peak_bytes (int or None): Highest load of plain Chainer, which runs every
            function as a whole; None if the recording ran some in parts, and nothing
            has seen it.
        seconds (float): Time of plain Chainer, without the session's own work.
        still_seconds (float): Time under a plan that moves nothing, with it.
        forward_bytes (int): Highest load of forward, as recorded.
    """

    peak_bytes: int
    plain_peak_bytes: int | None
    seconds: float
    still_seconds: float
    forward_bytes: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a planner needs to know, derived once from a profile.

    Attributes:
        profile (Profile): Where it comes from.
        maps (tuple of Storage): What a plan decides about, by id: feature maps in
            order of production, then what crosses iterations.
        cross_iteration (bool or str): What crosses iterations; as in
            :func:`crossing_of`.
        items (tuple of int): Storage id of every item.
        arrays (ProblemArrays): For the compiled kernels.
        swap_out_seconds (ndarray): Seconds of each map's copy to the host.
        swap_in_seconds (ndarray): Seconds of each map's copy back.
        in_core (InCore): The iteration in which every map stays.
        host_limit_bytes (int or None): Most bytes of host copies in RAM; None is
            without a limit.
        splitting (bool or str): Which functions plans may take in parts; as in
            :func:`.check_splitting`.
        parts (tuple of Part): Those that run in parts already.
        rules (tuple of Rule): What the user says about feature maps by name.
        sources (tuple of int): What forward drops and backward never reads, and what
            may stay for replays: maps after all others, kept or recomputed.
        bounds (dict): Proven bounds found so far, by limit.
    """

    profile: Profile
    maps: tuple[Storage, ...]
    cross_iteration: CrossIteration
    items: tuple[int, ...]
    arrays: ProblemArrays
    swap_out_seconds: np.ndarray
    swap_in_seconds: np.ndarray
    in_core: InCore
    host_limit_bytes: int | None = None
    splitting: Splitting = EXACT
    parts: tuple[Part, ...] = ()
    rules: Rules = ()
    sources: tuple[int, ...] = ()
    bounds: dict[int, Any] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def recomputable(self) -> np.ndarray:
        """(M,) whether each map can be made again exactly, and the rules allow it."""
        return self.arrays.allowed[:, RECOMPUTE]

    @property
    def in_core_peak_bytes(self) -> int:
        return self.in_core.peak_bytes

    @property
    def whole_bytes(self) -> int:
        """What a percentage is of: what plain Chainer needs.

        If that is not known, what it needs with functions in parts as recorded.
        """
        plain_bytes = self.in_core.plain_peak_bytes
        return self.in_core.peak_bytes if plain_bytes is None else plain_bytes

    @property
    def in_core_seconds(self) -> float:
        return self.in_core.seconds

    @property
    def still_seconds(self) -> float:
        """Time under a plan that moves nothing: none is faster."""
        return self.in_core.still_seconds

    @property
    def compute_seconds(self) -> float:
        """Seconds of all operations, if nothing moves and nothing ever waits."""
        return float(np.cumsum(self.arrays.seconds)[-1])  # adds as lanes do


def with_host_limit(problem: Problem, host_limit_bytes: int | None) -> Problem:
    """The same problem with another limit for host copies in RAM.

    Args:
        problem: Any problem.
        host_limit_bytes: Most bytes; None is without a limit.

    Raises:
        OptionError: If the number is negative.
    """
    if host_limit_bytes is not None and host_limit_bytes < 0:
        raise OptionError(
            f'host_limit_bytes is {host_limit_bytes}; it must be zero or more.'
        )
    total = sum(s.nbytes for s in problem.maps)
    limit = total if host_limit_bytes is None else host_limit_bytes
    return dataclasses.replace(
        problem,
        host_limit_bytes=host_limit_bytes,
        arrays=dataclasses.replace(
            problem.arrays, tiered=limit < total, host_limit=limit
        ),
        bounds={},
    )


def with_parts(problem: Problem, parts: tuple[Part, ...]) -> Problem:
    """The same problem with these functions in parts, besides those that are.

    Raises:
        PlanError: If its profile does not know one of the parts.
    """
    if set(parts) <= set(problem.parts):
        return problem
    places = {(part.operation, part.function) for part in parts}
    others = (p for p in problem.parts if (p.operation, p.function) not in places)
    parts = tuple(sorted((*others, *parts), key=lambda p: (p.operation, p.function)))
    return _make_again(problem, parts=parts)


def with_plain_peak(problem: Problem, plain_peak_bytes: int | None) -> Problem:
    """The same problem with another peak of plain Chainer.

    Args:
        problem: Any problem.
        plain_peak_bytes: Such as that beside older graphs; None if it is not known.
    """
    profile = dataclasses.replace(problem.profile, plain_peak_bytes=plain_peak_bytes)
    in_core = problem.in_core._replace(plain_peak_bytes=plain_peak_bytes)
    return dataclasses.replace(problem, profile=profile, in_core=in_core)


def with_profile(problem: Problem, profile: Profile) -> Problem:
    """The same problem with other times: everything else is as it was."""
    return _make_again(problem, profile=profile)


def _make_again(problem: Problem, **changed: Any) -> Problem:
    told = inspect.signature(make_problem).parameters
    return make_problem(**{name: getattr(problem, name) for name in told} | changed)


def with_rules(problem: Problem, rules: Any) -> Problem:
    """The same problem under these rules instead of its own.

    Args:
        problem: Any problem.
        rules: As in :func:`.check_rules`.

    Raises:
        OptionError: If a rule names nothing, or if the rules leave a map nothing.
    """
    rules = check_rules(rules)
    if problem.rules:
        problem = _make_again(problem, rules=())
    if not rules:
        return problem
    arrays = rule_arrays(problem.arrays, problem.profile, problem.maps, rules)
    return dataclasses.replace(problem, arrays=arrays, rules=rules, bounds={})


def with_sources(problem: Problem, sources: tuple[int, ...]) -> Problem:
    """The same problem in which these storages may stay for replays.

    Args:
        problem: Any problem.
        sources: Of :func:`find_sources`.
    """
    return _make_again(problem, sources=sources)


def find_sources(problem: Problem) -> tuple[int, ...]:
    """Storages that forward drops by itself and that may stay for replays.

    A replay must make each of them, as an output of a function that the rules let it
    run again, and some other replay must read it.
    """
    a, n_maps = problem.arrays, len(problem.maps)
    outputs = {
        storage
        for recipe in problem.profile.recipes
        for storage, slot in zip(recipe.products, recipe.sources, strict=True)
        if slot.kind is SlotKind.OUTPUT
    }
    reading = np.repeat(a.recipe_seconds >= 0, np.diff(a.input_ptr))
    asked = set(a.inputs[reading].tolist())
    return tuple(
        problem.items[item]
        for item in range(n_maps, len(a.size))
        if not a.present[item]
        and item in asked
        and item in _made_at(a, int(a.producer[item]))
        and problem.items[item] in outputs
    )


def _made_at(a: ProblemArrays, operation: int) -> np.ndarray:
    """What a replay of an operation makes; nothing if it cannot run."""
    if operation < 0 or a.recipe_seconds[operation] < 0:
        return a.products[:0]
    return a.products[a.product_ptr[operation] : a.product_ptr[operation + 1]]


def copy_seconds(
    problem: Problem, on_disk: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(M,) seconds of each map's copy out and back, if some go to the disk."""
    a = problem.arrays
    return (
        np.where(on_disk, a.disk_out_seconds, problem.swap_out_seconds),
        np.where(on_disk, a.disk_in_seconds, problem.swap_in_seconds),
    )


def make_problem(
    profile: Profile,
    cross_iteration: CrossIteration = False,
    host_limit_bytes: int | None = None,
    splitting: Splitting = EXACT,
    parts: tuple[Part, ...] = (),
    rules: Any = None,
    sources: tuple[int, ...] = (),
) -> Problem:
    """Derives the simulator's arrays from a profile.

    Args:
        profile: A recorded iteration.
        cross_iteration: What plans decide about besides feature maps; as in
            :func:`crossing_of`.
        host_limit_bytes: Most bytes of host copies in RAM; what is swapped beyond them
            goes to the disk if the profile has a disk link, else no plan may swap
            it. None is without a limit.
        splitting: Which functions plans may take in parts where an operation does not
            fit: ``'exact'``, True or False.
        parts: Functions that run in parts.
        rules: What may happen to feature maps, by name; as in :func:`.check_rules`.
        sources: Storages that may stay for replays; as in :func:`find_sources`.

    Raises:
        FormatError: If the profile contradicts itself.
        OptionError: If ``cross_iteration``, ``splitting``, the limit or a rule cannot
            be.
        PlanError: If the profile does not know one of the parts.
    """
    crossing = crossing_of(cross_iteration)
    check_splitting(splitting)
    check_profile(profile)
    recorded, profile = profile, in_parts(profile, parts)
    items = _choose_items(profile, crossing, sources)
    arrays = with_free_choice(_make_arrays(profile, items))
    link, maps = profile.link, items.maps
    in_core = _find_in_core(recorded, profile, arrays)
    if profile is not recorded:  # what is made of it cannot tell it any more
        plain_bytes = in_core.plain_peak_bytes
        profile = dataclasses.replace(profile, plain_peak_bytes=plain_bytes)
    problem = Problem(
        profile=profile,
        maps=maps,
        cross_iteration=cross_iteration,
        items=items.ids,
        arrays=arrays,
        swap_out_seconds=np.array([link.d2h_seconds(s.nbytes) for s in maps]),
        swap_in_seconds=np.array([link.h2d_seconds(s.nbytes) for s in maps]),
        in_core=in_core,
        splitting=splitting,
        parts=parts,
        sources=sources,
    )
    return with_rules(with_host_limit(problem, host_limit_bytes), rules)


def _find_in_core(recorded: Profile, profile: Profile, arrays: ProblemArrays) -> InCore:
    """The iteration in which every map stays; the profile may have more parts."""
    peaks = in_core_peaks(recorded)
    peak = recorded_peak = max(peaks)
    if profile is not recorded:
        peak = in_core_peak_bytes(profile)
    plain = recorded.plain_peak_bytes
    if plain is None and not recorded.functions_in_parts:
        plain = recorded_peak
    still = still_seconds(arrays.seconds.tolist(), arrays.host_seconds.tolist())
    return InCore(peak, plain, in_core_seconds(profile), still, peaks[0])


class _Items(NamedTuple):
    """Storages that plans and replays are about.

    Attributes:
        maps (tuple of Storage): What a plan decides about.
        transients (list of int): Ids of what a recompute passes through.
        others (list of int): Ids of what is always there, but is made twice.
    """

    maps: tuple[Storage, ...]
    transients: list[int]
    others: list[int]

    @property
    def ids(self) -> tuple[int, ...]:
        """Storage ids of all items."""
        return (*(s.id for s in self.maps), *self.transients, *self.others)


def _choose_items(
    profile: Profile, crossing: frozenset[Category], sources: tuple[int, ...]
) -> _Items:
    b0 = profile.first_backward
    maps = tuple(
        s
        for s in profile.storages
        if (s.plannable or (s.persistent and s.category in crossing))
        and between_phases(s, b0)
        and (s.releasable_from <= b0 or s.releasable_from == max(s.backward_uses) + 1)
    )
    maps += tuple(profile.storages[i] for i in sources)
    planned = {s.id for s in maps}
    transients = _transients(profile, planned)
    return _Items(maps, transients, _made_twice(profile, planned.union(transients)))


def _make_arrays(profile: Profile, items: _Items) -> ProblemArrays:
    maps = items.maps
    planned = {s.id for s in maps}
    fixed_start, fixed_peak, _ = fixed_load(profile, planned)
    numbers = {storage: item for item, storage in enumerate(items.ids)}
    returning = planned.union(items.transients)
    storages = [profile.storages[i] for i in items.ids]
    producer = np.array([s.producer for s in storages], np.int64)
    read_until = np.array([last_forward(s) + 1 for s in maps], np.int64)
    releasable = np.array([s.releasable_from for s in maps], np.int64)
    read = np.array([bool(s.backward_uses) for s in maps], bool)
    b0 = profile.first_backward
    for m in np.flatnonzero(~read).tolist():
        releasable[m] = _operation_of(profile, maps[m].freed_at) + 1
    release_from = np.maximum(releasable, read_until)
    # A copy starts when the graph alone has the map: taking away what others hold would
    # free nothing. What is never released may not be swapped.
    copy_from = np.where(release_from > b0, read_until, release_from)
    first_use = np.array([min(s.backward_uses, default=b0) for s in maps], np.int64)
    last_use = [max(s.backward_uses, default=b0 - 1) for s in maps]
    link, disk = profile.link, profile.disk_link or profile.link
    seconds, host_seconds, move_seconds, issue_seconds = _find_times(profile, maps)
    return ProblemArrays(
        first_backward=profile.first_backward,
        backward_seconds=float(seconds[b0:].sum()),
        seconds=seconds,
        host_seconds=host_seconds,
        move_seconds=move_seconds,
        issue_seconds=issue_seconds,
        duplex_share=link.duplex_share,
        out_compute_share=link.d2h_compute_share,
        in_compute_share=link.h2d_compute_share,
        fixed_start=fixed_start,
        fixed_peak=fixed_peak,
        size=np.array([s.nbytes for s in storages], np.int64),
        producer=producer,
        present=np.arange(len(storages)) >= len(maps) + len(items.transients),
        copy_from=copy_from,
        release_from=release_from,
        first_use=first_use,
        last_use=np.array(last_use, np.int64),
        by_producer=np.argsort(producer[: len(maps)], kind='stable'),
        by_copy=np.argsort(copy_from, kind='stable'),
        by_release=np.argsort(release_from, kind='stable'),
        by_use=np.argsort(first_use, kind='stable'),
        read=read,
        tiered=False,
        host_limit=0,
        by_host=np.argsort(first_use, kind='stable'),
        disk_out_seconds=np.array([disk.d2h_seconds(s.nbytes) for s in maps]),
        disk_in_seconds=np.array([disk.h2d_seconds(s.nbytes) for s in maps]),
        beyond_seconds=_beyond_seconds(profile, maps),
        ruled=False,
        allowed=np.ones((len(maps), 3), bool),
        kept_pointers=np.zeros(1, np.int64),
        kept_members=np.zeros(0, np.int64),
        kept_most=np.zeros(0, np.int64),
        **list_recipes(profile, numbers, returning),
    )


def _operation_of(profile: Profile, event: int) -> int:
    """The operation that an event belongs to."""
    firsts = [op.first_event for op in profile.operations]
    return bisect.bisect_right(firsts, event) - 1


def _find_times(
    profile: Profile, maps: tuple[Storage, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(n,) compute and host seconds, (M,) both for each copy of a map.

    The session's own work is the program's thread's: that computes, or issues.
    """
    seconds = np.array([op.device_seconds for op in profile.operations])
    host = np.array([op.host_seconds for op in profile.operations])
    session = np.array([op.session_seconds for op in profile.operations])
    each = np.array([profile.move_cost.of_copied(s.nbytes) / 2 for s in maps])
    issue = np.full(len(maps), profile.link.issue_seconds)
    if profile.issues:
        return seconds, host + session, np.zeros(len(maps)), issue + each
    return seconds + session, host, each, issue


def _beyond_seconds(profile: Profile, maps: tuple[Storage, ...]) -> float:
    """What host copies without a place cost, where no disk takes them."""
    if profile.disk_link is not None:
        return 0.0
    out_seconds = np.array([profile.link.d2h_seconds(s.nbytes) for s in maps])
    in_seconds = np.array([profile.link.h2d_seconds(s.nbytes) for s in maps])
    seconds = in_core_seconds(profile) + out_seconds.sum() + in_seconds.sum()
    return BEYOND * float(seconds)


def _transients(profile: Profile, planned: set[int]) -> list[int]:
    """Storages that forward drops by itself; a recompute passes through them."""
    b0, end = profile.first_backward, len(profile.events)
    if b0 < len(profile.operations):
        end = profile.operations[b0].first_event
    held = held_by_graph(profile)
    return [
        s.id
        for s in profile.storages
        if s.id not in planned
        and s.id not in held
        and s.producer >= 0
        and 0 <= s.freed_at < end
    ]


def _made_twice(profile: Profile, items: set[int]) -> list[int]:
    """Storages that no plan decides about, but that a replay makes."""
    made = {s for recipe in profile.recipes for s in recipe.products}
    return sorted(made - items)
