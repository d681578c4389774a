"""Problems with a link and a host, and plans of drawn actions for them."""

from __future__ import annotations

import dataclasses
import random

from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Search,
    least_memory,
)
from chainer_hybridmem.simulation import Problem, make_problem

from . import toys


def drawn_plan(problem: Problem, rng: random.Random) -> Plan:
    """A plan of drawn actions under a drawn limit in which they fit."""
    weights = [rng.random() for _ in range(3)]
    search = Search(problem, 0)
    action = search.fill(SWAP)
    for m, can in enumerate(problem.recomputable):
        drawn = rng.choices([KEEP, SWAP, RECOMPUTE], weights)[0]
        action[m] = drawn if can or drawn != RECOMPUTE else SWAP
    least = least_memory(problem)[0]
    most = max(least, problem.in_core_peak_bytes)
    limit, fits = rng.randint(least, most), False
    while not fits:
        search = Search(problem, limit, barrier=rng.random() < 0.5)
        candidate = search.evaluate(action)
        fits, limit = candidate.fits, max(limit, candidate.peak_bytes)
    return search.finish('drawn', candidate)


def drawn_case(
    seed: int, out: float, back: float, duplex: float
) -> tuple[Problem, Plan]:
    """A problem with a link for all, latency and a host, and a plan for it."""
    rng = random.Random(seed)
    profile = toys.random_network(seed, rng.randint(2, 14))
    profile = toys.with_shares(profile, out, back, duplex)
    link = dataclasses.replace(
        profile.link,
        latency_seconds=rng.choice([0.0, 0.01, 0.2]),
        issue_seconds=rng.choice([0.0, 0.05]),
    )
    slow = rng.choice([0.0, 0.0, 0.3])
    operations = tuple(
        dataclasses.replace(op, host_seconds=slow * rng.random())
        for op in profile.operations
    )
    profile = dataclasses.replace(profile, link=link, operations=operations)
    problem = make_problem(profile)
    return problem, drawn_plan(problem, rng)
