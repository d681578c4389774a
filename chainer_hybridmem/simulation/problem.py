"""A profile as flat arrays: what the compiled simulator reads.

Notation used by this package:

=========  ==========================================================
symbol     meaning
=========  ==========================================================
n          number of operations; b0 the first backward one
M          number of maps a plan decides about: feature maps, and
           what crosses iterations if that is asked for
item       a feature map (0 .. M-1) or another storage a recompute
           passes through (M .. M+T-1): a transient, which forward
           drops, or one that is always there and only made twice
fixed      load of everything a plan does not decide about
=========  ==========================================================

What crosses iterations is a map whose producer is -1: there before operation 0, its
first use the first backward operation that reads it, its last use the update. Nobody
can make it again, and it is never dropped.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.records.plan import Part, Plan
from chainer_hybridmem.records.profile import (
    PERSISTENT,
    Category,
    Profile,
    Recipe,
    Storage,
)
from chainer_hybridmem.records.profile_checks import check_profile
from chainer_hybridmem.records.splits import EXACT, Splitting, check_splitting, in_parts

BEYOND = 10.0  # what host copies without a place cost, of all else there is to do
CrossIteration = bool | str
STATES, ALL = 'states', 'all'
CROSSINGS: dict[CrossIteration, frozenset[Category]] = {
    False: frozenset(),
    STATES: frozenset({Category.OPTIMIZER_STATE}),
    ALL: PERSISTENT,
    True: PERSISTENT,
}


class Arrays(NamedTuple):
    """Shapes: n operations, M maps, T other items; CSR pairs end in _ptr."""

    first_backward: int
    backward_seconds: float  # of the operations from there on
    seconds: np.ndarray  # (n,) float64
    host_seconds: np.ndarray  # (n,) float64, to issue the operation
    issue_seconds: float  # to issue one copy
    duplex_share: float  # of its speed a direction keeps beside the other
    out_compute_share: float  # of its speed compute keeps beside swap-outs
    in_compute_share: float  # beside swap-ins
    fixed_start: np.ndarray  # (n,) int64, load before the operation
    fixed_peak: np.ndarray  # (n,) int64, highest load while it runs
    size: np.ndarray  # (M+T,) int64
    producer: np.ndarray  # (M+T,) int64
    present: np.ndarray  # (M+T,) bool, there all the time by itself
    copy_from: np.ndarray  # (M,) int64, first position a swap-out may start
    release_from: np.ndarray  # (M,) int64, first position it may be free
    first_use: np.ndarray  # (M,) int64, backward
    last_use: np.ndarray  # (M,) int64, backward
    by_producer: np.ndarray  # (M,) int64, maps by producer
    by_copy: np.ndarray  # (M,) int64, maps by copy_from
    by_release: np.ndarray  # (M,) int64, maps by release_from
    by_use: np.ndarray  # (M,) int64, maps by first_use
    recipe_seconds: np.ndarray  # (n,) float64; -1 where there is none
    recipe_peak: np.ndarray  # (n,) int64
    input_ptr: np.ndarray  # (n+1,) int64
    inputs: np.ndarray  # items
    product_ptr: np.ndarray  # (n+1,) int64
    products: np.ndarray  # items
    tiered: bool  # whether host copies in RAM are limited
    host_limit: int  # bytes
    by_host: np.ndarray  # (M,) int64, maps by their right to RAM
    disk_out_seconds: np.ndarray  # (M,) float64, copies to the disk
    disk_in_seconds: np.ndarray  # (M,) float64, copies from there
    beyond_seconds: float  # for the byte too much, if there is no disk; see kernel


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
        arrays (Arrays): For the compiled kernels.
        recomputable (ndarray): Whether each map can be made again exactly.
        swap_out_seconds (ndarray): Seconds of each map's copy to the host.
        swap_in_seconds (ndarray): Seconds of each map's copy back.
        in_core_peak_bytes (int): Highest load of plain Chainer.
        in_core_seconds (float): Time of one iteration without any swap or recompute.
        host_limit_bytes (int or None): Most bytes of host copies in RAM; None is
            without a limit.
        splitting (bool or str): Which functions plans may take in parts; as in
            :func:`.check_splitting`.
        parts (tuple of Part): Those that run in parts already.
        bounds (dict): Proven bounds found so far, by limit.
    """

    profile: Profile
    maps: tuple[Storage, ...]
    cross_iteration: CrossIteration
    items: tuple[int, ...]
    arrays: Arrays
    recomputable: np.ndarray
    swap_out_seconds: np.ndarray
    swap_in_seconds: np.ndarray
    in_core_peak_bytes: int
    in_core_seconds: float
    host_limit_bytes: int | None = None
    splitting: Splitting = EXACT
    parts: tuple[Part, ...] = ()
    bounds: dict[int, Any] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def compute_seconds(self) -> float:
        """Seconds of all operations, if nothing ever waits."""
        return self.profile.compute_seconds


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
    """What crosses iterations under a plan, as :func:`make_problem` wants it."""
    kinds = {
        profile.storages[entry.storage].category
        for entry in plan.maps
        if 0 <= entry.storage < len(profile.storages)
    }
    if Category.PARAMETER in kinds:
        return ALL
    return STATES if Category.OPTIMIZER_STATE in kinds else False


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
        arrays=problem.arrays._replace(tiered=limit < total, host_limit=limit),
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
    return make_problem(
        problem.profile,
        problem.cross_iteration,
        problem.host_limit_bytes,
        problem.splitting,
        tuple(sorted((*others, *parts), key=lambda p: (p.operation, p.function))),
    )


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

    Raises:
        FormatError: If the profile contradicts itself.
        OptionError: If ``cross_iteration``, ``splitting`` or the limit cannot be.
        PlanError: If the profile does not know one of the parts.
    """
    crossing = crossing_of(cross_iteration)
    check_splitting(splitting)
    check_profile(profile)
    profile = in_parts(profile, parts)
    b0 = profile.first_backward
    maps = tuple(
        s
        for s in profile.storages
        if (s.plannable or (s.persistent and s.category in crossing))
        and _between_phases(s, b0)
        and s.releasable_from <= b0
    )
    planned = {s.id for s in maps}
    transients = _transients(profile, planned)
    others = _made_twice(profile, planned.union(transients))
    items = (*(s.id for s in maps), *transients, *others)
    item_of = {storage: item for item, storage in enumerate(items)}
    fixed_start, fixed_peak, _ = fixed_load(profile, planned)
    recipes = _recipe_arrays(profile, item_of, planned.union(transients))
    storages = profile.storages
    producer = np.array([storages[i].producer for i in items], np.int64)
    copy_from = np.array([_last_forward(s) + 1 for s in maps], np.int64)
    releasable = np.array([s.releasable_from for s in maps], np.int64)
    release_from = np.maximum(releasable, copy_from)
    first_use = np.array([min(s.backward_uses) for s in maps], np.int64)
    link = profile.link
    disk = profile.disk_link or link
    in_core_seconds = _in_core_seconds(profile)
    out_seconds = np.array([link.d2h_seconds(s.nbytes) for s in maps])
    in_seconds = np.array([link.h2d_seconds(s.nbytes) for s in maps])
    arrays = Arrays(
        first_backward=b0,
        backward_seconds=sum((o.device_seconds for o in profile.operations[b0:]), 0.0),
        seconds=np.array([op.device_seconds for op in profile.operations]),
        host_seconds=np.array([op.host_seconds for op in profile.operations]),
        issue_seconds=link.issue_seconds,
        duplex_share=link.duplex_share,
        out_compute_share=link.d2h_compute_share,
        in_compute_share=link.h2d_compute_share,
        fixed_start=fixed_start,
        fixed_peak=fixed_peak,
        size=np.array([storages[i].nbytes for i in items], np.int64),
        producer=producer,
        present=np.arange(len(items)) >= len(maps) + len(transients),
        copy_from=copy_from,
        release_from=release_from,
        first_use=first_use,
        last_use=np.array([max(s.backward_uses) for s in maps], np.int64),
        by_producer=np.argsort(producer[: len(maps)], kind='stable'),
        by_copy=np.argsort(copy_from, kind='stable'),
        by_release=np.argsort(release_from, kind='stable'),
        by_use=np.argsort(first_use, kind='stable'),
        tiered=False,
        host_limit=0,
        by_host=np.argsort(first_use, kind='stable'),
        disk_out_seconds=np.array([disk.d2h_seconds(s.nbytes) for s in maps]),
        disk_in_seconds=np.array([disk.h2d_seconds(s.nbytes) for s in maps]),
        beyond_seconds=(
            0.0
            if profile.disk_link is not None
            else BEYOND * float(in_core_seconds + out_seconds.sum() + in_seconds.sum())
        ),
        **recipes,
    )
    problem = Problem(
        profile=profile,
        maps=maps,
        cross_iteration=cross_iteration,
        items=items,
        arrays=arrays,
        recomputable=_recomputable(arrays, len(maps)),
        swap_out_seconds=out_seconds,
        swap_in_seconds=in_seconds,
        in_core_peak_bytes=in_core_peak_bytes(profile),
        in_core_seconds=in_core_seconds,
        splitting=splitting,
        parts=parts,
    )
    return with_host_limit(problem, host_limit_bytes)


def _in_core_seconds(profile: Profile) -> float:
    """Compute, where the host issues fast enough; see :func:`.kernel.lanes`."""
    now = issued = 0.0
    for op in profile.operations:
        now = max(now, issued) + op.device_seconds
        issued += op.host_seconds
    return max(now, issued)


def _last_forward(storage: Storage) -> int:
    return max((storage.producer, *storage.forward_uses))


def _between_phases(storage: Storage, b0: int) -> bool:
    """Whether forward has finished with a map before backward begins."""
    return _last_forward(storage) < b0 <= min(storage.backward_uses)


def _transients(profile: Profile, planned: set[int]) -> list[int]:
    """Storages that forward drops by itself; a recompute passes through them."""
    b0, end = profile.first_backward, len(profile.events)
    if b0 < len(profile.operations):
        end = profile.operations[b0].first_event
    held = _held_by_graph(profile)
    return [
        s.id
        for s in profile.storages
        if s.id not in planned
        and s.id not in held
        and s.producer >= 0
        and 0 <= s.freed_at < end
    ]


def _made_twice(profile: Profile, items: set[int]) -> list[int]:
    """Storages nobody plans about that a replay makes all the same."""
    made = {s for recipe in profile.recipes for s in recipe.products}
    return sorted(made - items)


def fixed_load(
    profile: Profile, planned: set[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Load of what a plan does not decide about, per operation.

    A planned map counts as fixed from its malloc to the end of the operation
    that produces it; from then on the plan decides. What the recording has
    swapped but the plan may not stays until the graph dies. What crosses
    iterations is never part of it.

    Returns:
        tuple of ndarray: Before each operation, highest while it runs, and the event
        that makes it so high; -1 if none does.
    """
    operations, events = profile.operations, profile.events
    held = _held_by_graph(profile) - planned
    waiting = 0
    starts = np.zeros(len(operations), np.int64)
    peaks = np.zeros(len(operations), np.int64)
    highest = np.full(len(operations), -1, np.int64)
    storages = profile.storages
    load = profile.initial_bytes - sum(
        storages[s].nbytes for s in planned if storages[s].persistent
    )
    for op in operations:
        last = op.index + 1 == len(operations)
        end = len(events) if last else operations[op.index + 1].first_event
        starts[op.index] = peak = load
        born = 0
        for position in range(op.first_event, end):
            if position == profile.graph_end_event:
                load -= waiting
                waiting = 0
            event = events[position]
            storage = storages[abs(event) - 1]
            if storage.id in planned:
                born += storage.nbytes if event > 0 else 0
                load += storage.nbytes if event > 0 else 0
            elif (
                event < 0 and storage.id in held and position < profile.graph_end_event
            ):
                waiting += storage.nbytes
            else:
                load += storage.nbytes if event > 0 else -storage.nbytes
            if load > peak:
                peak, highest[op.index] = load, position
        peaks[op.index] = peak
        load -= born
    return starts, peaks, highest


