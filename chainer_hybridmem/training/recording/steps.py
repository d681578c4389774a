"""What a recording has seen of one iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from chainer_hybridmem import timing
from chainer_hybridmem.planning.records.profile import Category, Phase, Slot, Split
from chainer_hybridmem.training.chainer_access.owners import Owner
from chainer_hybridmem.training.devices.protocol import Device, Mark
from chainer_hybridmem.training.recording.trials import TrialResult


@dataclasses.dataclass(slots=True)
class HookCall:
    """One hook call: its marks, and its positions in the raw event log."""

    entered: Mark
    left: Mark
    entered_seconds: float
    left_seconds: float
    first_event: int
    end_event: int

    @classmethod
    def now(cls, device: Device) -> HookCall:
        """A call that begins now, and so far has ended at once."""
        mark, now = device.clock.mark(), timing.now()
        position = device.memory.event_count
        return cls(mark, mark, now, now, position, position)


NOT_OF_DEVICE = 0  # in place of an allocation id


class Allocations:
    """Identifies arrays by their allocation, and collects who uses each allocation.

    Args:
        device (Device): Owns the memory.

    Attributes:
        sizes (dict): Bytes of what is read, by allocation id.
        slots (dict): Where the graph keeps each allocation.
        uses (dict): Backward operations that read each allocation.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.sizes: dict[int, int] = {}
        self.slots: dict[int, list[Slot]] = {}
        self.uses: dict[int, list[int]] = {}

    def identify(self, array: Any) -> int:
        """The allocation of an array; ``NOT_OF_DEVICE`` for other memory."""
        device = self._device
        if not device.arrays.owns(array):
            return NOT_OF_DEVICE
        allocation = device.arrays.allocation_id(array)
        if allocation not in self.sizes:
            self.sizes[allocation] = device.arrays.root_bytes(device.arrays.root(array))
        return allocation

    def add_slots(self, allocation: int, slots: Iterable[Slot]) -> None:
        """Notes slots of an allocation, each one once."""
        known = self.slots.setdefault(allocation, [])
        known += [slot for slot in slots if slot not in known]

    def add_use(self, allocation: int, operation: int) -> None:
        """Notes a backward operation that reads an allocation."""
        self.uses.setdefault(allocation, []).append(operation)


IN_GRAPH = -1  # the source of an input that the graph holds itself
OF_ATTRIBUTE = 0  # in place of an allocation: an attribute that a function starts from


@dataclasses.dataclass
class Step:
    """One operation as it was seen.

    Attributes:
        label (str): Path of the link, and name of the function.
        phase (Phase): Part of the iteration.
        hook (int): The hook call before it.
        forward (int): The forward operation of a backward one, else -1.
        specs (tuple of str): Of its inputs.
        reads (tuple of int): Ids of the allocations that it reads.
        products (tuple of pairs): Allocation id and slot of what it has made.
        input_nodes (tuple of pairs): Allocation id of each input, and where a replay
            gets it from: ``IN_GRAPH``, a forward operation, or None for nowhere.
        whole (TrialResult or None): Of running the whole forward again.
        fused (list of pairs): Operations that a fused replay covers, and its result;
            what covers most comes first.
        written (set of int): What it reads and the program changes in place;
            ``OF_ATTRIBUTE`` stands for attributes.
        exchanged_bytes (int): What an all-reduce sends, and receives.
    """

    label: str
    phase: Phase
    hook: int
    forward: int
    specs: tuple[str, ...]
    reads: tuple[int, ...] = ()
    products: tuple[tuple[int, Slot], ...] = ()
    input_nodes: tuple[tuple[int, int | None], ...] = ()
    whole: TrialResult | None = None
    fused: list[tuple[tuple[int, ...], TrialResult]] = dataclasses.field(
        default_factory=list
    )
    written: set[int] = dataclasses.field(default_factory=set)
    exchanged_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class ModelMemory:
    """Allocations that the model and its optimizer hold, by id.

    Attributes:
        kinds (dict): What each one holds.
        owners (dict): Who holds parameters and optimizer states.
        pinned (set of int): Parameters that the graph refers to itself.
        parked (set of int): Those before and after they were away.
        labels (dict): Names of gradients and persistent arrays that it began with.
    """

    kinds: dict[int, Category]
    owners: dict[int, Owner]
    pinned: set[int]
    parked: set[int]
    labels: Mapping[int, str]


@dataclasses.dataclass(frozen=True)
class TrialSpan:
    """Raw events of a function that was tried in parts.

    Attributes:
        first_event (int): Where it begins.
        end_event (int): Where it has ended.
        splits (sequence of Split): What the parts need; storages are missing.
    """

    first_event: int
    end_event: int
    splits: Sequence[Split]


@dataclasses.dataclass(frozen=True)
class Recording:
    """One recorded iteration.

    Attributes:
        device (Device): Where it has run.
        hooks (list of HookCall): In order; the last one has ended the iteration.
        steps (list of Step): Operations in order, the update last.
        raw_events (ndarray): (n, 2) int64, events and bytes; ``+id`` per malloc and
            ``-id`` per free of an allocation.
        allocations (Allocations): What the operations read and make.
        model (ModelMemory): What stays between iterations.
        spans (list of TrialSpan): Functions tried in parts.
        initial_bytes (int): In use when it has begun.
        graph_end (int): Raw events before the last graph died; -1 if one lives on.
        draft (bool): Whether the iteration had no plan.
        merges_small (bool): Whether small arrays may be counted together.
    """

    device: Device
    hooks: list[HookCall]
    steps: list[Step]
    raw_events: np.ndarray
    allocations: Allocations
    model: ModelMemory
    spans: list[TrialSpan]
    initial_bytes: int
    graph_end: int
    draft: bool
    merges_small: bool
