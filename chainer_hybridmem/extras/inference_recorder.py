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

import bisect
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
    Operation,
    Phase,
    Profile,
    Slot,
    SlotKind,
    Storage,
    measure_load,
)
from chainer_hybridmem.planning.records.specs import spec_of
from chainer_hybridmem.training.chainer_access import graph, owners
from chainer_hybridmem.training.chainer_access.models import name_device
from chainer_hybridmem.training.devices import open_device
from chainer_hybridmem.training.devices.protocol import Array, Device, Mark

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


@dataclasses.dataclass
class _Step:
    """One function as it was seen.

    Attributes:
        label: Name of the function.
        specs: Of its inputs.
        reads: Allocations of its inputs.
        started: When.
        first_event: Events before it.
        ran_event: Events when it had computed.
        slots: Allocations it has made or keeps.
    """

    label: str
    specs: tuple[str, ...]
    reads: tuple[int, ...]
    started: Mark
    first_event: int
    ran_event: int = -1
    slots: list[tuple[int, Slot]] = dataclasses.field(default_factory=list)


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
        self._steps: list[_Step] = []
        self._running: Any = None  # the function, not those that it calls itself
        self._outputs: tuple[Array | None, ...] = ()
        self._sizes: dict[int, int] = {}  # by allocation
        self._extents: dict[int, tuple[int, int]] = {}  # by allocation
        self._events: list[tuple[int, int]] = []
        self._ended: Mark = None
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
        self._ended = self._device.clock.mark()
        self._events = self._device.memory.take_events()

    # -- hooks ----------------------------------------------------------------
    def forward_preprocess(self, function: Any, in_data: tuple[Array, ...]) -> None:
        """A function begins; its outputs are caught, for no graph will have them."""
        if self._running is not None:
            return
        device, forward = self._device, function.forward

        def catch(inputs: tuple[Array, ...]) -> tuple[Array, ...]:
            try:
                self._outputs = forward(inputs)
            except BaseException:  # the program may go on without it
                self._running = None
                self._steps.pop()
                raise
            return self._outputs

        self._running = function
        graph.replace_forward(function, catch)
        self._steps.append(
            _Step(
                graph.function_name(function),
                tuple(spec_of(array) for array in in_data),
                tuple(self._identify(array) for array in in_data),
                device.clock.mark(),
                device.memory.event_count,
            )
        )

    def forward_postprocess(self, function: Any, in_data: tuple[Array, ...]) -> None:
        """It has computed."""
        if function is not self._running:
            return
        self._running = None
        graph.restore_forward(function)
        k, step = len(self._steps) - 1, self._steps[-1]
        for index, array in enumerate(self._outputs):
            if self._device.arrays.owns(array):
                slot = Slot(k, SlotKind.OUTPUT, index)
                step.slots.append((self._identify(array), slot))
        for key, array in graph.attribute_arrays(function, self._device.arrays.owns):
            slot = Slot(k, SlotKind.ATTRIBUTE, key)
            step.slots.append((self._identify(array), slot))
        self._outputs = ()
        step.ran_event = self._device.memory.event_count

    def _identify(self, array: Array) -> int:
        """The allocation of an array; see Note: [aliases]. 0 if it is unknown."""
        device = self._device
        found = device.arrays.allocation_id(array)
        if not found:
            device.memory.adopt([array])
            found = device.arrays.allocation_id(array)
        if found and found not in self._sizes:
            self._sizes[found] = device.arrays.root_bytes(device.arrays.root(array))
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
        return _Builder(self).build()


