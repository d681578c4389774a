"""Profiles of chains and of any graph in which every node makes one feature map."""

from __future__ import annotations

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
from chainer_hybridmem.testing.networks import MIB


def chain(
    layers: int = 6,
    seconds: Sequence[float] | float = 1.0,
    nbytes: Sequence[int] | int = 10 * MIB,
    bandwidth: float = 10.0 * MIB,
    workspace: int = MIB,
    function: str = 'Layer',
) -> Profile:
    """A chain of layers whose backward takes twice as long as forward."""
    parents = [[i - 1] if i else [] for i in range(layers)]
    return graph(parents, seconds, nbytes, bandwidth, workspace, function=function)


def graph(
    parents: Sequence[Sequence[int]],
    seconds: Sequence[float] | float = 1.0,
    nbytes: Sequence[int] | int = 10 * MIB,
    bandwidth: float = 10.0 * MIB,
    workspace: int = MIB,
    transient: Sequence[bool] | None = None,
    function: str = 'Layer',
) -> Profile:
    """A profile of any DAG: node i reads its parents and makes storage i.

    Backward runs in reverse order and uses a node's parents and its output,
    except for transient nodes, whose output forward drops after its last use.
    """
    n = len(parents)
    times = [seconds] * n if isinstance(seconds, int | float) else list(seconds)
    sizes = [nbytes] * n if isinstance(nbytes, int) else list(nbytes)
    dropped = list(transient) if transient is not None else [False] * n
    readers = [[c for c in range(n) if i in parents[c]] for i in range(n)]
    dropped = [d and bool(r) for d, r in zip(dropped, readers, strict=True)]
    last_read = [max([i, *readers[i]]) for i in range(n)]
    backward_of = {i: 2 * n - 1 - i for i in range(n)}
    events: list[int] = []
    operations: list[Operation] = []
    malloc_at, free_at = [-1] * (2 * n), [-1] * (2 * n)
    # Storages 0 .. n-1 are outputs, n .. 2n-1 gradients of the same size.
    for k in range(2 * n + 1):
        first = len(events)
        forward = 2 * n - 1 - k
        if k < n:
            malloc_at[k] = len(events)
            events.append(k + 1)
            for i in range(n):
                if last_read[i] == k:  # dropped or swapped: the all-swap run
                    free_at[i] = len(events)
                    events.append(-(i + 1))
        elif k < 2 * n:
            malloc_at[n + forward] = len(events)
            events.append(n + forward + 1)
            if forward + 1 < n:
                free_at[n + forward + 1] = len(events)
                events.append(-(n + forward + 2))
        else:
            free_at[n] = len(events)
            events.append(-(n + 1))
        node = k if k < n else forward
        operations.append(
            Operation(
                index=k,
                label=f'/{node}/{function}' if k < 2 * n else 'update',
                phase=(
                    Phase.FORWARD
                    if k < n
                    else Phase.BACKWARD
                    if k < 2 * n
                    else Phase.UPDATE
                ),
                device_seconds=(
                    times[k] if k < n else 2 * times[forward] if k < 2 * n else 0.1
                ),
                host_seconds=0.0,
                reads=tuple(parents[k]) if k < n else (),
                writes=(k,) if k < n else (),
                workspace_bytes=workspace,
                specs=(),
                forward=forward if n <= k < 2 * n else -1,
                first_event=first,
            )
        )
    storages = []
    for i in range(n):
        uses = {backward_of[i], *(backward_of[c] for c in readers[i])}
        storages.append(
            Storage(
                id=i,
                nbytes=sizes[i],
                category=Category.WORKSPACE if dropped[i] else Category.FEATURE_MAP,
                label=f'/{i}/{function}',
                producer=i,
                allocated_at=malloc_at[i],
                freed_at=free_at[i],
                forward_uses=tuple(readers[i]),
                backward_uses=() if dropped[i] else tuple(sorted(uses)),
                releasable_from=-1 if dropped[i] else last_read[i] + 1,
                slots=() if dropped[i] else (Slot(i, SlotKind.OUTPUT, 0),),
            )
        )
    for i in range(n):
        storages.append(
            Storage(
                id=n + i,
                nbytes=sizes[i],
                category=Category.GRADIENT,
                label=f'/{i}/gradient',
                producer=backward_of[i],
                allocated_at=malloc_at[n + i],
                freed_at=free_at[n + i],
            )
        )
    return Profile(
        operations=tuple(operations),
        storages=tuple(storages),
        events=tuple(events),
        recipes=tuple(
            Recipe(
                operation=i,
                inputs=tuple(parents[i]),
                products=(i,),
                sources=(Slot(i, SlotKind.OUTPUT, 0),),
                attributes=(),
                seconds=times[i],
                peak_bytes=sizes[i] + workspace,
                exact=True,
            )
            for i in range(n)
        ),
        initial_bytes=5 * MIB,
        graph_end_event=len(events),
        link=Link(0.0, bandwidth, bandwidth),
        device={'kind': 'toy'},
    )


def random_graph(seed: int, nodes: int = 8) -> Profile:
    """A random DAG with fan-out, skip connections and transients."""
    rng = random.Random(seed)
    parents: list[list[int]] = []
    for i in range(nodes):
        others = [j for j in range(max(0, i - 4), i - 1) if rng.random() < 0.3]
        parents.append(others + ([i - 1] if i else []))
    return graph(
        parents,
        seconds=[rng.choice([0.1, 0.5, 1.0, 3.0]) for _ in range(nodes)],
        nbytes=[rng.randint(1, 20) * MIB for _ in range(nodes)],
        bandwidth=rng.choice([3.0, 10.0, 40.0]) * MIB,
        transient=[rng.random() < 0.3 for _ in range(nodes)],
    )
