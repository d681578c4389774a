"""What a recording asks the executor about the running graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainer_hybridmem.execution import Executor
from chainer_hybridmem.records.profile import Slot


class RunningMaps:
    """Answers questions about the feature maps of the running graph.

    Args:
        executor (Executor): Follows the iteration's plan.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def permanent(self) -> set[int]:
        """Allocations that never leave."""
        return self._executor.maps.permanent

    @property
    def pinned(self) -> set[int]:
        """Permanent allocations that the graph refers to itself."""
        return self._executor.maps.pinned

    @property
    def parked(self) -> set[int]:
        """Allocations of parameters and states before and after they were away."""
        return self._executor.maps.parked

    @property
    def spare(self) -> dict[Any, Any]:
        """Copies of arrays by node; the executor drops them when memory is short."""
        return self._executor.evictor.spare

    def list_allocations(self, function: Any) -> list[int]:
        """Ids of the allocations that a function's backward reads."""
        return [live.allocation for live in self._executor.maps.find(function)]

    def list_slots(self, function: Any) -> list[tuple[int, list[Slot]]]:
        """The same allocations with their slots of this iteration."""
        maps = self._executor.maps.find(function)
        return [(live.allocation, live.slots.name_present()) for live in maps]

    def knows(self, node: Any) -> bool:
        """Whether a node retains a feature map, present or away."""
        return self._executor.maps.knows(node)

    def is_rewritten(self, allocation: int) -> bool:
        """Whether the program has changed a map before it was copied out."""
        return self._executor.maps.is_rewritten(allocation)

    def watch_leaving(self, look: Callable[[int], None]) -> None:
        """Calls ``look`` with a map's allocation while its memory is still there."""
        self._executor.watch_leaving(lambda live: look(live.allocation))

    def stop_watching(self) -> None:
        """Ends :meth:`watch_leaving`."""
        self._executor.watch_leaving(None)
