"""Which products of forward functions can be made again, tried right after forward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from chainer_hybridmem.chainer_access import graph
from chainer_hybridmem.chainer_access.owners import is_parameter
from chainer_hybridmem.devices.protocol import Array, Device
from chainer_hybridmem.recompute import fused_replays, trust
from chainer_hybridmem.recording.readings import Reading, WrittenMemory
from chainer_hybridmem.recording.running_maps import RunningMaps
from chainer_hybridmem.recording.steps import OF_ATTRIBUTE, Step
from chainer_hybridmem.recording.trials import Walker, try_fused, try_replay

SMALLEST_COPY_BYTES = 4096  # smaller inputs are parameters or noise


class RecipeTrials:
    """Replays every forward function of one iteration once.

    Args:
        device (Device): Where functions run.
        maps (RunningMaps): Knows the feature maps of the running graph.
        positions (mapping): Operation of each function that is complete.

    Attributes:
        untrusted (set of str): Names of functions that may not be run again.
    """

    def __init__(
        self,
        device: Device,
        maps: RunningMaps,
        positions: weakref.WeakKeyDictionary[Any, int],
    ) -> None:
        self._device = device
        self._maps = maps
        self._positions = positions
        self._walker: Any = Walker(device)
        self._written = WrittenMemory(maps)
        self._step: Step | None = None  # the function that runs
        self._pristine: Any = None  # the same, as it was before
        self._inputs: list[Reading] = []  # what it reads, until it is complete
        self._given: list[Reading] = []  # attributes from which it starts
        self._held: tuple[Step, Any, tuple[Array, ...]] | None = None
        self._chains: list[tuple[Any, list[Any]]] = []  # output, nodes with copies
        self.untrusted: set[str] = set()
        maps.watch_leaving(self._look)

    def skip_times(self) -> None:
        """Runs each replay once; see :class:`Walker`."""
        self._walker = Walker(self._device, timed=False)

    # -- in the order of calls, for every function ----------------------------
    def begin(
        self, step: Step, function: Any, inputs: Any, given: Iterable[Array]
    ) -> None:
        """Before a forward function runs.

        Args:
            step: The operation.
            function: Its forward has not been called.
            inputs: What it reads.
            given: Arrays that it has as attributes already.
        """
        self._step, self._pristine = step, graph.pristine(function)
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
                self._written.watch(step, reading, reading.allocation)

    def _look(self, allocation: int) -> None:
        """Finds what the program has written into a map that is about to leave."""
        self._written.look(allocation)
        step = self._step
        if step is None:
            return
        for reading in self._inputs:
            same = reading.allocation == allocation
            if same and allocation not in step.written and reading.may_have_changed():
                step.written.add(allocation)

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
        if not trust.may_replay(function):
            self.untrusted.add(graph.function_name(function))
        else:
            arrays = dict(zip(function.inputs, inputs, strict=True))
            if self._try_fused(step, function, arrays):
                self._try_whole(step, before, function, inputs, made)
            for reading in self._given:
                self._written.watch(step, reading, OF_ATTRIBUTE)
        self._forget_chains()

    # -- at the end -----------------------------------------------------------
    def end_forward(self) -> None:
        """Forward ends: compares what functions have read, and gives up copies."""
        self._drop_copies()  # their nodes would keep the graph
        self._maps.stop_watching()
        self._written.find()

    def close(self) -> None:
        """Frees what trials need."""
        self._held = self._walker = None
        self._written.forget()
        self._drop_copies()
        self._maps.stop_watching()

    def _drop_copies(self) -> None:
        self._chains.clear()
        self._maps.spare.clear()

    # -- trials ---------------------------------------------------------------
    def _try_fused(self, step: Step, function: Any, arrays: dict[Any, Array]) -> bool:
        """Tries all fused replays; True if the whole forward is still worth a trial."""
        whole = True

        def fetch(node: Any) -> Array:
            for source in (arrays, self._maps.spare):
                if node in source:
                    return source[node]
            array = graph.node_array(node)
            if array is None:
                raise fused_replays.NoFusedReplayError('an input has left')
            return array

        for functions in fused_replays.find_candidates(function):
            if not all(other in self._positions for other in functions):
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
        step.set_whole(result)
        for name in result.attributes if result else ():
            self._given.append(Reading(self._device, made[name]))

    # -- copies for longer fused replays --------------------------------------
    def _hold(self, functions: tuple[Any, ...], arrays: dict[Any, Array]) -> None:
        """Keeps copies of what a longer fused replay would start with.

        In this iteration every map leaves after its last use; the addition or
        ReLU that follows would find nothing to compare with. The executor gives
        the copies up as soon as memory is short.
        """
        device, spare = self._device, self._maps.spare
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
        spare = self._maps.spare
        for node in [node for node in spare if node not in needed]:
            del spare[node]
