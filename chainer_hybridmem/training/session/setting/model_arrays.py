"""What a model's parameters, gradients and optimizer states take in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

from chainer_hybridmem.planning.records.profile import Category
from chainer_hybridmem.training.chainer_access.graph import ByOwner
from chainer_hybridmem.training.chainer_access.owners import (
    Owner,
    StateOwner,
    away_bytes,
    model_arrays,
    named_arrays,
    owners_of,
    parameters_of,
    permanent_arrays,
)
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.execution import Executor

T = TypeVar('T')


class ModelArrays:
    """The arrays of a model, as they are at each call.

    Args:
        model (Link): Is trained.
        device (Device): Where it is trained.
    """

    def __init__(self, model: Any, device: Device) -> None:
        self._model = model
        self._device = device
        self._updates_before = 0
        self._known: ByOwner[int] = ByOwner()  # allocations, by array
        # Update rules as seen last; dead where the program has set up others.
        self._rules: list[weakref.ref[Any]] = []

    def find_categories(self) -> dict[int, Category]:
        """What the model's allocations hold now, by allocation id."""
        rules: list[Any] = []
        found = self._by_allocation(permanent_arrays(self._model, rules))
        self._rules = list(map(weakref.ref, rules))
        return found

    def protect_from(self, executor: Executor) -> dict[int, Category]:
        """Tells an executor which allocations never leave; returns what they hold."""
        categories = self.find_categories()
        executor.maps.keep_resident(categories)
        return categories

    def find_owners(self) -> dict[int, Owner]:
        """The owners of parameters and optimizer states, by allocation id.

        Arrays that share an allocation are left out: one of them cannot leave alone.
        """
        found: dict[int, list[Owner]] = {}
        arrays = self._device.arrays
        for owner in owners_of(self._model):
            array = owner.get()
            allocation = arrays.allocation_id(array) if arrays.owns(array) else 0
            found.setdefault(allocation, []).append(owner)
        return {a: owners[0] for a, owners in found.items() if a and len(owners) == 1}

    def find_labels(self) -> dict[int, str]:
        """Names of gradients and persistent arrays, by allocation id."""
        return self._by_allocation(named_arrays(self._model))

    def _by_allocation(self, arrays: Iterable[tuple[T, Any]]) -> dict[int, T]:
        """What is said of arrays of the device, by allocation id.

        Most arrays of a model are the same in each iteration, and keep their memory.
        """
        identify, owns = self._device.arrays.allocation_id, self._device.arrays.owns
        known = self._known.by_id
        found: dict[int, T] = {}
        for what, array in arrays:
            entry = known.get(id(array))
            if entry is not None:
                found[entry.value] = what
            elif owns(array):
                allocation = identify(array)
                found[allocation] = what
                if allocation and what is not Category.GRADIENT:  # which is new soon
                    self._known[array] = allocation  # else it may be counted later
        return found

    def find_states(self) -> list[Owner]:
        """The owners of optimizer states."""
        owners = self.find_owners().values()
        return [owner for owner in owners if isinstance(owner, StateOwner)]

    @property
    def distinct_bytes(self) -> int:
        """What those that are there take; shared memory counts once."""
        return self._device.arrays.distinct_bytes(
            model_arrays(self._model, self._device)
        )

    @property
    def kept_bytes(self) -> int:
        """What all of them take, also those that are away."""
        return self.distinct_bytes + away_bytes(self._model)

    def begin_counting_updates(self) -> None:
        """Updates from here on count."""
        self._updates_before = sum(self.find_updates().values())

    def count_updates(self) -> int:
        """How often parameters have been updated meanwhile, all together."""
        return sum(self.find_updates().values()) - self._updates_before

    def sum_known_updates(self) -> int:
        """Updates so far of the parameters that were there at the last look."""
        rules = [reference() for reference in self._rules]
        return sum([rule.t for rule in rules if rule is not None and rule.enabled])

    def find_updates(self) -> dict[int, int]:
        """How often each parameter has been updated that may be, by its rule's id."""
        rules = (parameter.update_rule for _, parameter in parameters_of(self._model))
        return {id(rule): rule.t for rule in rules if rule is not None and rule.enabled}
