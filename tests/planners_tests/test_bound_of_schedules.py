"""No schedule of Checkmate's form is faster: small graphs, every schedule there is."""

from __future__ import annotations

import math
import random

import pytest
from support.schedules import Node, fastest, least, profile_of
from support.toys import MIB

from chainer_hybridmem.planning.search.bound import bound_of_schedules
from chainer_hybridmem.planning.simulation import make_problem

FORWARD = 4  # operations; backward has as many


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
