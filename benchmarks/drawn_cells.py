"""Drawn cells of the arena: promises that hold for all of them, and where they do not.

    python -m benchmarks run drawn_cells [--cases 2000] [--further] [--case N]

A case is a drawn network, a link, a limit, and whether swaps are forbidden. Its plans
are those of one planner at the limit, at a larger one, and over a faster link:

========  ============================================================================
promise   what a violation is
========  ============================================================================
limit     the checker finds a load above the limit, or another peak than predicted
trivial   a trivial answer fits and is faster, or the planner finds no plan
bound     the plan is faster than its bound
larger    the plan within the larger limit is slower
faster    the plan over the faster link is slower
reuse     something uses memory before what was there is through with it, as simulated
========  ============================================================================

Each is counted; the first hundred are listed with their figures. Cases of one result
may be of several runs, each with the commit that it has tried. Writes
``benchmarks/results/drawn_cells.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import saving
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.lab.contest.cells import TRIVIAL_PLANS
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Link, Profile
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.planning.simulation.timeline import (
    positions_from_plan,
    run_lanes,
)
from chainer_hybridmem.testing.networks import random_network

NAME = 'drawn_cells'
LISTED = 100
SAVED = 1000  # cases after which the result is written, too
LEVEL = 1e-9  # of a time; what is less slower is as fast
PROMISES = ('limit', 'trivial', 'bound', 'larger', 'faster', 'reuse')

Violation = tuple[str, dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--cases', type=int, default=2000)
    parser.add_argument('--seed', type=int, default=0, help='of the first case')
    parser.add_argument(
        '--further', action='store_true', help='go on behind the cases of the result'
    )
    parser.add_argument('--planner', default='hybrid')
    parser.add_argument('--case', type=int, help='only this one; nothing is written')


def main(options: argparse.Namespace) -> int:
    """Tries all cases; 1 if there is a violation."""
    if options.case is not None:
        listed = _rows(options.case, options.planner)
        print(*(listed or ['no violation']), sep='\n')
        return int(bool(listed))
    body = {'planner': options.planner, 'cases': 0, 'seed': options.seed, 'runs': []}
    body |= {'violations': dict.fromkeys(PROMISES, 0), 'listed': []}
    if options.further:
        body = saving.read(NAME)
    first, commit = body['seed'] + body['cases'], saving.environment()['commit']
    run = {'first': first, 'cases': 0, 'commit': commit}
    body['runs'].append(run)
    with Progress(options.cases, sys.stderr) as progress:
        for case in range(first, first + options.cases):
            progress.step(f'case {case}')
            for row in _rows(case, body['planner']):
                print(row)
                body['violations'][row['promise']] += 1
                body['listed'] = [*body['listed'], row][:LISTED]
            body['cases'] += 1
            run['cases'] += 1
            if run['cases'] % SAVED == 0:
                saving.save(NAME, body)
    saving.save(NAME, body)
    print(f'{body["cases"]} cases from {body["seed"]}: {body["violations"]}')
    return int(any(body['violations'].values()))


def _rows(case: int, planner: str) -> list[dict[str, Any]]:
    return [
        {'seed': case, 'promise': promise, **figures}
        for promise, figures in violations(case, planner)
    ]


def violations(seed: int, planner: str) -> Iterator[Violation]:
    """What a case violates, with its figures."""
    rng = random.Random(f'cell {seed}')
    profile = random_network(seed, rng.randint(2, 16))
    rules = {'*': 'no swap'} if rng.random() < 0.5 else {}
    problem = make_problem(profile, rules=rules)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    limits = sorted(rng.randint(least, max(least, most)) for _ in range(2))
    plan = _plan(problem, limits[0], planner)
    yield from _trivial(problem, limits[0], plan)
    if plan is None:
        return
    yield from _kept(problem, limits[0], plan)
    yield from _reuse(problem, plan)
    seconds = plan.predicted_seconds
    larger = _plan(problem, limits[1], planner)
    if _slower(larger, seconds):
        yield 'larger', _figures(seconds, larger, limits=limits)
    factor = rng.choice([1.01, 1.5, 4.0])
    fast = make_problem(_over(profile, factor), rules=rules)
    faster = _plan(fast, limits[0], planner)
    if _slower(faster, seconds):
        yield 'faster', _figures(seconds, faster, limit=limits[0], factor=factor)


def _plan(problem: Problem, limit: int, planner: str) -> Plan | None:
    try:
        return make_plan(problem, limit, planner)
    except HybridMemoryError:
        return None


def _over(profile: Profile, factor: float) -> Profile:
    """The iteration over a link that is faster in both directions."""
    link = profile.link
    rates = (link.d2h_bytes_per_second, link.h2d_bytes_per_second)
    other = Link(link.latency_seconds, *(factor * rate for rate in rates))
    return dataclasses.replace(profile, link=other)


def _slower(plan: Plan | None, seconds: float) -> bool:
    return plan is None or plan.predicted_seconds > seconds * (1 + LEVEL)


def _figures(seconds: float, plan: Plan | None, **more: Any) -> dict[str, Any]:
    then = None if plan is None else plan.predicted_seconds
    return {'seconds': seconds, 'then': then, **more}


def _trivial(problem: Problem, limit: int, plan: Plan | None) -> Iterator[Violation]:
    for name, make in TRIVIAL_PLANS.items():
        try:
            trivial = make(problem, limit)
            check_plan(problem.profile, trivial, limit)
        except HybridMemoryError:
            continue
        if _slower(plan, trivial.predicted_seconds):
            figures = _figures(trivial.predicted_seconds, plan, limit=limit)
            yield 'trivial', {'answer': name, **figures}


def _kept(problem: Problem, limit: int, plan: Plan) -> Iterator[Violation]:
    try:
        peak = max(check_plan(problem.profile, plan, limit))
        if peak != plan.predicted_peak_bytes:
            yield 'limit', {'peak': peak, 'predicted': plan.predicted_peak_bytes}
    except HybridMemoryError as error:
        yield 'limit', {'why': str(error), 'limit': limit}
    if plan.predicted_seconds < plan.lower_bound_seconds * (1 - LEVEL):
        bound = plan.lower_bound_seconds
        yield 'bound', {'seconds': plan.predicted_seconds, 'bound': bound}


def _reuse(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """Whatever comes to an address next, no layout makes anything wait once more.

    What leaves has been copied before anything begins that may come to its place, and
    what comes back begins after everything that may have been there.
    """
    work = positions_from_plan(problem, plan)
    run_lanes(problem, work)
    swapped = np.flatnonzero(work.swap_out >= 0)
    slack = LEVEL * max(1.0, float(work.stop[-1]))
    for m in swapped.tolist():
        gone, back = float(work.out_end[m]), float(work.in_start[m])
        later = swapped[work.swap_in[swapped] >= work.release[m]]
        begins = min(
            float(work.start[work.release[m] :].min(initial=np.inf)),
            float(work.in_start[later].min(initial=np.inf)),
        )
        if begins < gone - slack:
            yield 'reuse', {'map': m, 'copied': gone, 'begins': begins}
        before = float(work.stop[: work.swap_in[m]].max(initial=0.0))
        if back < before - slack:
            yield 'reuse', {'map': m, 'back': back, 'runs until': before}
