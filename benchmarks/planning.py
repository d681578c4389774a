"""How long planning takes: evaluations per second and seconds per planner.

    python -m benchmarks run planning                      # made-up networks
    python -m benchmarks run planning p.json --json t.json # a recorded profile

The made-up networks are residual: blocks of a slow convolution, a fast
normalisation and a fast activation, with a skip connection around each. An
evaluation is what a planner pays for one candidate: the schedule of its swap-ins
and replays, and the times that follow from it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from benchmarks import saving
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.planning.planners import PLANNERS, make_plan
from chainer_hybridmem.planning.records.library import load_profile, write_text
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.units import format_bytes, format_seconds
from tests.support import toys

Row = dict[str, Any]


def residual(blocks: int, bandwidth: float = 4e9) -> Profile:
    """A made-up residual network of ``3 * blocks`` functions."""
    nodes: list[toys.Node] = []
    skip = ()
    for _ in range(blocks):
        last = len(nodes)
        before = ((last - 1, 0),) if last else ()
        nodes += [
            toys.Node(before, seconds=3e-3, workspace=8 * toys.MIB),
            toys.Node(((last, 0),), seconds=5e-4),
            toys.Node(
                ((last + 1, 0), *skip),
                reads_inputs=False,
                reads_outputs=True,
                seconds=3e-4,
            ),
        ]
        skip = ((last + 2, 0),)
    return toys.network(nodes, bandwidth=bandwidth, latency=2e-5)


def evaluations_per_second(problem: Problem, limit: int, kind: str) -> Row:
    """Times the evaluation of random candidates of one kind."""
    search = Search(problem, limit)
    rng = np.random.default_rng(0)
    n_maps = len(problem.maps)
    choices = {'swap': [SWAP], 'keep or swap': [KEEP, SWAP]}
    candidates = []
    for _ in range(64):
        action = rng.choice(choices.get(kind, [KEEP, SWAP, RECOMPUTE]), n_maps)
        action[(action == RECOMPUTE) & ~problem.recomputable] = SWAP
        candidates.append(action.astype(np.int64))
    for action in candidates[:2]:
        search.evaluate(action)  # compiles
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.5:
        search.evaluate(candidates[done % len(candidates)])
        done += 1
    seconds = (time.perf_counter() - start) / done
    return {'candidates': kind, 'seconds': seconds, 'per_second': 1 / seconds}


def planner_times(problem: Problem, limit: int, names: list[str]) -> list[Row]:
    """Runs each planner once."""
    rows: list[Row] = []
    for name in names:
        start = time.perf_counter()
        row: Row = {'planner': name}
        try:
            plan = make_plan(problem, limit, name)
        except HybridMemoryError as error:
            row.update(fits=False, why=str(error))
        else:
            row.update(
                fits=True,
                simulations=plan.simulations,
                overhead=plan.overhead,
                options=plan.options,
            )
        row['planning_seconds'] = time.perf_counter() - start
        rows.append(row)
    return rows


def measure(title: str, profile: Profile, share: float, names: list[str]) -> Row:
    """Everything about one profile under one limit."""
    start = time.perf_counter()
    problem = make_problem(profile)
    problem_seconds = time.perf_counter() - start
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    limit = max(least, int(least + share * (most - least)))
    kinds = ('swap', 'keep or swap', 'keep, swap or recompute')
    return {
        'profile': title,
        'operations': len(profile.operations),
        'feature_maps': len(problem.maps),
        'in_core_peak_bytes': most,
        'limit_bytes': limit,
        'make_problem_seconds': problem_seconds,
        'evaluations': [evaluations_per_second(problem, limit, kind) for kind in kinds],
        'planners': planner_times(problem, limit, names),
    }


def print_table(result: Row) -> None:
    """One profile's figures as text."""
    print(
        f'{result["profile"]}: {result["operations"]} operations, '
        f'{result["feature_maps"]} feature maps, limit '
        f'{format_bytes(result["limit_bytes"])} of '
        f'{format_bytes(result["in_core_peak_bytes"])}'
    )
    for row in result['evaluations']:
        print(
            f'  {row["candidates"]:<26}{format_seconds(row["seconds"]):>12}'
            f'{row["per_second"]:>12.0f} evaluations/s'
        )
    for row in result['planners']:
        took = format_seconds(row['planning_seconds'])
        outcome = 'does not fit'
        if row['fits']:
            outcome = f'{row["simulations"]:>8} simulations, {row["overhead"]:+.1%}'
        print(f'  {row["planner"]:<26}{took:>12}  {outcome}')
    print()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('profile', nargs='?', help='profile file (default: made up)')
    parser.add_argument('--blocks', type=int, nargs='+', default=[16, 64, 200])
    parser.add_argument(
        '--share',
        type=float,
        default=0.3,
        help='limit between the least possible (0) and in-core (1); default 0.3',
    )
    parser.add_argument('--planner', nargs='+', choices=list(PLANNERS), metavar='NAME')
    parser.add_argument('--json', metavar='FILE', help='also write the figures here')


def main(options: argparse.Namespace) -> None:
    """Runs the benchmark."""
    if options.profile:
        profiles = {options.profile: load_profile(options.profile)}
    else:
        profiles = {f'{n} residual blocks': residual(n) for n in options.blocks}
    results = []
    for title, profile in profiles.items():
        names = options.planner or list(PLANNERS)
        results.append(measure(title, profile, options.share, names))
        print_table(results[-1])
    if options.json:
        body = {'environment': saving.environment(), 'networks': results}
        write_text(options.json, json.dumps(body, indent=1))
