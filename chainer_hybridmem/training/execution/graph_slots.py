"""The graph's references to the memory of one live map.

The program may hold an array that the graph has let go (live_map, [held arrays]). A
weak reference finds that memory again without keeping it alive.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection
from typing import Any

from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access.graph import SlotRef
from chainer_hybridmem.training.devices.bits import fingerprint
from chainer_hybridmem.training.devices.protocol import Array, Device, Root, View


def find_nothing() -> None:
    """In place of :func:`track_memory` where there is no array."""


def track_memory(device: Device, array: Array | None) -> Callable[[], Root | None]:
    """Finds the allocation of an array for as long as any reference keeps it alive."""
    return find_nothing if array is None else device.arrays.track(array)


def copy_memory(device: Device, target: Root, source: Root, nbytes: int) -> None:
    """Copies an allocation into another one of the same size."""
    whole = View(0, (nbytes,), (1,), '|u1')
    device.arrays.restore(target, whole)[...] = device.arrays.restore(source, whole)


def compute_uncounted_fingerprint(array: Array) -> int:
    """Uses NumPy's own memory, which the host device does not count."""
    return contextvars.Context().run(fingerprint, array)


Prints = dict[View, int]  # fingerprint of what each view shows


class GraphSlots(list[SlotRef]):
    """Reads, fills and empties all slots of one allocation.

    Those of earlier iterations come first.
    """

    __slots__ = '_device', '_older'

    def __init__(self, device: Device) -> None:
        self._device = device
        self._older = 0  # references that earlier iterations have made

    def begin_iteration(self) -> None:
        """All slots so far belong to earlier iterations."""
        self._older = len(self)

    def forget_replaced(self) -> None:
        """Forgets the attributes to which their functions have given other arrays."""
        replaced = [reference for reference in self if reference.replaced()]
        if replaced:
            older = self[: self._older]
            self._older -= sum(reference in replaced for reference in older)
            self[:] = [r for r in self if r not in replaced]

    # -- names ----------------------------------------------------------------
    def name_present(self) -> list[Slot]:
        """Names the slots that the present iteration has made."""
        return [reference.slot for reference in self[self._older :]]

    def name_all(self) -> list[Slot]:
        """Names the slots of all iterations."""
        return [reference.slot for reference in self]

    def name_made_by(self, operation: int) -> list[Slot]:
        """Names the slots that an operation of any iteration has made."""
        return [slot for slot in self.name_all() if slot.operation == operation]

    def has_attribute(self) -> bool:
        """Whether a function keeps the array as an attribute."""
        return any(r.slot.kind is SlotKind.ATTRIBUTE for r in self)

    def belong_to(self, owner: Any, names: Collection[str]) -> bool:
        """Whether an owner has the array in these attributes, else as a node."""
        return any(reference.is_of(owner, names) for reference in self)

    def are_in(self, owner: Any, keys: Collection[str]) -> bool:
        """Whether an owner has the array behind one of these keys."""
        return any(r.slot.key in keys and r.owner() is owner for r in self)

    # -- who has the array ----------------------------------------------------
    def are_alive(self) -> bool:
        """Whether any part of the graph can still ask for the array."""
        return any(reference.owner() is not None for reference in self)

    def are_held(self) -> bool:
        """Whether a Variable of the program has the array, as far as slots tell."""
        return any(reference.held() for reference in self)

    def are_replaced(self) -> bool:
        """Whether a Variable has got another array since."""
        return any(r.node and r.replaced() for r in self)

    def is_exclusive(self) -> bool:
        """Whether only the graph has the memory; False where that is not certain."""
        arrays: dict[int, Array] = {}
        fields: dict[int, set[object]] = {}  # of the graph, that refer to each array
        for reference in self:
            array = reference.get()
            if array is not None:
                if reference.shared():
                    return False
                arrays[id(array)] = array
                fields.setdefault(id(array), set()).add(reference.place)
        array = None  # every reference counts
        return self._device.arrays.held_by_none_but(arrays, fields)

    # -- contents -------------------------------------------------------------
    def find_array(self) -> Array | None:
        """The array of the first slot that has one now."""
        for reference in self:
            array = reference.get()
            if array is not None:
                return array
        return None

    def find_root(self) -> Root | None:
        """The allocation, if the graph has it now."""
        array = self.find_array()
        return None if array is None else self._device.arrays.root(array)

    def fill(self, root: Root) -> None:
        """Gives every slot its view of an allocation."""
        restore = self._device.arrays.restore
        for reference in self:
            reference.put(restore(root, reference.view))

    def empty(self) -> None:
        """Takes the array out of every slot."""
        for reference in self:
            reference.put(None)

    def find_living_views(self) -> set[View]:
        """How slots whose owners live look at the allocation."""
        return {r.view for r in self if r.owner() is not None}

    def compute_prints(self) -> Prints:
        """Fingerprints of the contents as the graph has them; empty if it has none."""
        result: Prints = {}
        for reference in self:
            array = reference.get()
            if array is not None and reference.view not in result:
                result[reference.view] = compute_uncounted_fingerprint(array)
        return result
