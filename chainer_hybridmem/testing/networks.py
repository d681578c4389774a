"""Small profiles to plan: networks with views, several outputs, masks and states."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

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

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Node:
    """One forward function of a small network.

    Attributes:
        parents (tuple): ``(node, output)`` of each input.
        outputs (tuple of int): Bytes of each output; empty for a view of the
            first input.
        mask (int): Bytes of an attribute its replay must start with (dropout).
        saved (int): Bytes of an attribute its replay makes again (pooling).
        reads_inputs (bool): Whether backward reads the inputs.
        reads_outputs (bool): Whether backward reads the outputs.
        seconds (float): Of forward and of a replay; backward takes twice that.
        workspace (int): Bytes needed while it runs.
        exact (bool): Whether a replay gives the same bits.
        held (tuple of int or None): Operation up to whose end the program
            holds each output; -1 for ever, -2 not at all.
    """

    parents: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...] = (10 * MIB,)
    mask: int = 0
    saved: int = 0
    reads_inputs: bool = True
    reads_outputs: bool = False
    seconds: float = 1.0
    workspace: int = MIB
    exact: bool = True
    held: int = -2


def network(
    nodes: Sequence[Node],
    bandwidth: float = 10.0 * MIB,
    latency: float = 0.0,
    graph_dies_early: bool = False,
) -> Profile:
    """A profile of any network, as the recorder would make it.

    Storage 0 is the input batch; then come each node's outputs, mask and saved
    attribute, and the gradients. Workspaces are events as well.
    """
    return _Network(nodes).profile(
        Link(latency, bandwidth, bandwidth), graph_dies_early
    )


class _Network:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.n = len(nodes)
        self.sizes = [4 * MIB]  # the input batch
        self.producer = [-1]
        self.held = [-1]
        self.forward: list[set[int]] = [set()]
        self.backward: list[set[int]] = [set()]
        self.slots: list[list[Slot]] = [[]]
        self.root: dict[tuple[int, int], int] = {}
        self.made: list[list[tuple[int, Slot]]] = []
        self.masks: list[int] = []
        self.operations: list[Operation] = []
        self.events: list[int] = []
        self.frees: dict[int, list[int]] = {}  # storages by operation
        for i, node in enumerate(nodes):
            self._add_node(i, node)

    def _add(self, nbytes: int, producer: int, held: int = -2) -> int:
        self.sizes.append(nbytes)
        self.producer.append(producer)
        self.held.append(held)
        self.forward.append(set())
        self.backward.append(set())
        self.slots.append([])
        return len(self.sizes) - 1

    def _retain(self, storage: int, slot: Slot) -> None:
        self.slots[storage].append(slot)
        self.backward[storage].add(2 * self.n - 1 - slot.operation)

    def _add_node(self, i: int, node: Node) -> None:
        for j, parent in enumerate(node.parents):
            storage = self.root[parent]
            self.forward[storage].add(i)
            if node.reads_inputs:
                self._retain(storage, Slot(i, SlotKind.INPUT, j))
        made: list[tuple[int, Slot]] = []
        for j, nbytes in enumerate(node.outputs):
            storage = self.root[i, j] = self._add(nbytes, i, node.held)
            made.append((storage, Slot(i, SlotKind.OUTPUT, j)))
            if node.reads_outputs:
                self._retain(storage, Slot(i, SlotKind.RETAINED, j))
        if not node.outputs:
            self.root[i, 0] = self.root[node.parents[0]] if node.parents else 0
        self.masks.append(-1)
        for name, nbytes in (('mask', node.mask), ('saved', node.saved)):
            if nbytes:
                storage = self._add(nbytes, i)
                slot = Slot(i, SlotKind.ATTRIBUTE, name)
                made.append((storage, slot))
                self._retain(storage, slot)
                if name == 'mask':
                    self.masks[i] = storage
        self.made.append(made)

    def _free_after(self, storage: int) -> int:
        """Operation at whose end the recorded iteration frees a storage."""
        if self.held[storage] == -1:
            return -1
        last = max((self.producer[storage], *self.forward[storage]))
        return max(last, self.held[storage])

    def _operate(self, k: int, made: list[int], workspace: int) -> int:
        first = len(self.events)
        self.events.extend(s + 1 for s in made)
        if workspace:
            extra = self._add(workspace, k, -3)
            self.events.extend((extra + 1, -extra - 1))
        self.events.extend(-storage - 1 for storage in self.frees.get(k, ()))
        return first

    def profile(self, link: Link, graph_dies_early: bool) -> Profile:
        n, gradient = self.n, -1
        for storage in range(1, len(self.sizes)):
            self.frees.setdefault(self._free_after(storage), []).append(storage)
        for k in range(2 * n):
            i = k if k < n else 2 * n - 1 - k
            node = self.nodes[i]
            made = [storage for storage, _ in self.made[i]]
            if k >= n:
                before, gradient = gradient, self._add(max([1, *node.outputs]), k, -3)
                made = [gradient]
            first = self._operate(k, made, node.workspace)
            if k > n:
                self.events.append(-before - 1)
            self._record(k, i, first, made)
        graph_end = len(self.events)
        if gradient >= 0:
            self.events.append(-gradient - 1)
        self._operate(2 * n, [], MIB)
        self._record(2 * n, -1, graph_end, [])
        position = {event: p for p, event in enumerate(self.events)}
        return Profile(
            operations=tuple(self.operations),
            storages=tuple(self._storage(s, position) for s in range(len(self.sizes))),
            events=tuple(self.events),
            recipes=tuple(self._recipe(i) for i in range(n)),
            initial_bytes=5 * MIB,
            graph_end_event=graph_end if graph_dies_early else len(self.events),
            link=link,
            device={'kind': 'toy'},
        )

    def _record(self, k: int, i: int, first: int, made: list[int]) -> None:
        n = self.n
        phase = Phase.FORWARD if k < n else Phase.BACKWARD if i >= 0 else Phase.UPDATE
        seconds = 0.1 if i < 0 else self.nodes[i].seconds * (1 if k < n else 2)
        self.operations.append(
            Operation(
                index=k,
                label=f'/{i}/Node' if i >= 0 else 'update',
                phase=phase,
                device_seconds=seconds,
                host_seconds=0.0,
                reads=(),
                writes=tuple(made),
                workspace_bytes=self.nodes[i].workspace if i >= 0 else MIB,
                specs=(),
                forward=i if phase is Phase.BACKWARD else -1,
                first_event=first,
            )
        )

    def _storage(self, s: int, position: dict[int, int]) -> Storage:
        free, producer = self._free_after(s), self.producer[s]
        category = Category.FEATURE_MAP if self.slots[s] else Category.WORKSPACE
        malloc = position[s + 1] if producer >= 0 else -1
        return Storage(
            id=s,
            nbytes=self.sizes[s],
            category=category if producer >= 0 else Category.INPUT,
            label=f'/{producer}/Node',
            producer=producer,
            allocated_at=malloc,
            freed_at=position.get(-s - 1, -1),
            forward_uses=tuple(sorted(self.forward[s])),
            backward_uses=tuple(sorted(self.backward[s])),
            releasable_from=free + 1 if free >= 0 and self.slots[s] else -1,
            slots=tuple(self.slots[s]),
        )

    def _recipe(self, i: int) -> Recipe:
        node, mask = self.nodes[i], self.masks[i]
        inputs = {self.root[parent] for parent in node.parents} or {0}
        return Recipe(
            operation=i,
            inputs=tuple(sorted(inputs | ({mask} if mask >= 0 else set()))),
            products=tuple(storage for storage, _ in self.made[i]),
            sources=tuple(slot for _, slot in self.made[i]),
            attributes=('mask',) if mask >= 0 else (),
            seconds=node.seconds,
            peak_bytes=sum(node.outputs) + node.saved + node.workspace,
            exact=node.exact,
        )


def random_network(seed: int, nodes: int = 8) -> Profile:
    """A random network: skips, views, several outputs, masks, maps held on to."""
    rng = random.Random(seed)
    made: list[Node] = []
    for i in range(nodes):
        places = [(j, o) for j in range(i) for o in range(len(made[j].outputs) or 1)]
        near = [place for place in places if place[0] >= i - 4]
        parents = rng.sample(near, min(len(near), rng.choice([1, 1, 1, 2, 3])))
        kind = rng.choice(['layer', 'layer', 'view', 'split', 'dropout', 'pool'])
        if kind == 'view' and not parents:
            kind = 'layer'
        size = rng.randint(1, 20) * MIB
        counts = {'view': 0, 'split': rng.randint(2, 3)}
        held = rng.choice([-2] * 8 + [-1, rng.randint(i, 2 * nodes - 1)])
        made.append(
            Node(
                parents=tuple(parents),
                outputs=tuple(
                    max(1, size // (o + 1)) for o in range(counts.get(kind, 1))
                ),
                mask=size // 4 if kind == 'dropout' else 0,
                saved=size // 2 if kind == 'pool' else 0,
                reads_inputs=rng.random() < (0.7 if kind == 'layer' else 0.2),
                reads_outputs=rng.random() < 0.4,
                seconds=rng.choice([0.1, 0.5, 1.0, 3.0]),
                workspace=rng.choice([0, MIB, 9 * MIB]),
                exact=rng.random() < 0.9,
                held=held,
            )
        )
    return network(
        made,
        bandwidth=rng.choice([3.0, 10.0, 40.0]) * MIB,
        latency=rng.choice([0.0, 0.05]),
        graph_dies_early=rng.random() < 0.5,
    )


def with_persistent(
    profile: Profile, seed: int = 0, share: float = 0.6, nbytes: int = 12 * MIB
) -> Profile:
    """The profile with parameters and their optimizer states.

    A parameter is read by one forward operation or two, by their replays and backward
    operations, and by the update; a state by the update only.
    """
    rng = random.Random(seed)
    n, b0 = len(profile.operations), profile.first_backward
    storages = list(profile.storages)
    inputs: dict[int, list[int]] = {r.operation: [] for r in profile.recipes}

    def add(category: Category, size: int, readers: set[int]) -> None:
        uses = [op.index for op in profile.operations if op.forward in readers]
        for reader in readers & inputs.keys():
            inputs[reader].append(len(storages))
        storages.append(
            Storage(
                id=len(storages),
                nbytes=size,
                category=category,
                label=f'/{len(storages)}/W',
                producer=-1,
                allocated_at=-1,
                freed_at=-1,
                forward_uses=tuple(sorted(readers)),
                backward_uses=(*uses, n - 1),
                releasable_from=max([-1, *readers]) + 1,
            )
        )

    for op in range(b0):
        if rng.random() < share:
            size = rng.randint(1, nbytes)
            add(Category.PARAMETER, size, {op, rng.choice([op, rng.randrange(b0)])})
            add(Category.OPTIMIZER_STATE, size, set())
    added = sum(s.nbytes for s in storages[len(profile.storages) :])
    return dataclasses.replace(
        profile,
        storages=tuple(storages),
        initial_bytes=profile.initial_bytes + added,
        recipes=tuple(
            dataclasses.replace(
                recipe, inputs=(*recipe.inputs, *inputs[recipe.operation])
            )
            for recipe in profile.recipes
        ),
    )
