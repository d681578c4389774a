"""No schedule of Checkmate's form is faster: small graphs, every schedule there is."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import NamedTuple

import pytest
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
from chainer_hybridmem.planning.search.bound import bound_of_schedules
from chainer_hybridmem.planning.simulation import make_problem

FORWARD = 4  # operations; backward has as many


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


def random_nodes(seed: int) -> list[Node]:
    """A chain with skips in forward; backward reads maps, and gradients for long."""
    rng, nodes = random.Random(seed), []
    for k in range(2 * FORWARD):
        reads = {k - 1} if k else set()
        if k >= FORWARD:
            reads.add(2 * FORWARD - 1 - k)
        reads |= {v for v in range(k - 1) if rng.random() < 0.15}
        seconds = rng.choice([1.0, 1.0, 3.0, 0.2])
        nodes.append(Node(seconds, rng.randint(1, 6) * MIB, tuple(sorted(reads))))
    return nodes


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


@pytest.mark.parametrize('first', range(0, 24, 4))
def test_no_schedule_is_faster(first: int) -> None:
    """And most of the fastest ones are proven to be that."""
    proven = short = 0
    for seed in range(first, first + 4):
        nodes = random_nodes(seed)
        problem = make_problem(profile_of(nodes))
        for limit in range(least(nodes), problem.in_core_peak_bytes, 2 * MIB):
            best = fastest(nodes, limit)
            seconds = bound_of_schedules(problem, limit)
            whole = bound_of_schedules(problem, limit, min(best * 1.2, 99.0), 5.0)
            assert seconds <= best * (1 + 1e-9)
            assert seconds * (1 - 1e-6) <= whole <= best * (1 + 1e-9)
            if problem.compute_seconds * (1 + 1e-9) < best < math.inf:
                short += 1
                proven += whole >= best * (1 - 1e-5)
    assert 2 * proven > short > 0


def test_backward_may_run_again() -> None:
    """A gradient that waits for long leaves, and is made again."""
    small = [Node(1.0, MIB, (v - 1,) if v else ()) for v in range(4)]
    nodes = [
        *small,
        Node(0.5, 5 * MIB, (3,)),
        Node(1.0, 6 * MIB, (2, 3)),
        Node(1.0, MIB, (5,)),
        Node(1.0, MIB, (4, 6)),
    ]
    problem = make_problem(profile_of(nodes))
    best = fastest(nodes, 12 * MIB)
    assert best == problem.compute_seconds + 0.5
    seconds = bound_of_schedules(problem, 12 * MIB, 2 * best, 5.0)
    assert seconds == pytest.approx(best, rel=1e-5)