class _Builder:
    """Sorts a recording into a profile."""

    def __init__(self, recorder: InferenceRecorder) -> None:
        self.recorder = recorder
        self.steps = recorder._steps
        self.raw = [event for event, _ in recorder._events]
        self.sizes = {**recorder._sizes, **{abs(e): n for e, n in recorder._events}}
        self.firsts = [0, *(step.first_event for step in self.steps[1:])]
        self.index: dict[int, int] = {}  # allocation to storage
        seen = [abs(event) for event in self.raw]
        for step in self.steps:
            seen += [*step.reads, *(allocation for allocation, _ in step.slots)]
        for allocation in (*seen, *recorder._sizes):
            if allocation:
                self.index.setdefault(allocation, len(self.index))
        n = len(self.index)
        self.malloc, self.free = [-1] * n, [-1] * n
        for position, event in enumerate(self.raw):
            moments = self.malloc if event > 0 else self.free
            moments[self.index[abs(event)]] = position
        self.events = tuple(
            (1 if event > 0 else -1) * (self.index[abs(event)] + 1)
            for event in self.raw
        )

    def build(self) -> Profile:
        device = self.recorder._device
        device.clock.synchronize()
        slots, uses = self._slots(), self._uses()
        storages = tuple(
            self._storage(allocation, i, slots[i], sorted(uses[i]))
            for allocation, i in self.index.items()
        )
        return Profile(
            operations=tuple(
                self._operation(k, storages) for k in range(len(self.steps))
            ),
            storages=storages,
            events=self.events,
            recipes=(),
            initial_bytes=sum(s.nbytes for s in storages if s.allocated_at < 0),
            graph_end_event=len(self.raw),
            link=_NO_LINK,
            device=device.describe(),
        )

    def _operation_at(self, position: int) -> int:
        return bisect.bisect_right(self.firsts, position) - 1

    def _slots(self) -> list[list[Slot]]:
        result: list[list[Slot]] = [[] for _ in self.index]
        for k, step in enumerate(self.steps):
            for allocation, slot in step.slots:
                if not allocation:
                    continue
                i = self.index[allocation]
                made = self.malloc[i] >= 0 and self._operation_at(self.malloc[i]) == k
                if made or slot.kind is SlotKind.OUTPUT:
                    result[i].append(slot)
        return result

    def _uses(self) -> list[set[int]]:
        """Operations that read each storage; see Note: [by hand]."""
        uses: list[set[int]] = [set() for _ in self.index]
        ends = [*(step.first_event for step in self.steps[1:]), len(self.raw)]
        gaps = [(0, 0, self.steps[0].first_event)]  # before the first function
        for k, step in enumerate(self.steps):
            gaps.append((k, step.ran_event, ends[k]))
            for allocation in step.reads:
                if allocation:
                    uses[self.index[allocation]].add(k)
        for k, start, end in gaps:
            for position in range(start, end):
                event = self.raw[position]
                if event > 0 and self.sizes[event] > _EMPTY_BYTES:
                    for i in self._alive(position):
                        uses[i].add(k)
        return uses

    def _alive(self, position: int) -> list[int]:
        return [
            i
            for i, (malloc, free) in enumerate(zip(self.malloc, self.free, strict=True))
            if malloc < position and not -1 < free < position
        ]

    def _storage(
        self, allocation: int, i: int, slots: list[Slot], uses: list[int]
    ) -> Storage:
        malloc, free = self.malloc[i], self.free[i]
        producer = self._operation_at(malloc) if malloc >= 0 else -1
        if producer >= 0:
            category = Category.FEATURE_MAP if slots else Category.WORKSPACE
        elif allocation in self.recorder._batch - self.recorder._parameters:
            category = Category.INPUT
        else:  # also arrays of the model that are no parameters
            category = Category.PARAMETER
        return Storage(
            id=i,
            nbytes=self.sizes[allocation],
            category=category,
            label=self.steps[producer].label if producer >= 0 else 'input',
            producer=producer,
            allocated_at=malloc,
            freed_at=free,
            forward_uses=tuple(uses),
            slots=tuple(slots),
        )

    def _operation(self, k: int, storages: tuple[Storage, ...]) -> Operation:
        step = self.steps[k]
        last = k + 1 == len(self.steps)
        end = len(self.raw) if last else self.firsts[k + 1]
        ended = self.recorder._ended if last else self.steps[k + 1].started
        events = self.events[self.firsts[k] : end]
        made = {e - 1 for e in events if e > 0} - {-e - 1 for e in events if e < 0}
        return Operation(
            index=k,
            label=step.label,
            phase=Phase.FORWARD,
            device_seconds=self.recorder._device.clock.elapsed(step.started, ended),
            host_seconds=0.0,
            reads=tuple(self.index[a] for a in step.reads if a),
            writes=tuple(sorted(made)),
            workspace_bytes=measure_load(events, storages)[1],
            specs=step.specs,
            forward=-1,
            first_event=self.firsts[k],
        )
