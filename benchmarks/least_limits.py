"""Least limits: how far plans of the shipped profiles are from what is proven.

    python -m benchmarks run least_limits [--time-budget 60] [--only NAME ...]

Each shipped profile is planned at the least limit under which any plan exists, by
``hybrid`` at its defaults and by ``exact``. Writes
``benchmarks/results/least_limits.json``: seconds of plans and bounds, CPU seconds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks import saving
from chainer_hybridmem import load_profile, shipped_profiles
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.planners.exact import TIME_BUDGET
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem

NAME = 'least_limits'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--time-budget', type=float, default=TIME_BUDGET)
    parser.add_argument('--only', nargs='*', default=shipped_profiles())


def main(options: argparse.Namespace) -> int:
    """Plans every profile."""
    rows: list[dict[str, Any]] = []
    for name in options.only:
        rows.append(try_profile(name, options.time_budget))
        saving.save(NAME, {'time_budget': options.time_budget, 'profiles': rows})
        print(rows[-1])
    return 0


def try_profile(name: str, time_budget: float) -> dict[str, Any]:
    """Plans and bounds of one profile at its least limit."""
    profile = load_profile(name)
    limit, _ = least_memory(make_problem(profile))
    row: dict[str, Any] = {'profile': name.partition(':')[2], 'limit_bytes': limit}
    for planner, options in (('hybrid', {}), ('exact', {'time_budget': time_budget})):
        problem = make_problem(profile)  # bounds found so far are no one's head start
        began = time.process_time()
        plan = make_plan(problem, limit, planner, **options)
        row[planner] = {
            'in_core_seconds': plan.in_core_seconds,
            'seconds': plan.predicted_seconds,
            'bound_seconds': plan.lower_bound_seconds,
            'cpu_seconds': time.process_time() - began,
        }
    return row
