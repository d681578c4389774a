"""Hook and memory events of one iteration, turned into a profile."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from chainer_hybridmem.planning.records.profile import (
    AFTER_BACKWARD,
    Category,
    Link,
    Phase,
    Profile,
    Slot,
    SlotKind,
    Split,
)
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.chainer_access.owners import Owner, is_parameter
from chainer_hybridmem.training.devices.protocol import Array, Device
from chainer_hybridmem.training.execution import Executor
from chainer_hybridmem.training.recording.hooks import Hooks
from chainer_hybridmem.training.recording.profile_builder import ProfileBuilder
from chainer_hybridmem.training.recording.recipe_trials import RecipeTrials
from chainer_hybridmem.training.recording.steps import (
    IN_GRAPH,
    Allocations,
    ModelMemory,
    Recording,
    Step,
    TrialSpan,
)


class Detail(NamedTuple):
    """What recordings tell beside the usual.

    Attributes:
        parts (bool): What functions need in parts; trying that takes most of the time.
        keep_small_arrays (bool): Each allocation, small ones too; else see
            :func:`.count_together`.
        timed (bool): Times; else one recording is enough, and replays run once.
    """

    parts: bool = False
    keep_small_arrays: bool = False
    timed: bool = True


class Recorder(Hooks):
    """Records one iteration.

    Args:
        device (Device): Counts memory and tells time.
        executor (Executor): Knows the feature maps of the running graph.
        trial (bool): Whether every forward function is replayed once to see
            if that is exact.
        draft (bool): See :meth:`mark_as_draft`.
        detail (Detail): What the profile is to tell.

    Attributes:
        trial (bool): As given.
        draft (bool): Whether the iteration has run without any plan.
    """

    def __init__(
        self,
        device: Device,
        executor: Executor,
        trial: bool,
        draft: bool,
        detail: Detail,
    ) -> None:
        super().__init__(device)
        self._maps = executor.maps
        self.trial = trial
        self.draft = draft
        self._merges_small = not detail.keep_small_arrays
        self._steps: list[Step] = []
        self._spans: list[TrialSpan] = []
        self._allocations = Allocations(device)
        self._graph_life = GraphLife(device)
        self._before: set[str] = set()  # attributes that a function starts with
        self._functions: dict[int, weakref.ref[Any]] = {}  # some die at once
        self._positions: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )
        self._trials = (
            RecipeTrials(device, executor, self._positions, detail.timed)
            if trial
            else None
        )
        device.memory.start_events()
        self._initial_bytes = device.memory.used_bytes

    # -- what kind of recording -------------------------------------------------
    def mark_as_draft(self) -> None:
        """The iteration has no plan, has left it, or has come to it late.

        Then what the user holds is unknown, and everything counts as releasable
        after its last use.
        """
        self.draft = True

    @property
    def untrusted(self) -> set[str]:
        """Names of functions that may not be run again."""
        return set() if self._trials is None else self._trials.untrusted

    # -- hooks ------------------------------------------------------------------
    def forward_starts(
        self, label: str, function: Any, specs: tuple[str, ...], inputs: Any
    ) -> None:
        """Before a forward function runs."""
        reads = tuple(self._allocations.identify(x) for x in inputs)
        self._steps.append(Step(label, Phase.FORWARD, specs=specs, reads=reads))
        given = dict(graph.attribute_arrays(function, self.device.arrays.owns))
        self._before = set(given)
        if self._trials is not None:
            self._trials.begin(function, inputs, given.values())

    def forward_ran(self, inputs: tuple[Array, ...]) -> None:
        """After a forward function has run; a trial holds its inputs."""
        if self._trials is not None:
            self._trials.end(self._steps[-1], inputs)

    def forward_complete(self, k: int, function: Any) -> None:
        """After the function has left its arrays in the graph."""
        step = self._steps[k]
        self._functions[k] = weakref.ref(function)
        self._positions[function] = k
        if self._trials is not None:
            self._trials.watch_inputs(step, function)
        for live in self._maps.find(function):
            self._allocations.add_slots(live.allocation, live.slots.name_present())
        made = {
            name: array
            for name, array in graph.attribute_arrays(function, self.device.arrays.owns)
            if name not in self._before
        }
        step.products = tuple(self._list_products(k, function, made))
        if self._trials is not None:
            self._trials.complete(step, function, made)

    def _list_products(
        self, k: int, function: Any, made: dict[str, Array]
    ) -> list[tuple[int, Slot]]:
        result, identify = [], self.device.arrays.allocation_id
        for index, array in enumerate(graph.output_arrays(function)):
            if array is not None and self.device.arrays.owns(array):
                result.append((identify(array), Slot(k, SlotKind.OUTPUT, index)))
        for name, array in made.items():
            result.append((identify(array), Slot(k, SlotKind.ATTRIBUTE, name)))
        return [(allocation, slot) for allocation, slot in result if allocation]

    def note_split_trial(
        self, first_event: int, end_event: int, splits: Sequence[Split]
    ) -> None:
        """A function has been tried in parts; see :class:`.steps.TrialSpan`."""
        self._spans.append(TrialSpan(first_event, end_event, splits))

    def backward_starts(self, label: str, function: Any, forward: int) -> None:
        """Before a backward function runs."""
        # From the end: all but the first of them are found at once.
        if not any(step.phase is Phase.BACKWARD for step in reversed(self._steps)):
            self._end_forward()
        while self._steps and self._steps[-1].phase in AFTER_BACKWARD:
            self._steps.pop()  # that was not the end of backward
        self._graph_life.watch(function)
        k = len(self._steps)
        reads = tuple(live.allocation for live in self._maps.find(function))
        self._steps.append(Step(label, Phase.BACKWARD, forward, reads=reads))
        for allocation in reads:
            self._allocations.add_use(allocation, k)
        if self._trials is not None and forward >= 0:
            self._trials.watch_kept(self._steps[forward], function)

    def start_after_backward(self, exchanged_bytes: int | None) -> None:
        """See :class:`.Hooks`."""
        super().start_after_backward(exchanged_bytes)
        step = Step('update', Phase.UPDATE)
        if exchanged_bytes is not None:
            step = Step('all-reduce', Phase.ALL_REDUCE, exchanged_bytes=exchanged_bytes)
        self._steps.append(step)

    def label_of(self, forward: int, otherwise: str) -> str:
        """Label of a forward operation of this iteration."""
        return self._steps[forward].label if forward >= 0 else otherwise

    def _end_forward(self) -> None:
        """Finds out which inputs a replay will find."""
        if self._trials is not None:
            self._trials.end_forward()
        for k, reference in self._functions.items():
            step, function = self._steps[k], reference()
            if function is None or function.inputs is None:
                continue
            step.input_nodes = tuple(
                (allocation, self._find_source(node))
                for allocation, node in zip(step.reads, function.inputs, strict=False)
            )

    def _find_source(self, node: Any) -> int | None:
        """Where a replay gets the array of a node from.

        Returns:
            ``IN_GRAPH`` (or the model), the forward operation to replay before, or
            None: nowhere. What only a user's Variable holds may be gone in another
            iteration.
        """
        retained = graph.retained_array(node) is not None
        in_graph = retained or self._maps.find_of_node(node) is not None
        if in_graph or is_parameter(node):
            return IN_GRAPH
        creator = node.creator_node
        return None if creator is None else self._positions.get(creator)

    # -- result -----------------------------------------------------------------
    def discard(self) -> None:
        """Ends the recording without a profile."""
        if self._trials is not None:
            self._trials.close()
        self._graph_life.finish()
        self.device.memory.take_events()

    def build(
        self,
        link: Link,
        description: dict[str, Any],
        kinds: dict[int, Category],
        owners: dict[int, Owner] | None = None,
        labels: Mapping[int, str] | None = None,
    ) -> Profile:
        """The profile; to be called at the start of the next iteration.

        Args:
            link: The measured link.
            description: Name, kind and versions of the device.
            kinds: What the model's own allocations hold.
            owners: Who holds its parameters and optimizer states, by allocation id.
            labels: Names of gradients and persistent arrays that it began with.
        """
        graph_end = self._graph_life.finish()
        if self._trials is not None:
            self._trials.end_backward()
            self._trials.close()
        maps = self._maps
        if self._steps[-1].phase is not Phase.UPDATE:
            self._steps.append(Step('update', Phase.UPDATE))
        recording = Recording(
            hooks=self,
            steps=self._steps,
            bounds=self.operations(),
            raw_events=np.array(self.device.memory.take_events(), np.int64).reshape(
                -1, 2
            ),
            allocations=self._allocations,
            model=ModelMemory(
                kinds, owners or {}, maps.pinned, maps.parked, labels or {}
            ),
            spans=self._spans,
            initial_bytes=self._initial_bytes,
            graph_end=graph_end,
            draft=self.draft,
            merges_small=self._merges_small,
        )
        return ProfileBuilder(recording).build(link, description)


class GraphLife:
    """Watches functions with a backward; their graph dies with the last of them.

    Args:
        device (Device): Counts events.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._end = -1
        self._watched: list[weakref.ref[Any]] = []

    def watch(self, function: Any) -> None:
        """Backward of a function begins."""
        self._watched.append(weakref.ref(function, self._note_death))

    def _note_death(self, _: weakref.ref[Any]) -> None:
        self._end = self._device.memory.event_count

    def finish(self) -> int:
        """Ends watching; the events before the end, -1 if a part of the graph lives."""
        if any(reference() is not None for reference in self._watched):
            self._end = -1
        self._watched.clear()
        return self._end
