"""Which products of forward functions can be made again, tried right after forward."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from chainer_hybridmem.planning.records.profile import SlotKind
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.chainer_access.owners import is_parameter
from chainer_hybridmem.training.devices.bits import fingerprint
from chainer_hybridmem.training.devices.protocol import Array, Device, Root, View
from chainer_hybridmem.training.execution import Executor
from chainer_hybridmem.training.execution.graph_slots import find_nothing, track_memory
from chainer_hybridmem.training.recompute import fused_replays, trust
from chainer_hybridmem.training.recording.steps import OF_ATTRIBUTE, Step
from chainer_hybridmem.training.recording.trials import Walker, try_fused, try_replay

SMALLEST_COPY_BYTES = 4096  # smaller inputs are parameters or noise


class RecipeTrials:
    """Replays every forward function of one iteration once.

    Args:
        device (Device): Where functions run.
        executor (Executor): Knows the feature maps of the running graph.
        positions (mapping): Operation of each function that is complete.
        timed (bool): Whether it matters how long replays take.

    Attributes:
        untrusted (set of str): Functions that may not be run again, and why.
    """

    def __init__(
        self,
        device: Device,
        executor: Executor,
        positions: weakref.WeakKeyDictionary[Any, int],
        timed: bool,
    ) -> None:
        self._device = device
        self._maps = executor.maps
        # Copies of arrays by node, which are dropped when memory is short.
        self._spare = executor.evictor.spare
        self._positions = positions
        self._walker: Any = Walker(device, timed)
        # A function, what it has read, and what is noted of a change.
        self._readings: list[tuple[Step, Reading, int]] = []
        # Before a backward: what its function keeps, by attribute.
        self._kept: list[tuple[Step, Reading, str]] = []
        self._pristine: Any = None  # the function that runs, as it was before
        self._inputs: list[Reading] = []  # what it reads, until it is complete
        self._given: list[Reading] = []  # attributes from which it starts
        self._held: tuple[Step, Any, tuple[Array, ...]] | None = None
        self._chains: list[tuple[Any, list[Any]]] = []  # output, nodes with copies
        self.untrusted: set[str] = set()

    # -- in the order of calls, for every function ----------------------------
    def begin(self, function: Any, inputs: Any, given: Iterable[Array]) -> None:
        """Before a forward function runs.

        Args:
            function: Its forward has not been called.
            inputs: What it reads.
            given: Arrays that it has as attributes already.
        """
        self._pristine = None
        if trust.is_trusted(function):
            self._pristine = graph.pristine(function)
        self._inputs = [Reading(self._device, x) for x in inputs]
        self._given = [Reading(self._device, array) for array in given]

    def end(self, step: Step, inputs: tuple[Array, ...]) -> None:
        """After it has run; its inputs are held until :meth:`complete`."""
        step.written.update(r.allocation for r in self._inputs if r.changed())
        self._given = [reading for reading in self._given if not reading.changed()]
        if not step.written:
            self._held = (step, self._pristine, inputs)

    def watch_inputs(self, step: Step, function: Any) -> None:
        """Finds later changes of what it has read.

        A replay reads copies of running statistics, so these may change.
        """
        readings, self._inputs = self._inputs, []
        if not readings or function.inputs is None:
            return
        for node, reading in zip(function.inputs, readings, strict=True):
            permanent = reading.allocation in self._maps.permanent
            if not permanent or is_parameter(node):
                self._readings.append((step, reading, reading.allocation))

    def complete(self, step: Step, function: Any, made: dict[str, Array]) -> None:
        """After it has left its arrays in the graph: finds its recipes.

        Args:
            step: The operation; gets the results.
            function: In the graph.
            made: Arrays that its forward has set as attributes.
        """
        if self._held is None or self._held[0] is not step:
            return
        _, before, inputs = self._held
        self._held = None
        if before is None or not trust.may_replay(function):
            self.untrusted.add(trust.describe_untrusted(function))
        else:
            arrays = dict(zip(function.inputs, inputs, strict=True))
            if self._try_fused(step, function, arrays):
                self._try_whole(step, before, function, inputs, made)
            for reading in self._given:
                self._readings.append((step, reading, OF_ATTRIBUTE))
        self._forget_chains()

    # -- at the end -----------------------------------------------------------
    def end_forward(self) -> None:
        """Forward ends: compares what functions have read, and gives up copies."""
        self._drop_copies()  # their nodes would keep the graph
        for step, reading, noted in self._readings:
            if reading.changed() or self._maps.is_rewritten(reading.allocation):
                step.written.add(noted)
        self._readings.clear()

    def watch_kept(self, step: Step, function: Any) -> None:
        """The backward of a forward operation begins; it may write over what it has."""
        if step.whole is None or not trust.may_write_over(function):
            return
        # What forward has set: what it was given, such as running statistics, is the
        # program's, and a replay must not write into it.
        made = {s.key for _, s in step.products if s.kind is SlotKind.ATTRIBUTE}
        for name, array in graph.attribute_arrays(function, self._device.arrays.owns):
            if name in made:
                self._kept.append((step, Reading(self._device, array), name))

    def end_backward(self) -> None:
        """A replay does not make what backward has written over, but begins with it."""
        changed = [kept for kept in self._kept if kept[1].changed()]
        written = {(id(step), _base(name)) for step, _, name in changed}
        for step, _, name in self._kept:
            result = step.whole
            assert result is not None
            again = (id(step), _base(name)) in written
            if again and name not in result.attributes:
                attributes = (*result.attributes, name)
                step.whole = dataclasses.replace(result, attributes=attributes)
        self._kept.clear()

    def close(self) -> None:
        """Frees what trials need."""
        self._held = self._walker = None
        self._readings.clear()
        self._kept.clear()
        self._drop_copies()

    def _drop_copies(self) -> None:
        self._chains.clear()
        self._spare.clear()

    # -- trials ---------------------------------------------------------------
    def _try_fused(self, step: Step, function: Any, arrays: dict[Any, Array]) -> bool:
        """Tries all fused replays; True if the whole forward is still worth a trial."""
        whole = True

        def fetch(node: Any) -> Array:
            for source in (arrays, self._spare):
                if node in source:
                    return source[node]
            array = graph.node_array(node)
            if array is None:
                raise fused_replays.NoFusedReplayError('an input has left')
            return array

        for functions in fused_replays.find_candidates(function):
            if not all(
                other in self._positions and trust.is_trusted(other)
                for other in functions
            ):
                continue
            result = try_fused(functions, fetch, self._device, self._walker)
            if result is None or not result.exact:
                continue
            covers = tuple(sorted(self._positions[other] for other in functions))
            step.fused.append((covers, result))
            whole = whole and len(functions) > 1
            self._hold(functions, arrays)
        return whole

    def _try_whole(
        self,
        step: Step,
        before: Any,
        function: Any,
        inputs: tuple[Array, ...],
        made: dict[str, Array],
    ) -> None:
        """Runs the whole forward again."""
        with trust.effects_refused(function):
            result = try_replay(
                before, function, inputs, made, self._device, self._walker
            )
        step.whole = result
        for name in result.attributes if result else ():
            self._given.append(Reading(self._device, made[name]))

    # -- copies for longer fused replays --------------------------------------
    def _hold(self, functions: tuple[Any, ...], arrays: dict[Any, Array]) -> None:
        """Keeps copies of what a longer fused replay would start with.

        In this iteration every map leaves after its last use; the addition or
        ReLU that follows would find nothing to compare with. The executor gives
        the copies up as soon as memory is short.
        """
        device, spare = self._device, self._spare
        if not fused_replays.may_go_on(functions[-1]):
            return
        nodes = fused_replays.find_inputs(functions)
        for node in nodes:
            array = arrays.get(node)
            if array is None or node in spare or array.nbytes < SMALLEST_COPY_BYTES:
                continue  # copied before, or a parameter that stays
            if device.memory.used_bytes + 3 * array.nbytes > device.memory.limit_bytes:
                return
            try:
                with device.memory.attempt():
                    spare[node] = array.copy(order='K')
            except MemoryError:  # what needs it is not tried
                return
        self._chains.append((functions[-1].outputs[0], nodes))

    def _forget_chains(self) -> None:
        """Gives up copies for outputs that no function can read any more."""
        alive = []
        for reference, nodes in self._chains:
            node = reference()
            if node is not None and graph.node_array(node) is not None:
                alive.append((reference, nodes))
        self._chains = alive
        needed = {node for _, nodes in alive for node in nodes}
        for node in [node for node in self._spare if node not in needed]:
            del self._spare[node]


def _base(name: str) -> str:
    """The attribute with an array, which may be a list."""
    return name.partition('.')[0]


# -- what functions have read -------------------------------------------------
class Reading:
    """A checksum of what a forward function has read.

    It is that of the whole allocation where the device knows it, else of the array.

    Args:
        device (Device): Where it is.
        array (Array): What is read.

    Attributes:
        allocation (int): Id of the allocation; 0 for what is not the device's.
    """

    def __init__(self, device: Device, array: Any) -> None:
        self._device = device
        owned = device.arrays.owns(array)
        self.allocation = device.arrays.allocation_id(array) if owned else 0
        self._memory: Callable[[], Any] = find_nothing
        self._look: object = None  # see Arrays.last_look
        if self.allocation:
            self._memory = track_memory(device, array)
            self._watch(device.arrays.root(array))
        elif owned:
            self._memory = weakref.ref(array)
        self._changed = False  # when the memory was about to be free
        self._before = self._checksum(self._memory())

    def _watch(self, root: Root) -> None:
        """Compares once more when the memory is about to be free."""
        nbytes, this = self._device.arrays.root_bytes(root), weakref.ref(self)

        def look(address: int) -> None:
            reading = this()
            if reading is not None:
                reading._take_last_look(address, nbytes)

        self._look = self._device.arrays.last_look(root, look)

    def _take_last_look(self, address: int, nbytes: int) -> None:
        memory = self._device.arrays.memory_at(address, nbytes)
        try:
            with self._device.memory.attempt():
                self._changed = self._checksum(memory) != self._before
        except MemoryError:  # there is none for finding out
            self._changed = True

    def _checksum(self, memory: Any) -> int | None:
        if memory is None:
            return None
        if not self.allocation:
            return fingerprint(memory)
        whole = View(0, (self._device.arrays.root_bytes(memory),), (1,), '|u1')
        return fingerprint(self._device.arrays.restore(memory, whole))

    def changed(self) -> bool:
        """Whether the contents have changed since, also if the memory is free by now.

        Of what is not the device's, nothing is known once it is free.
        """
        memory = self._memory()
        if memory is None:
            return self._changed
        return self._checksum(memory) != self._before
