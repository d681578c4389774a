"""Evaluations per second and nanoseconds per operation, by network and candidate.

    python -m benchmarks run paper.evaluations [--samples FOLDER] [--name NAME]

The networks of ``gap.py`` with its limits, and made-up residual networks of growing
size with half of the memory they need in-core. Candidates are neighbours, three maps
changed at random, of: everything swapped; a third each kept, swapped and
recomputed; everything recomputed; and, unless finding it takes long, a plan of
``hybrid``. A step of the annealing judges a move, which often needs only a part of an
evaluation.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from benchmarks import common, planning
from benchmarks.paper import gap
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.planners.hybrid import RIVAL_MAPS
from chainer_hybridmem.planning.search import local_search
from chainer_hybridmem.planning.search.annealing import (
    COLD,
    NO_GROUPS,
    WARMEST,
    actions_of,
)
from chainer_hybridmem.planning.search.candidates import KEEP, RECOMPUTE, SWAP, Search
from chainer_hybridmem.planning.search.candidates import number_kinds as kinds_of
from chainer_hybridmem.planning.simulation import Problem, make_problem

Row = dict[str, Any]

OPERATIONS = (500, 1000, 2000, 4000, 10_000)
HYBRID_STEPS, ANNEALING_STEPS = 2000, 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--samples', metavar='FOLDER', help='recordings: ARCH.json')
    parser.add_argument('--name', default='evaluations', help='of the result')


def main(options: argparse.Namespace) -> int:
    """Measures all, writes the result, prints the table."""
    rows: list[Row] = []
    for title, problem, limit in gap.problems(options.samples):
        rows += measure(title, problem, limit)
    for operations in OPERATIONS:
        problem = make_problem(planning.residual(operations // 6))
        rows += measure('residual', problem, problem.in_core_peak_bytes // 2)
    common.save(options.name, {'rows': rows})
    columns = {
        'network': str,
        'operations': str,
        'candidates': str,
        'evaluations_per_second': '{:,.0f}'.format,
        'ns_per_operation': '{:.1f}'.format,
        'fitting_share': '{:.0%}'.format,
        'annealing_us_per_step': lambda x: '' if x is None else f'{x:.1f}',
    }
    print(common.table(rows, columns))
    return 0


def measure(title: str, problem: Problem, limit: int) -> list[Row]:
    """One row per kind of candidate."""
    thirds = np.array([SWAP, RECOMPUTE, KEEP])[np.arange(len(problem.maps)) % 3]
    kinds = {'swap': thirds * 0 + SWAP, 'thirds': thirds}
    kinds['recompute'] = thirds * 0 + RECOMPUTE
    if len(problem.maps) <= RIVAL_MAPS or title != 'residual':
        plan = make_plan(problem, limit, 'hybrid', steps=HYBRID_STEPS, time_budget=1.0)
        kinds['hybrid'] = actions_of(plan)
    rows = []
    for kind, action in kinds.items():
        action[(action == RECOMPUTE) & ~problem.recomputable] = SWAP
        rate = gap.rate(problem, limit, action)
        per_second = rate['evaluations_per_second']
        n = len(problem.profile.operations)
        row = {
            'network': title,
            'operations': n,
            'candidates': kind,
            'limit_bytes': limit,
            **rate,
            'ns_per_operation': 1e9 / per_second / n,
            'annealing_us_per_step': annealing(problem, limit, action),
        }
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def annealing(problem: Problem, limit: int, action: np.ndarray) -> float | None:
    """Median microseconds of a warm annealing step from some actions.

    None where these do not fit.
    """
    search = Search(problem, limit, barrier=False)
    start = search.evaluate(action)
    if not start.fits:
        return None
    unit = problem.in_core_seconds
    steps = min(ANNEALING_STEPS, 5_000_000 // len(problem.profile.operations))
    took = []
    for seed in range(gap.REPEATS):
        began = time.process_time()
        local_search.anneal(
            problem.arrays,
            start.action.copy(),
            limit,
            search.lead,
            problem.swap_out_seconds,
            problem.swap_in_seconds,
            search.barrier,
            kinds_of(problem),
            NO_GROUPS,
            NO_GROUPS,
            steps,
            WARMEST * unit,
            COLD * unit,
            0.0,
            seed,
            False,
            search.work,
            np.zeros_like(start.action),
            np.zeros(4),
            steps,
        )
        took.append((time.process_time() - began) / steps * 1e6)
    return float(np.median(took))
