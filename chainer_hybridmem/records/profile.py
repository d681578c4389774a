"""Types only: one recorded training iteration, and its JSON form.

=============  =====================================================
word           meaning
=============  =====================================================
operation      one forward function, one backward function, or the
               update (everything after the last backward function
               until the next iteration's first forward function)
storage        one allocation, however many arrays view it
feature map    a storage that forward leaves behind for backward
persistent     a parameter or optimizer state: there before and after the
               iteration, whatever happens to it in between
event          one malloc or free, in host issue order
recipe         how to run a forward operation again
=============  =====================================================

Bytes are int, seconds are float, operations are numbered in host issue order.
A position "before operation k" is the moment after everything of operation
``k - 1`` and before anything of operation ``k``. Lifetimes are half-open.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import json
import math
from typing import Any, NamedTuple

from chainer_hybridmem import files

FORMAT = 'chainer_hybridmem/profile'
VERSION = 5
VERSION_WITHOUT_SPLITS = 4  # still written where no function can run in parts
VERSION_WITHOUT_DISK = 3  # likewise, where there is no disk link either


class Phase(enum.Enum):
    """Part of the iteration an operation belongs to."""

    FORWARD = 'forward'
    BACKWARD = 'backward'
    UPDATE = 'update'


class Category(enum.Enum):
    """What a storage holds."""

    PARAMETER = 'parameter'
    GRADIENT = 'gradient'
    OPTIMIZER_STATE = 'optimizer state'
    FEATURE_MAP = 'feature map'
    WORKSPACE = 'workspace'
    INPUT = 'input'


PERSISTENT = frozenset({Category.PARAMETER, Category.OPTIMIZER_STATE})


class SlotKind(enum.Enum):
    """Where the graph holds an array."""

    INPUT = 'input'  # VariableNode of the operation's i-th input
    OUTPUT = 'output'  # VariableNode of the operation's i-th output
    RETAINED = 'retained'  # FunctionNode._retained_output_data[i]
    ATTRIBUTE = 'attribute'  # attribute of the function

    __hash__ = object.__hash__  # Enum's own is slow, and hooks look slots up


class Slot(NamedTuple):
    """One reference of the graph to an array of a storage.

    Attributes:
        operation (int): Forward operation whose function has the slot.
        kind (SlotKind): Which kind of reference.
        key (int or str): Index of the input or output, name of the attribute.
    """

    operation: int
    kind: SlotKind
    key: int | str


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One step of the iteration.

    Attributes:
        index (int): Position in host issue order.
        label (str): Link path and function name.
        phase (Phase): Forward, backward or update.
        device_seconds (float): Time on the compute device, copies excluded.
        host_seconds (float): Time the host needs to issue it; zero where issuing
            is computing.
        reads (tuple of int): Storages read.
        writes (tuple of int): Storages produced that outlive the operation.
        workspace_bytes (int): Bytes needed only while it runs: the peak above
            its first moment, less what it leaves behind.
        specs (tuple of str): ``'float32[2,3,224,224]'`` for each input.
        forward (int): For backward, the forward operation it differentiates;
            else -1.
        first_event (int): Index of the first event that belongs to it.
    """

    index: int
    label: str
    phase: Phase
    device_seconds: float
    host_seconds: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    workspace_bytes: int
    specs: tuple[str, ...]
    forward: int
    first_event: int

    @property
    def function(self) -> str:
        """Name of the function without the link path."""
        return self.label.rsplit('/', 1)[-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """One allocation.

    Attributes:
        id (int): Position in :attr:`Profile.storages`.
        nbytes (int): Size.
        category (Category): What it holds.
        label (str): Name of what produced it; of a persistent storage its own.
        producer (int): Operation that allocated it; -1 if it was there before
            the iteration.
        allocated_at (int): Index of its malloc event; -1 if it was there
            before the iteration.
        freed_at (int): Index of its free event in the recorded (all-swap)
            iteration; -1 if it outlives the iteration.
        forward_uses (tuple of int): Forward operations that read it.
        backward_uses (tuple of int): Backward operations that read it,
            ascending; of a persistent storage also the update, which writes it.
        releasable_from (int): Before this operation the graph's references
            are the only ones, so that dropping them frees the memory. -1 if
            the user holds it: such a storage is never planned for.
        slots (tuple of Slot): The graph's references.
    """

    id: int
    nbytes: int
    category: Category
    label: str
    producer: int
    allocated_at: int
    freed_at: int
    forward_uses: tuple[int, ...] = ()
    backward_uses: tuple[int, ...] = ()
    releasable_from: int = -1
    slots: tuple[Slot, ...] = ()

    @property
    def plannable(self) -> bool:
        """Whether a plan may swap or recompute it."""
        return (
            self.category is Category.FEATURE_MAP
            and self.releasable_from >= 0
            and self.producer >= 0
            and bool(self.backward_uses)
        )

    @property
    def persistent(self) -> bool:
        """Whether a plan may move it out after forward and back for the update."""
        return (
            self.category in PERSISTENT
            and self.releasable_from >= 0
            and self.producer < 0
            and self.freed_at < 0
            and bool(self.backward_uses)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How to make the products of a forward operation again.

    Attributes:
        operation (int): The forward operation.
        inputs (tuple of int): Storages that must be present, those that never
            leave excluded.
        products (tuple of int): Storages it allocates and leaves behind.
        sources (tuple of Slot): Where each product comes out: an output or an
            attribute of the function.
        attributes (tuple of str): Attributes of the live function that a
            replay must start with, such as a dropout mask.
        seconds (float): Time of one replay.
        peak_bytes (int): Highest load above the replay's first moment,
            products included.
        exact (bool): The profile has proven that a replay gives the same
            bits, moves no statistics and draws no random numbers.
        covers (tuple of int): Forward operations that one cheap pass takes
            the place of, ascending, ``operation`` the last; empty if the
            whole forward runs again.
    """

    operation: int
    inputs: tuple[int, ...]
    products: tuple[int, ...]
    sources: tuple[Slot, ...]
    attributes: tuple[str, ...]
    seconds: float
    peak_bytes: int
    exact: bool
    covers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """One way to run a function of an operation in parts, as tried when recording.

    Attributes:
        operation (int): The operation.
        function (int): Which of its functions that have a rule.
        name (str): The function's class.
        cut (str): What is cut, such as ``'batch'``.
        parts (int): Into how many.
        exact (bool): Whether every bit is as if it were not cut.
        first (int): The first storage that the function allocates.
        temporaries (tuple of int): Storages that live only while it runs as a whole.
        peak_bytes (int): Highest load in parts above the function's first moment,
            what it leaves behind included.
    """

    operation: int
    function: int
    name: str
    cut: str
    parts: int
    exact: bool
    first: int
    temporaries: tuple[int, ...]
    peak_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """The path between device and host memory, measured while computing.

    Attributes:
        latency_seconds (float): Time of an empty copy.
        d2h_bytes_per_second (float): Device to host (swap-out).
        h2d_bytes_per_second (float): Host to device (swap-in).
        duplex_share (float): Of its speed that each direction keeps while both
            copy; in (0, 1].
        d2h_compute_share (float): Of its speed that compute keeps while a
            swap-out is under way; in (0, 1].
        h2d_compute_share (float): Likewise beside a swap-in.
        issue_seconds (float): Time the host needs to issue one copy; zero where
            issuing is computing.
    """

    latency_seconds: float
    d2h_bytes_per_second: float
    h2d_bytes_per_second: float
    duplex_share: float = 1.0
    d2h_compute_share: float = 1.0
    h2d_compute_share: float = 1.0
    issue_seconds: float = 0.0

    def d2h_seconds(self, nbytes: int) -> float:
        """Seconds one swap-out of ``nbytes`` takes on a free link."""
        return self.latency_seconds + nbytes / self.d2h_bytes_per_second

    def h2d_seconds(self, nbytes: int) -> float:
        """Seconds one swap-in of ``nbytes`` takes on a free link."""
        return self.latency_seconds + nbytes / self.h2d_bytes_per_second


@dataclasses.dataclass(frozen=True)
class Profile:
    """One iteration as recorded, with every feature map swapped.

    Attributes:
        operations (tuple of Operation): In host issue order; the last one is
            the update.
        storages (tuple of Storage): Indexed by their id.
        events (tuple of int): ``+(id + 1)`` for a malloc, ``-(id + 1)`` for a
            free. Copies of feature maps made and dropped by swapping are not
            events.
        recipes (tuple of Recipe): At most one per forward operation.
        initial_bytes (int): Load before the first operation: parameters,
            gradients, optimizer state, inputs.
        graph_end_event (int): Event index at which the graph itself dies, so
            that in-core training frees its feature maps.
        link (Link): The path to host memory.
        device (dict): Name, kind and versions of where it was recorded.
        disk_link (Link or None): The path to the files of ``swap_dir``, where there
            is one.
        splits (tuple of Split): Functions that could run in parts; those of one
            function in the order in which they are tried.
    """

    operations: tuple[Operation, ...]
    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    recipes: tuple[Recipe, ...]
    initial_bytes: int
    graph_end_event: int
    link: Link
    device: dict[str, Any] = dataclasses.field(default_factory=dict)
    disk_link: Link | None = None
    splits: tuple[Split, ...] = ()

    @property
    def first_backward(self) -> int:
        """Index of the first operation that is not forward."""
        for op in self.operations:
            if op.phase is not Phase.FORWARD:
                return op.index
        return len(self.operations)

    @property
    def compute_seconds(self) -> float:
        """Seconds of all operations without any stall: the in-core time."""
        return sum(op.device_seconds for op in self.operations)

    def feature_maps(self) -> list[Storage]:
        """Storages a plan decides about, in order of their production."""
        return [s for s in self.storages if s.plannable]

    def persistent_storages(self) -> list[Storage]:
        """Parameters and optimizer states that a plan may decide about as well."""
        return [s for s in self.storages if s.persistent]

    def fingerprint(self) -> str:
        """Identifies operations, sizes and dependencies, not times."""
        parts: list[Any] = [
            (op.label, op.phase.value, op.specs, op.forward) for op in self.operations
        ]
        parts.extend((s.id, s.nbytes, s.backward_uses) for s in self.feature_maps())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Serialises to versioned JSON."""
        body = {
            'initial_bytes': self.initial_bytes,
            'graph_end_event': self.graph_end_event,
            'link': dataclasses.asdict(self.link),
            'device': self.device,
            'operations': [files.row(op) for op in self.operations],
            'storages': [files.row(s) for s in self.storages],
            'recipes': [files.row(r) for r in self.recipes],
            'events': list(self.events),
        }
        version = VERSION_WITHOUT_DISK
        if self.disk_link is not None:
            version = VERSION_WITHOUT_SPLITS
            body['disk_link'] = dataclasses.asdict(self.disk_link)
        if self.splits:
            version = VERSION
            body['splits'] = [files.row(split) for split in self.splits]
        return json.dumps({'format': FORMAT, 'version': version, **body})

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads what :meth:`to_json` wrote.

        Raises:
            FormatError: If the text is not such a file.
        """
        body = files.parse(text, FORMAT, VERSION, VERSION_WITHOUT_DISK)
        with files.reading('profile'):
            with_splits = body['version'] == VERSION
            with_disk = body['version'] == VERSION_WITHOUT_SPLITS
            if with_splits:
                with_disk = 'disk_link' in body
            disk = body['disk_link'] if with_disk else None
            profile = cls(
                operations=tuple(
                    files.unrow(Operation, row) for row in body['operations']
                ),
                storages=tuple(files.unrow(Storage, row) for row in body['storages']),
                events=tuple(int(event) for event in body['events']),
                recipes=tuple(files.unrow(Recipe, row) for row in body['recipes']),
                initial_bytes=int(body['initial_bytes']),
                graph_end_event=int(body['graph_end_event']),
                link=_read_link(body['link']),
                device=dict(body['device']),
                disk_link=None if disk is None else _read_link(disk),
                splits=tuple(
                    files.unrow(Split, row)
                    for row in (body['splits'] if with_splits else ())
                ),
            )
        check_profile(profile)
        return profile


def _read_link(body: Any) -> Link:
    names = [field.name for field in dataclasses.fields(Link)]
    for name in names:
        if not isinstance(body, dict) or name not in body:
            raise files.broken('profile', f'its link lacks {name}')
    for name in body:
        if name not in names:
            raise files.broken('profile', f'its link has an unknown figure {name!r}')
    return Link(**{name: float(body[name]) for name in names})


def check_profile(profile: Profile) -> None:
    """Refuses a profile whose parts contradict each other.

    Raises:
        FormatError: Naming the first contradiction found.
    """
    if not profile.operations:
        raise files.broken('profile', 'it has no operation')
    if not isinstance(profile.device, dict):
        raise files.broken('profile', f'its device is {profile.device!r}')
    total = profile.initial_bytes + sum(s.nbytes for s in profile.storages)
    if not 0 <= profile.initial_bytes <= total < 2**62:
        raise files.broken('profile', f'its storages have {total} bytes in all')
    _check_operations(profile)
    _check_storages(profile)
    _check_events(profile)
    _check_recipes(profile)
    _check_splits(profile)
    _check_link(profile.link)
    if profile.disk_link is not None:
        _check_link(profile.disk_link)


def _check_operations(profile: Profile) -> None:
    n_storages = len(profile.storages)
    previous = 0
    for index, op in enumerate(profile.operations):
        if not previous <= op.first_event <= len(profile.events):
            raise files.broken(
                'profile',
                f'operation {index} starts at event {op.first_event} of '
                f'{len(profile.events)}',
            )
        previous = op.first_event
        if op.index != index:
            raise files.broken('profile', f'operation {index} says it is {op.index}')
        if not (0 <= op.device_seconds < 1e9):
            raise files.broken(
                'profile', f'operation {index} takes {op.device_seconds} seconds'
            )
        if not (0 <= op.host_seconds < 1e9):
            raise files.broken(
                'profile', f'operation {index} is issued in {op.host_seconds} seconds'
            )
        if not 0 <= op.workspace_bytes < files.LARGEST_SIZE:
            raise files.broken(
                'profile', f'operation {index} has {op.workspace_bytes} bytes workspace'
            )
        if not -1 <= op.forward < index:
            raise files.broken(
                'profile', f'operation {index} differentiates operation {op.forward}'
            )
        if not all(0 <= s < n_storages for s in (*op.reads, *op.writes)):
            raise files.broken(
                'profile',
                f'operation {index} touches storages {op.reads} and {op.writes} of '
                f'{n_storages}',
            )


def _check_storages(profile: Profile) -> None:
    n_ops = len(profile.operations)
    for index, storage in enumerate(profile.storages):
        if storage.id != index or not 0 <= storage.nbytes < files.LARGEST_SIZE:
            raise files.broken('profile', f'storage {index} is {storage}')
        if list(storage.backward_uses) != sorted(set(storage.backward_uses)):
            raise files.broken(
                'profile', f'storage {index} is used at {storage.backward_uses}'
            )
        uses = (storage.producer, *storage.forward_uses, *storage.backward_uses)
        if not all(-1 <= use < n_ops for use in uses):
            raise files.broken('profile', f'storage {index} is used by {uses}')
        if not -1 <= storage.releasable_from <= n_ops:
            raise files.broken('profile', f'storage {index} is {storage}')
        if not all(0 <= slot.operation < n_ops for slot in storage.slots):
            raise files.broken('profile', f'storage {index} has slots {storage.slots}')
        if storage.persistent and storage.backward_uses[-1] != n_ops - 1:
            raise files.broken(
                'profile',
                f'storage {index} ({storage.category.value}) is used last by operation '
                f'{storage.backward_uses[-1]}, the update is operation {n_ops - 1}',
            )
    persistent_bytes = sum(s.nbytes for s in profile.persistent_storages())
    if persistent_bytes > profile.initial_bytes:
        raise files.broken(
            'profile',
            f'it starts with {profile.initial_bytes} bytes, its parameters and '
            f'optimizer states alone have {persistent_bytes}',
        )


def _check_events(profile: Profile) -> None:
    """Each storage is allocated once at most, and freed once while it is there."""
    events = profile.events
    if not 0 <= profile.graph_end_event <= len(events):
        raise files.broken(
            'profile',
            f'its graph ends at event {profile.graph_end_event} of {len(events)}',
        )
    allocated = [-1] * len(profile.storages)
    freed = [-1] * len(profile.storages)
    for position, event in enumerate(events):
        if type(event) is not int or not 0 < abs(event) <= len(allocated):
            raise files.broken(
                'profile', f'event {position} is {event!r}: there is no such storage'
            )
        moments = allocated if event > 0 else freed
        if moments[abs(event) - 1] >= 0:
            raise files.broken('profile', f'event {position} ({event}) comes twice')
        moments[abs(event) - 1] = position
    for storage, begin, end in zip(profile.storages, allocated, freed, strict=True):
        if (storage.allocated_at, storage.freed_at) != (begin, end):
            raise files.broken(
                'profile',
                f'storage {storage.id} lives from event {storage.allocated_at} to '
                f'{storage.freed_at}, its events are {begin} and {end}',
            )
        if 0 <= end < begin:
            raise files.broken(
                'profile', f'storage {storage.id} is freed before it is allocated'
            )


def _check_recipes(profile: Profile) -> None:
    n_ops, n_storages = len(profile.operations), len(profile.storages)
    seen = set()
    for recipe in profile.recipes:
        if recipe.operation in seen:
            raise files.broken(
                'profile', f'operation {recipe.operation} has two recipes'
            )
        seen.add(recipe.operation)
        touched = (*recipe.inputs, *recipe.products)
        if not all(0 <= s < n_storages for s in touched):
            raise files.broken('profile', f'recipe {recipe} names unknown storages')
        possible = 0 <= recipe.seconds < 1e9
        possible = possible and 0 <= recipe.peak_bytes < files.LARGEST_SIZE
        if not (possible and 0 <= recipe.operation < n_ops):
            raise files.broken('profile', f'recipe {recipe} is out of range')
        covers = recipe.covers
        if covers and not (
            covers[0] >= 0
            and covers[-1] == recipe.operation
            and all(a < b for a, b in itertools.pairwise(covers))
        ):
            raise files.broken('profile', f'recipe {recipe} covers {covers}')
        for source in recipe.inputs:
            if profile.storages[source].producer > recipe.operation:
                raise files.broken(
                    'profile',
                    f'operation {recipe.operation} needs storage {source}, which '
                    f'is produced later: the dependencies have a cycle',
                )


def _check_splits(profile: Profile) -> None:
    """What a function runs with is allocated in its operation, and freed there."""
    n_ops, n_storages = len(profile.operations), len(profile.storages)
    for split in profile.splits:
        made = (split.first, *split.temporaries)
        possible = 0 <= split.operation < n_ops and split.function >= 0
        possible = possible and split.parts > 1 and bool(split.temporaries)
        possible = possible and 0 <= split.peak_bytes < files.LARGEST_SIZE
        if not possible or not all(0 <= s < n_storages for s in made):
            raise files.broken('profile', f'{split} is out of range')
        begin, end = span_of(profile, split.operation)
        for s in made:
            storage = profile.storages[s]
            gone = s not in split.temporaries or begin <= storage.freed_at < end
            if not (begin <= storage.allocated_at < end and gone):
                raise files.broken(
                    'profile',
                    f'storage {s} lives from event {storage.allocated_at} to '
                    f'{storage.freed_at}, but {split} is about events {begin} to {end}',
                )


def span_of(profile: Profile, operation: int) -> tuple[int, int]:
    """Positions of an operation's events: the first, and the one after the last."""
    operations = profile.operations
    end = len(profile.events)
    if operation + 1 < len(operations):
        end = operations[operation + 1].first_event
    return operations[operation].first_event, end


def _check_link(link: Link) -> None:
    for name, value in dataclasses.asdict(link).items():
        if name.endswith('_share'):
            fits, rule = 0 < value <= 1, 'above zero and at most one'
        elif name.endswith('_per_second'):
            fits, rule = 0 < value < math.inf, 'above zero'
        else:
            fits, rule = 0 <= value < math.inf, 'zero or more'
        if not fits:
            raise files.broken(
                'profile', f'its link has {name} {value}; it must be {rule}'
            )
