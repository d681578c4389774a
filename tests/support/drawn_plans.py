"""Problems with a link and a host, and plans of drawn actions for them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np

from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    LATE,
    PASSED,
    RECOMPUTE,
    SWAP,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.search.relaxed import relaxed
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.planning.simulation.problem import find_sources, with_sources

from . import toys

RANDOM = 'random'  # the planner below
ONCE = 0.3  # share of what is late that is so once


def random_plan(
    problem: Problem,
    limit_bytes: int,
    seed_of_plan: int = 0,
    weights: Sequence[float] = (1, 1, 1),
    early: bool = True,
    barrier: bool = True,
    relax: bool = False,
    late: float = 0.0,
    sources: float = 0.0,
) -> Plan:
    """A planner: any assignment that the simulator allows, made to fit.

    Args:
        problem: What to plan.
        limit_bytes: Memory limit.
        seed_of_plan: Of what is drawn.
        weights: Of keep, swap and recompute.
        early: Whether swap-ins begin as early as memory allows, or at drawn positions.
        barrier: Whether backward starts when every swap-out has finished.
        relax: Whether maps are away for as long as they can be.
        late: Share of the recomputed maps that no replay for others keeps, or not the
            first one or two.
        sources: Share of what backward never reads that stays for replays.
    """
    n = len(problem.arrays.seconds)
    rng = np.random.default_rng(seed_of_plan)
    lead = None if early else np.arange(n) - rng.integers(0, 4, n)
    weights = np.divide(weights, sum(weights))
    action = rng.choice(3, size=len(problem.maps), p=weights)
    action[(action == RECOMPUTE) & ~problem.recomputable] = SWAP
    if late:
        lateness = np.where(action == RECOMPUTE, rng.random(len(action)) / late, 1)
        action[lateness < 1] = LATE
        action[lateness < ONCE] = PASSED
        action[lateness < ONCE / 2] = PASSED + 1
    wider, least = problem, np.full(len(action), SWAP)
    if sources:
        wider = with_sources(problem, find_sources(problem))
        drawn = rng.random(len(wider.sources)) < sources
        action = np.append(action, np.where(drawn, KEEP, RECOMPUTE))
        least = np.append(least, np.full(len(wider.sources), RECOMPUTE))
    search = Search(wider, limit_bytes, lead=lead, barrier=barrier)
    candidate = search.evaluate(action)
    while not candidate.fits and (action != least).any():
        m = rng.choice(np.flatnonzero(action != least))
        action[m] = least[m]
        candidate = search.evaluate(action)
    plan = search.finish(RANDOM, candidate)
    return relaxed(problem, plan, margin=0) if relax else plan


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
