"""Schedules of Checkmate's form: small graphs, and the fastest schedule there is."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

from support.toys import MIB

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


class Node(NamedTuple):
    """An operation that makes one buffer."""

    seconds: float
    nbytes: int
    reads: tuple[int, ...]


def profile_of(nodes: list[Node]) -> Profile:
    """An iteration in Checkmate's form; the first half of the nodes is forward."""
    b0 = len(nodes) // 2
    uses = [
        [k for k, node in enumerate(nodes) if v in node.reads]
        for v in range(len(nodes))
    ]
    maps = [v < b0 <= max(uses[v], default=0) for v in range(len(nodes))]
    operations, events, freed = [], [], [-1] * len(nodes)
    allocated = []
    for k, node in enumerate(nodes):
        phase = Phase.FORWARD if k < b0 else Phase.BACKWARD
        operations.append(
            Operation(
                *(k, f'/{k}', phase, node.seconds, 0.0, node.reads, (k,), 0, ()),
                forward=-1 if k < b0 else 2 * b0 - 1 - k,
                first_event=len(events),
            )
        )
        allocated.append(len(events))
        events.append(k + 1)
        for v in range(k + 1):
            until = b0 if maps[v] else len(nodes)
            if max([v, *(use for use in uses[v] if use < until)]) == k:
                freed[v] = len(events)
                events.append(-(v + 1))
    update = ('update', Phase.UPDATE, 0.0, 0.0, (), (), 0, (), -1)
    operations.append(Operation(len(nodes), *update, len(events)))
    storages = []
    for v, node in enumerate(nodes):
        forward = tuple(use for use in uses[v] if use < b0)
        category = Category.GRADIENT if v >= b0 else Category.WORKSPACE
        storages.append(
            Storage(
                *(v, node.nbytes, Category.FEATURE_MAP if maps[v] else category),
                *(f'/{v}', v, allocated[v], freed[v], forward),
                backward_uses=tuple(use for use in uses[v] if use >= b0),
                releasable_from=max([v, *forward]) + 1 if maps[v] else -1,
                slots=(Slot(v, SlotKind.OUTPUT, 0),) if maps[v] else (),
            )
        )
    recipes = [
        Recipe(
            *(v, node.reads, (v,), (Slot(v, SlotKind.OUTPUT, 0),), ()),
            *(node.seconds, node.nbytes, True),
        )
        for v, node in enumerate(nodes[:b0])
    ]
    link = Link(0.0, 1.0, 1.0)
    return Profile(
        tuple(operations),
        tuple(storages),
        tuple(events),
        tuple(recipes),
        initial_bytes=MIB,
        graph_end_event=len(events),
        link=link,
        device={'kind': 'toy'},
    )


def fastest(nodes: list[Node], limit: int) -> float:
    """Seconds of the fastest schedule: the shortest way to the last operation.

    A state is the next operation to run for the first time and what is there.
    """
    order = itertools.count()
    queue = [(0.0, next(order), 0, frozenset[int]())]
    done = set()
    while queue:
        seconds, _, t, there = heapq.heappop(queue)
        if t == len(nodes):
            return seconds
        if (t, there) in done:
            continue
        done.add((t, there))
        for v in there:
            heapq.heappush(queue, (seconds, next(order), t, there - {v}))
        for v in set(range(t + 1)) - there:
            after = there | {v}
            load = MIB + sum(nodes[w].nbytes for w in after)
            if there.issuperset(nodes[v].reads) and load <= limit:
                later = seconds + nodes[v].seconds
                heapq.heappush(queue, (later, next(order), t + (v == t), after))
    return math.inf


def least(nodes: list[Node]) -> int:
    """Bytes of the largest operation with all that it reads."""
    return MIB + max(
        node.nbytes + sum(nodes[v].nbytes for v in node.reads) for node in nodes
    )
