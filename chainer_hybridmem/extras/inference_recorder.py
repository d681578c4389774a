"""``record_inference()``: memory events of one forward pass without backward.

What comes out is a :class:`~.records.profile.Profile` of forward operations
only: which arrays each function reads and makes, and every malloc and free. The
graph holds nothing; a slot says that a function has made an array (``OUTPUT``) or keeps
it for itself until it dies (``ATTRIBUTE``).

Note: [aliases]
    An array is known by its allocation, so that views (reshape, transpose, slices, the
    parts of a split) and outputs that are their input need nothing special. Memory of
    which NumPy does not know the owner (``as_strided``) belongs to the allocation
    in which its address lies.

Note: [by hand]
    The hooks do not see what the program reads between two functions. If it allocates
    there, everything alive counts as read then.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import chainer
import numpy as np

from chainer_hybridmem.errors import OptionError, SessionError
from chainer_hybridmem.interrupts import begin_whole, held_back
from chainer_hybridmem.planning.records.profile import (
    Category,
    Link,
    Phase,
    Profile,
    Slot,
    SlotKind,
)
from chainer_hybridmem.planning.records.specs import spec_of
from chainer_hybridmem.training.chainer_access import graph, owners
from chainer_hybridmem.training.chainer_access.models import name_device
from chainer_hybridmem.training.devices import open_device
from chainer_hybridmem.training.devices.protocol import Array, Device
from chainer_hybridmem.training.recording.hooks import Hooks
from chainer_hybridmem.training.recording.profile_builder import ProfileBuilder
from chainer_hybridmem.training.recording.steps import (
    Allocations,
    ModelMemory,
    Recording,
    Step,
)

_NO_LIMIT_BYTES = 2**50


def record_inference(model: chainer.Link, *args: Any, **kwargs: Any) -> Profile:
    """Records the memory of one forward pass at test time.

    The model is called under ``chainer.no_backprop_mode()`` and with
    ``chainer.config.train`` off; once more before, if it has parameters without
    a shape.

    >>> from chainer_hybridmem.planning import layouts
    >>> profile = hybridmem.record_inference(model, x)
    >>> trace = layouts.forward_trace(profile, layouts.Lifetimes.LAST_USE)
    >>> layouts.exact(trace).footprint_bytes, layouts.blob_bytes(profile)

    Args:
        model: On the CPU or a GPU.
        args: For the model.
        kwargs: For the model.

    Returns:
        Profile: Of forward operations only. What the model has returned stays to
        its end.

    Raises:
        OptionError: If the model is no link.
        SessionError: If it calls no function of Chainer, or if NumPy's memory is
            watched already.
    """
    if not isinstance(model, chainer.Link):
        raise OptionError(
            f'model is a {type(model).__name__}; a chainer.Link is needed.'
        )
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        if any(parameter.array is None for parameter in model.params()):
            model(*args, **kwargs)
        owners.bring_home(model)
        device = open_device(name_device(model), _NO_LIMIT_BYTES)
        with contextlib.closing(device):
            parameters = [
                array
                for kind, array in owners.permanent_arrays(model)
                if kind is Category.PARAMETER and device.arrays.owns(array)
            ]
            device.memory.adopt(parameters)
            with device.memory.counting():
                recorder = InferenceRecorder(device, parameters)
                recorder.expect((args, kwargs))
                with recorder:
                    result = model(*args, **kwargs)
                profile = recorder.build()
                del result
    return profile


_NO_LINK = Link(0.0, 1.0, 1.0)  # nothing is copied
_EMPTY_BYTES = 1  # of an empty array; Chainer's checks of types make some


class InferenceRecorder(chainer.FunctionHook):
    """Records while it is entered.

    Args:
        device: Installed.
        parameters: The model's parameters and statistics, adopted.
    """

    name = 'hybridmem-forward'

    def __init__(self, device: Device, parameters: list[Array]) -> None:
        self._device = device
        self._open = False
        self._hooks = Hooks(device)
        self._steps: list[Step] = []
        self._ran: list[int] = []  # events when each step had computed
        self._running: Any = None  # the function, not those that it calls itself
        self._outputs: tuple[Array | None, ...] = ()
        self._allocations = Allocations(device)
        self._extents: dict[int, tuple[int, int]] = {}  # by allocation
        self._events: list[tuple[int, int]] = []
        self._batch: set[int] = set()
        self._parameters = {self._identify(array) for array in parameters}

    def expect(self, argument: Any) -> None:
        """Counts arrays that the model is called with, also inside of containers."""
        if isinstance(argument, chainer.Variable):
            argument = argument.array
        if isinstance(argument, dict):
            argument = tuple(argument.values())
        if isinstance(argument, list | tuple):
            for value in argument:
                self.expect(value)
        elif self._device.arrays.owns(argument):
            self._batch.add(self._identify(argument))

    def __enter__(self) -> InferenceRecorder:
        return begin_whole(self, self._begin)

    def _begin(self) -> InferenceRecorder:
        self._device.memory.start_events()
        super().__enter__()
        self._open = True
        return self

    @held_back
    def __exit__(self, *error: Any) -> None:
        if not self._open:
            return
        self._open = False
        super().__exit__(*error)
        self._hooks.enter()  # it ends the pass
        self._events = self._device.memory.take_events()

    # -- hooks ----------------------------------------------------------------
    def forward_preprocess(self, function: Any, in_data: tuple[Array, ...]) -> None:
        """A function begins; its outputs are caught, for no graph will have them."""
        if self._running is not None:
            return
        forward = function.forward

        def catch(inputs: tuple[Array, ...]) -> tuple[Array, ...]:
            try:
                self._outputs = forward(inputs)
            except BaseException:  # the program may go on without it
                self._running = None
                self._steps.pop()
                self._hooks.starts.pop()
                raise
            return self._outputs

        self._running = function
        graph.replace_forward(function, catch)
        self._steps.append(
            Step(
                graph.function_name(function),
                Phase.FORWARD,
                specs=tuple(spec_of(array) for array in in_data),
                reads=tuple(self._identify(array) for array in in_data),
            )
        )
        self._hooks.enter()
        self._hooks.leave(starts_operation=True)

    def forward_postprocess(self, function: Any, in_data: tuple[Array, ...]) -> None:
        """It has computed."""
        if function is not self._running:
            return
        self._running = None
        graph.restore_forward(function)
        k, owns = len(self._steps) - 1, self._device.arrays.owns
        found = [
            (array, Slot(k, SlotKind.OUTPUT, index))
            for index, array in enumerate(self._outputs)
            if owns(array)
        ]
        found += [
            (array, Slot(k, SlotKind.ATTRIBUTE, key))
            for key, array in graph.attribute_arrays(function, owns)
        ]
        made = [(self._identify(array), slot) for array, slot in found]
        self._steps[k].products = tuple(made)
        self._outputs = ()
        self._ran.append(self._device.memory.event_count)

    def _identify(self, array: Array) -> int:
        """The allocation of an array; see Note: [aliases]. 0 if it is unknown."""
        device = self._device
        found = device.arrays.allocation_id(array)
        if not found:
            device.memory.adopt([array])
            found = device.arrays.allocation_id(array)
        sizes = self._allocations.sizes
        if found and found not in sizes:
            sizes[found] = device.arrays.root_bytes(device.arrays.root(array))
        if not isinstance(array, np.ndarray):
            return found
        address = array.__array_interface__['data'][0]
        if found:
            root = device.arrays.root(array)
            start = root.__array_interface__['data'][0]
            self._extents[found] = (start, start + root.nbytes)
            return found
        for allocation, (start, end) in reversed(self._extents.items()):
            if start <= address < end:
                return allocation
        return 0

    # -- result ---------------------------------------------------------------
    def build(self) -> Profile:
        """The profile; to be called once it is left.

        Raises:
            SessionError: If no function has been called.
        """
        if not self._steps:
            raise SessionError(
                'The model has called no function of Chainer; there is nothing to '
                'record.'
            )
        self._device.clock.synchronize()
        self._find_slots()
        profile = ProfileBuilder(self._make_recording()).build(
            _NO_LINK, self._device.describe()
        )
        uses = self._find_uses(profile)
        storages = tuple(
            dataclasses.replace(
                s, forward_uses=tuple(sorted(uses[s.id])), releasable_from=-1
            )
            for s in profile.storages
        )
        initial_bytes = sum(s.nbytes for s in storages if s.allocated_at < 0)
        return dataclasses.replace(
            profile, storages=storages, initial_bytes=initial_bytes
        )

    def _find_slots(self) -> None:
        """Every allocation is a storage; its slots are where functions leave it."""
        allocations, born = self._allocations, self._list_born()
        calls, bounds = self._hooks.calls, self._find_bounds()
        for k, step in enumerate(self._steps):
            first, end = (calls[hook].first_event for hook in bounds[k])
            for allocation in step.reads:
                allocations.add_slots(allocation, ())
            for allocation, slot in step.products:
                made = first <= born.get(allocation, -1) < end
                left = made or slot.kind is SlotKind.OUTPUT
                allocations.add_slots(allocation, [slot] if left else ())
        for allocation in allocations.sizes:
            allocations.add_slots(allocation, ())

    def _find_bounds(self) -> list[tuple[int, int]]:
        return self._hooks.pair(self._hooks.starts)

    def _list_born(self) -> dict[int, int]:
        """Where each allocation has been made."""
        return {event: at for at, (event, _) in enumerate(self._events) if event > 0}

    def _make_recording(self) -> Recording:
        known = {*self._allocations.sizes, *(abs(event) for event, _ in self._events)}
        # Also arrays of the model that are no parameters.
        stays = known - self._list_born().keys() - (self._batch - self._parameters)
        return Recording(
            hooks=self._hooks,
            steps=self._steps,
            bounds=self._find_bounds(),
            raw_events=np.array(self._events, np.int64).reshape(-1, 2),
            allocations=self._allocations,
            model=ModelMemory(
                dict.fromkeys(stays, Category.PARAMETER), {}, set(), set(), {}
            ),
            spans=[],
            initial_bytes=0,
            graph_end=-1,
            draft=False,
            merges_small=False,
        )

    def _find_uses(self, profile: Profile) -> list[set[int]]:
        """Operations that read each storage; see Note: [by hand]."""
        storages = profile.storages
        uses = [set(storage.forward_uses) for storage in storages]
        gaps = [(0, 0, self._hooks.calls[0].first_event)]  # before the first function
        gaps += [(k, ran, profile.span_of(k)[1]) for k, ran in enumerate(self._ran)]
        for k, start, end in gaps:
            for position in range(start, end):
                event = profile.events[position]
                if event < 0 or storages[event - 1].nbytes <= _EMPTY_BYTES:
                    continue
                for s in storages:
                    if s.allocated_at < position and not -1 < s.freed_at < position:
                        uses[s.id].add(k)
        return uses
