"""Makes a profile of an iteration that others have written down as a graph.

Others name what each operation reads and makes, and how long it takes. What a profile
says besides follows from that:

- A buffer lives from the operation that makes it to the end of the last one that reads
  it. One without a maker is there before the iteration, and stays.
- What forward makes and backward reads is a feature map; nothing but the graph holds
  it.
- A forward operation can run again if it only reads buffers and makes its own, in the
  time that it took.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.planning.records.profile import (
    Category,
    Link,
    Operation,
    Phase,
    Profile,
    Recipe,
    Slot,
    SlotKind,
    Storage,
)
from chainer_hybridmem.planning.records.profile_file import check_profile

MOST_NODES = 200_000
BYTES_PER_SECOND = 1e12  # that an operation touches, where nobody knows its time
UPDATE = 'update'


@dataclasses.dataclass(frozen=True, slots=True)
class GraphNode:
    """One operation.

    Attributes:
        label (str): Its name.
        backward (bool): Whether it belongs to backward.
        seconds (float): How long it takes.
        reads (tuple of int): Buffers that it needs.
        makes (tuple of int): Buffers that it allocates, each made by one node only.
        forward (int): For backward, the forward node it differentiates; else -1.
        repeatable (bool): Whether it gives the same again; for backward does not count.
        workspace_bytes (int): What it needs besides, while it runs.
        again_seconds (float or None): How long a replay takes; None: as long.
        in_place (bool): Whether it writes over what nobody reads after it.
    """

    label: str
    backward: bool
    seconds: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    forward: int = -1
    repeatable: bool = True
    workspace_bytes: int = 0
    again_seconds: float | None = None
    in_place: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation.

    Attributes:
        nbytes (int): Size.
        category (Category or None): What it holds; None: as it is made and read.
        stays (bool): Whether something besides the graph holds it to the end.
    """

    nbytes: int
    category: Category | None = None
    stays: bool = False


def build_profile(
    nodes: Sequence[GraphNode],
    buffers: Sequence[Buffer],
    link: Link,
    device: Mapping[str, Any],
    initial_bytes: int = 0,
) -> Profile:
    """One iteration of a graph.

    Args:
        nodes: In the order in which they run, forward first; an update is added.
        buffers: What they read and make, by number.
        link: The path to host memory, of which graphs say nothing.
        device: What is known of where it comes from.
        initial_bytes: Load before the first operation, besides buffers that no node
            makes.

    Raises:
        FormatError: If nodes and buffers contradict each other.
    """
    if len(nodes) > MOST_NODES:
        raise FormatError(f'It has {len(nodes)} operations; {MOST_NODES} are allowed.')
    _check_order(nodes)
    workspaces = [Buffer(n.workspace_bytes) for n in nodes if n.workspace_bytes]
    buffers, n_buffers = (*buffers, *workspaces), len(buffers)
    lives = _Lives(_with_workspaces(nodes, n_buffers), buffers)
    events, first_events = lives.events()
    operations = tuple(
        Operation(
            index=index,
            label=node.label,
            phase=Phase.BACKWARD if node.backward else Phase.FORWARD,
            device_seconds=node.seconds,
            host_seconds=0.0,
            reads=node.reads,
            writes=node.makes,
            workspace_bytes=node.workspace_bytes,
            specs=(),
            forward=node.forward,
            first_event=first_events[index],
        )
        for index, node in enumerate(nodes)
    )
    update = Operation(
        len(nodes), UPDATE, Phase.UPDATE, 0.0, 0.0, (), (), 0, (), -1, len(events)
    )
    there = sum(b.nbytes for b, m in zip(buffers, lives.maker, strict=True) if m < 0)
    profile = Profile(
        operations=(*operations, update),
        storages=tuple(lives.storages(events)),
        events=tuple(events),
        recipes=tuple(
            _recipe(index, node, buffers)
            for index, node in enumerate(nodes)
            if not node.backward and node.repeatable and node.makes
        ),
        initial_bytes=initial_bytes + there,
        graph_end_event=len(events),
        link=link,
        device=dict(device),
    )
    check_profile(profile)
    return profile


def _with_workspaces(nodes: Sequence[GraphNode], first: int) -> Iterator[GraphNode]:
    """Nodes that also make their workspaces, which nobody reads."""
    for node in nodes:
        if node.workspace_bytes:
            yield dataclasses.replace(node, makes=(*node.makes, first))
            first += 1
        else:
            yield node