def in_core_peak_bytes(profile: Profile) -> int:
    """Highest load of plain Chainer: feature maps stay until the graph dies."""
    held = _held_by_graph(profile)
    load = peak = profile.initial_bytes
    waiting = 0
    for position, event in enumerate(profile.events):
        if position == profile.graph_end_event:
            load -= waiting
            waiting = 0
        storage = profile.storages[abs(event) - 1]
        if event > 0:
            load += storage.nbytes
        elif storage.id in held and position < profile.graph_end_event:
            waiting += storage.nbytes
        else:
            load -= storage.nbytes
        peak = max(peak, load)
    return peak


def _held_by_graph(profile: Profile) -> set[int]:
    """Maps that the recording has swapped: else the graph holds them to its end."""
    b0 = profile.first_backward
    return {
        s.id
        for s in profile.storages
        if s.category is Category.FEATURE_MAP
        and s.producer >= 0
        and s.backward_uses
        and _between_phases(s, b0)
    }


def _recipe_arrays(
    profile: Profile, item_of: dict[int, int], returning: set[int]
) -> dict[str, np.ndarray]:
    n = len(profile.operations)
    seconds = np.full(n, -1.0)
    peak = np.zeros(n, np.int64)
    inputs: list[list[int]] = [[] for _ in range(n)]
    products: list[list[int]] = [[] for _ in range(n)]
    for recipe in profile.recipes:
        if not recipe.exact or not _promised(profile, recipe, returning):
            continue
        op = recipe.operation
        seconds[op], peak[op] = recipe.seconds, recipe.peak_bytes
        inputs[op] = [item_of[s] for s in recipe.inputs if s in item_of]
        # What a replay starts with, such as a dropout mask, it does not make.
        products[op] = [item_of[s] for s in recipe.products if s not in recipe.inputs]
    return {
        'recipe_seconds': seconds,
        'recipe_peak': peak,
        'input_ptr': _pointers(inputs),
        'inputs': np.array([i for row in inputs for i in row], np.int64),
        'product_ptr': _pointers(products),
        'products': np.array([i for row in products for i in row], np.int64),
    }


