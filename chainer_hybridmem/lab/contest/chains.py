"""Chains of equal steps, drawn from a seed, whose optimum is a closed formula.

Forward makes maps 1 to l one from the other, all of one size and one time; backward
needs them from the last one to the first. With memory for c maps beside what a step
reads and makes, input included, the fewest advances are ``r l - C(c + r, c + 1)``, r
the least with ``C(c + r, c) >= l`` (Griewank and Walther, "Algorithm 799: revolve",
ACM Transactions on Mathematical Software 26, 2000). Making the last map is one more.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from chainer_hybridmem.lab.importing.graphs import Buffer, GraphNode, build_profile
from chainer_hybridmem.planning.records.profile import Link, Profile

LEAST_STEPS, MOST_STEPS = 20, 200
MAP_BYTES = 2**20
STEP_SECONDS = 1e-3
SLOW_LINK = Link(0.0, 1.0, 1.0)  # over which no map moves within an iteration


class Chain(NamedTuple):
    """Steps of forward, and maps that memory holds beside those of a step.

    Attributes:
        steps (int): Operations of forward, and of backward.
        slots (int): c, the input's included.
    """

    steps: int
    slots: int


def draw_chain(seed: int) -> Chain:
    """The chain of a seed: any length, and most often few slots."""
    rng = random.Random(f'chain {seed}')
    steps = rng.randint(LEAST_STEPS, MOST_STEPS)
    return Chain(steps, min(steps, round(steps ** rng.random())))


def count_advances(steps: int, slots: int) -> int:
    """The fewest advances that reverse so many steps."""
    repeats = 0
    while math.comb(slots + repeats, slots) < steps:
        repeats += 1
    return repeats * steps - math.comb(slots + repeats, slots + 1)


def fastest_seconds(chain: Chain) -> float:
    """Of an iteration of the chain: no schedule is faster, and one is as fast."""
    runs = count_advances(chain.steps, chain.slots) + 1
    return (runs + chain.steps) * STEP_SECONDS


def limit_of(chain: Chain) -> int:
    """Bytes for the slots, the map that a step reads, and two gradients."""
    return (chain.slots + 3) * MAP_BYTES


def make_profile(chain: Chain) -> Profile:
    """The chain's iteration, over a link that is too slow for copies."""
    n = chain.steps
    nodes = [GraphNode(f'/{i}', False, STEP_SECONDS, (i,), (i + 1,)) for i in range(n)]
    for i in range(n):
        reads = (n - i, n + i) if i else (n,)
        forward = n - 1 - i
        nodes.append(
            GraphNode(f'/{i}', True, STEP_SECONDS, reads, (n + i + 1,), forward)
        )
    buffers = [Buffer(MAP_BYTES) for _ in range(2 * n + 1)]
    return build_profile(nodes, buffers, SLOW_LINK, {'kind': 'chain'})