def _check_order(nodes: Sequence[GraphNode]) -> None:
    phases = [node.backward for node in nodes]
    if not nodes or phases != sorted(phases):
        raise FormatError('Its operations are not a forward and a backward pass.')


def _recipe(index: int, node: GraphNode, buffers: Sequence[Buffer]) -> Recipe:
    made = sum(buffers[b].nbytes for b in node.makes)
    return Recipe(
        operation=index,
        inputs=node.reads,
        products=node.makes,
        sources=tuple(Slot(index, SlotKind.OUTPUT, i) for i in range(len(node.makes))),
        attributes=(),
        seconds=node.seconds if node.again_seconds is None else node.again_seconds,
        peak_bytes=made + node.workspace_bytes,
        exact=True,
    )


class _Lives:
    """When each buffer is made, read and freed."""

    def __init__(self, nodes: Iterable[GraphNode], buffers: Sequence[Buffer]) -> None:
        self.nodes, self.buffers = tuple(nodes), buffers
        self.maker = [-1] * len(buffers)
        self.uses: list[list[int]] = [[] for _ in buffers]
        for index, node in enumerate(self.nodes):
            for b in node.makes:
                if self.maker[b] >= 0:
                    raise FormatError(f'Buffer {b} is made by two operations.')
                self.maker[b] = index
            for b in dict.fromkeys(node.reads):
                self.uses[b].append(index)
        for b, maker in enumerate(self.maker):
            if self.uses[b] and self.uses[b][0] <= maker:
                raise FormatError(
                    f'Operation {self.uses[b][0]} reads buffer {b}, which operation '
                    f'{maker} makes.'
                )

    def _last(self, b: int) -> int:
        """The operation at whose end a recording that swaps everything frees it.

        Of a feature map that is the last one of forward.
        """
        forward = [use for use in self.uses[b] if not self.nodes[use].backward]
        mapped = self._is_map(b)
        return max((self.maker[b], *(forward if mapped else self.uses[b])))

    def _is_map(self, b: int) -> bool:
        maker, uses = self.maker[b], self.uses[b]
        kind = self.buffers[b].category
        if maker < 0 or self.nodes[maker].backward or kind is not None:
            return kind is Category.FEATURE_MAP
        return bool(uses) and self.nodes[uses[-1]].backward

    def events(self) -> tuple[list[int], list[int]]:
        """Mallocs and frees in order, and the first of each operation."""
        freed: list[list[int]] = [[] for _ in self.nodes]
        for b, maker in enumerate(self.maker):
            if maker >= 0 and not self.buffers[b].stays:
                freed[self._last(b)].append(b)
        events: list[int] = []
        first = []
        for index, node in enumerate(self.nodes):
            first.append(len(events))
            makes = [b + 1 for b in node.makes]
            frees = [-(b + 1) for b in freed[index]]
            written = node.in_place and not set(node.makes).intersection(freed[index])
            events.extend([*frees, *makes] if written else [*makes, *frees])
        return events, first

    def storages(self, events: Sequence[int]) -> list[Storage]:
        """The buffers as a profile has them."""
        allocated = [-1] * len(self.buffers)
        freed = [-1] * len(self.buffers)
        for position, event in enumerate(events):
            (allocated if event > 0 else freed)[abs(event) - 1] = position
        return [
            self._storage(b, allocated[b], freed[b]) for b in range(len(self.buffers))
        ]

    def _storage(self, b: int, allocated: int, freed: int) -> Storage:
        buffer, maker, nodes = self.buffers[b], self.maker[b], self.nodes
        forward = tuple(use for use in self.uses[b] if not nodes[use].backward)
        backward = tuple(use for use in self.uses[b] if nodes[use].backward)
        category = buffer.category or self._category(b)
        mapped = category is Category.FEATURE_MAP and bool(backward)
        held = not mapped or buffer.stays or maker < 0
        return Storage(
            id=b,
            nbytes=buffer.nbytes,
            category=category,
            label=nodes[maker].label if maker >= 0 else '',
            producer=maker,
            allocated_at=allocated,
            freed_at=freed,
            forward_uses=forward,
            backward_uses=backward,
            releasable_from=-1 if held else max((maker, *forward)) + 1,
        )

    def _category(self, b: int) -> Category:
        maker = self.maker[b]
        if maker < 0:
            return Category.INPUT
        if self.nodes[maker].backward:
            return Category.GRADIENT
        return Category.FEATURE_MAP if self._is_map(b) else Category.WORKSPACE