def _promised(profile: Profile, recipe: Recipe, returning: set[int]) -> bool:
    """Whether a replay in backward finds what it needs and makes what it says.

    ``returning`` are the storages that a plan or a replay can bring back.
    """
    if recipe.operation >= profile.first_backward:
        return False
    end = profile.operations[-1].first_event
    for source in recipe.inputs:
        dies = 0 <= profile.storages[source].freed_at < end
        if dies and source not in returning:
            return False  # perhaps in the middle of backward
    return all(
        profile.storages[s].producer == recipe.operation for s in recipe.products
    )


def _pointers(rows: list[list[int]]) -> np.ndarray:
    return np.cumsum([0] + [len(row) for row in rows]).astype(np.int64)


def _recomputable(arrays: Arrays, n_maps: int) -> np.ndarray:
    """A map is recomputable if its recipe is, and every transient on the way.

    Maps among the inputs are always at hand: kept, swapped in, or
    recomputable themselves; so is what nobody plans about and nothing frees. A
    map whose producer needs one of its own products (a dropout mask) is not
    recomputable from itself.
    """
    n_items = len(arrays.size)
    result = np.zeros(n_items, bool)
    order = np.argsort(arrays.producer, kind='stable')
    for item in order:
        op = arrays.producer[item]
        if op < 0:
            continue
        needs = arrays.inputs[arrays.input_ptr[op] : arrays.input_ptr[op + 1]]
        made = arrays.products[arrays.product_ptr[op] : arrays.product_ptr[op + 1]]
        result[item] = (
            arrays.recipe_seconds[op] >= 0
            and item in made
            and item not in needs
            and all(
                need < n_maps or arrays.present[need] or result[need] for need in needs
            )
        )
    return result[:n_maps]
