"""Types only: one recorded training iteration.

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
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from chainer_hybridmem.units import format_count, format_seconds

MINIMUM_MAP_BYTES = 4096  # smaller ones are noise: they stay


class Phase(enum.Enum):
    """Part of the iteration an operation belongs to."""

    FORWARD = 'forward'
    BACKWARD = 'backward'
    ALL_REDUCE = 'all-reduce'  # gradients are summed over processes
    UPDATE = 'update'


AFTER_BACKWARD = frozenset({Phase.ALL_REDUCE, Phase.UPDATE})


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
        phase (Phase): Part of the iteration.
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
        exchanged_bytes (int): What each process sends to others, and receives.
        session_seconds (float): Time that the program's thread spends on the session
            at this operation, beside moving and replaying maps; zero if no iteration
            has shown it. Plain Chainer does not spend it.
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
    exchanged_bytes: int = 0
    session_seconds: float = 0.0

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


FORMULAS = 4
"""Number of ways in which a pass may round: ``training/recompute/cuda_sums.py``."""


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
        formula (int): How that pass rounds, where there are several ways.
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
    formula: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """One way to run a function of an operation in parts, as tried when recording.

    Attributes:
        operation (int): The operation.
        function (int): Which of its functions that have a rule.
        name (str): The function's class.
        cut (str): What is cut, such as ``'batch'``; ``'in place'`` for a sum of two
            gradients that takes the memory of one of them.
        parts (int): Into how many.
        exact (bool): Whether every bit is as if it were not cut.
        first (int): The first storage that the function allocates.
        temporaries (tuple of int): Storages that live only while it runs as a whole;
            of a sum, the gradient that is freed right after it.
        peak_bytes (int): Highest load in parts above the function's first moment,
            what it leaves behind included.
        stages (tuple of int): That of each stage, of which a function has as many with
            any batch; empty if it is not known.
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
    stages: tuple[int, ...] = ()


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
        ranks (int): Processes that copy over it at the same time; the rates are what
            each of them has while all copy.
    """

    latency_seconds: float
    d2h_bytes_per_second: float
    h2d_bytes_per_second: float
    duplex_share: float = 1.0
    d2h_compute_share: float = 1.0
    h2d_compute_share: float = 1.0
    issue_seconds: float = 0.0
    ranks: int = 1

    def d2h_seconds(self, nbytes: int) -> float:
        """Seconds one swap-out of ``nbytes`` takes on a free link."""
        return self.latency_seconds + nbytes / self.d2h_bytes_per_second

    def h2d_seconds(self, nbytes: int) -> float:
        """Seconds one swap-in of ``nbytes`` takes on a free link."""
        return self.latency_seconds + nbytes / self.h2d_bytes_per_second


@dataclasses.dataclass(frozen=True, slots=True)
class MoveCost:
    """Time that the program's thread spends on a map that leaves and comes back.

    Copies and replays themselves are not in it. Zero if no iteration has shown it.

    Attributes:
        seconds_per_map (float): Whatever its size, by a copy or by a replay.
        seconds_per_byte (float): Of a map that is copied.
    """

    seconds_per_map: float = 0.0
    seconds_per_byte: float = 0.0

    def of_copied(self, nbytes: int) -> float:
        """Seconds of a map that is swapped."""
        return self.seconds_per_map + nbytes * self.seconds_per_byte


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
        functions_in_parts (tuple of pairs): Functions whose sizes are those in parts:
            their operation, and which of its functions with a rule they are. What they
            need as a whole is not recorded.
        move_cost (MoveCost): What moving a map costs the program's thread.
        plain_peak_bytes (int or None): Highest load of plain Chainer, where something
            other than this recording has seen it.
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
    functions_in_parts: tuple[tuple[int, int], ...] = ()
    move_cost: MoveCost = MoveCost()
    plain_peak_bytes: int | None = None

    def __repr__(self) -> str:
        return (
            f'<Profile: {format_count(len(self.operations), "operation")}, '
            f'{format_seconds(self.compute_seconds)} in-core>'
        )

    @property
    def first_backward(self) -> int:
        """Index of the first operation that is not forward."""
        for op in self.operations:
            if op.phase is not Phase.FORWARD:
                return op.index
        return len(self.operations)

    @property
    def first_update(self) -> int:
        """Index of the first operation after backward.

        An all-reduce, if there is one, or the update. From here on all parameters and
        optimizer states are there.
        """
        n = len(self.operations)
        while n and self.operations[n - 1].phase in AFTER_BACKWARD:
            n -= 1
        return n

    @property
    def compute_seconds(self) -> float:
        """Seconds of all operations without any stall: the in-core time."""
        return sum(op.device_seconds for op in self.operations)

    @property
    def issues(self) -> bool:
        """Whether the program's thread issues what a device computes meanwhile."""
        issued = any(op.host_seconds > 0 for op in self.operations)
        return issued or self.link.issue_seconds > 0

    @property
    def exchanged_bytes(self) -> int:
        """What each process sends to others, and receives."""
        return sum(op.exchanged_bytes for op in self.operations)

    @property
    def all_reduce_seconds(self) -> float:
        """Seconds of all sums over processes, waiting for the others included."""
        found = [op for op in self.operations if op.phase is Phase.ALL_REDUCE]
        return sum(op.device_seconds for op in found)

    def span_of(self, operation: int) -> tuple[int, int]:
        """Positions of an operation's events: the first, and the one after the last."""
        end = len(self.events)
        if operation + 1 < len(self.operations):
            end = self.operations[operation + 1].first_event
        return self.operations[operation].first_event, end

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


def measure_load(events: Iterable[int], storages: Sequence[Storage]) -> tuple[int, int]:
    """Bytes at the highest load above the beginning, and those that nothing keeps."""
    load = peak = 0
    for event in events:
        nbytes = storages[abs(event) - 1].nbytes
        load += nbytes if event > 0 else -nbytes
        peak = max(peak, load)
    return peak, peak - max(load, 0)
