"""What a recording has seen of one iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from chainer_hybridmem.planning.records.profile import Category, Phase, Slot, Split
from chainer_hybridmem.training.chainer_access.owners import Owner
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.recording.hooks import Hooks
from chainer_hybridmem.training.recording.trials import TrialResult

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
    forward: int = -1
    specs: tuple[str, ...] = ()
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
        hooks (Hooks): Of the iteration, the one that ends it among them.
        steps (list of Step): Operations in order, the update last.
        bounds (list of tuple): The hooks before and after each operation.
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

    hooks: Hooks
    steps: list[Step]
    bounds: list[tuple[int, int]]
    raw_events: np.ndarray
    allocations: Allocations
    model: ModelMemory
    spans: list[TrialSpan]
    initial_bytes: int
    graph_end: int
    draft: bool
    merges_small: bool
