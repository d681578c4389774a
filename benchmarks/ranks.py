"""Several GPUs on one link: plans that know it, plans that do not, and the bound.

    python -m benchmarks run ranks [--samples FOLDER]

A modelled V100 with 16 GB and PCIe 3.0 for each of 1, 2, 4 and 8 processes that share
one link. ResNet-50, GoogLeNet and AlexNet are the shipped profiles; VGG-16 is recorded.
Beside lockstep: processes that begin one half after the other, in synchronous training
(one iteration, to the last end) and with double buffering. Writes ``ranks.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import common
from chainer_hybridmem.forecasting.estimation import Estimator, load_device_model
from chainer_hybridmem.forecasting.rank_plans import plan_ranks, retime
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.sharing import share_links
from chainer_hybridmem.planning.search.bound import bound_of_ranks
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.planning.simulation.staggered import stagger, synchronous_seconds

Row = dict[str, Any]

GPU = 'v100-16gb-pcie3'
RANKS = 1, 2, 4, 8
SHIPPED = 'resnet50-b640', 'googlenet-b1024', 'alexnet-b1920'
VGG_BATCH = 320
DELAYS = 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5  # of an iteration, for one half
FEW_MAPS = 150  # for which whole decisions prove a tighter bound in a minute
EXACT_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--samples', metavar='FOLDER', help='keeps the recording')


def main(options: argparse.Namespace) -> int:
    """Plans every network for every number and saves the figures."""
    limit_bytes = load_device_model(GPU).memory_bytes
    rows: list[Row] = []
    for name, profile in _profiles(options.samples):
        for row in network(name, profile, limit_bytes):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    common.save('ranks', {'gpu': GPU, 'limit_bytes': limit_bytes, 'rows': rows})
    return 0


def _profiles(folder: str | None) -> Iterator[tuple[str, Profile]]:
    factor = 1.0
    for name in SHIPPED:
        profile = library.load_profile(f'shipped:{name}-v100-estimated')
        factor = profile.device['compute_factor']
        yield name, profile
    pair = common.recordings('vgg16', folder)
    estimator = Estimator.make(pair, load_device_model(GPU))
    estimator = dataclasses.replace(estimator, recompute='whole', factor=factor)
    yield f'vgg16-b{VGG_BATCH}', estimator.profile(VGG_BATCH)


def network(name: str, profile: Profile, limit_bytes: int) -> Iterator[Row]:
    """Figures of one network, by the number of processes."""
    problems = {n: make_problem(share_links(profile, n)) for n in RANKS}
    start = time.perf_counter()
    plans = plan_ranks(problems, limit_bytes)
    seconds = time.perf_counter() - start
    for n, problem in problems.items():
        best = plans.best[n]
        alone = retime(problem, plans.made[1])
        bound = max(best.lower_bound_seconds, _whole_bound(problem, limit_bytes, best))
        in_core = problem.in_core_seconds
        yield {
            'network': name,
            'ranks': n,
            'in_core_seconds': in_core,
            'alone_plan_seconds': alone.predicted_seconds,
            'made_seconds': plans.made[n].predicted_seconds,
            'best_seconds': best.predicted_seconds,
            'made_for_ranks': best.options.get('made_for_ranks', n),
            'relaxed_bound_seconds': best.lower_bound_seconds,
            'bound_seconds': bound,
            'any_start_bound_seconds': bound_of_ranks(problem, limit_bytes, n),
            'planning_seconds': seconds,
            'synchronous': _delayed(problem, {'alone': alone, 'best': best}, n),
            'double_buffering': _staggered(problem, plans.best, n),
        }


def _whole_bound(problem: Problem, limit_bytes: int, plan: Plan) -> float:
    """The bound by whole decisions, where it takes little time and there is a gap."""
    if len(problem.maps) > FEW_MAPS or plan.gap <= 0.01:
        return 0.0
    exact = make_plan(problem, limit_bytes, 'exact', time_budget=EXACT_SECONDS)
    return exact.lower_bound_seconds


def _delayed(problem: Problem, plans: dict[str, Plan], n: int) -> Row:
    """Synchronous training in which one half begins later, the best of some delays."""
    found: Row = {}
    for kind, plan in plans.items() if n > 1 else ():
        seconds = plan.predicted_seconds
        delays = [tuple(r % 2 * d * seconds for r in range(n)) for d in DELAYS]
        found[kind] = min(synchronous_seconds(problem, plan, d) for d in delays)
    return found


def _staggered(problem: Problem, plans: dict[int, Plan], n: int) -> Row:
    """The best of the plans for any number, one half after the other."""
    if n == 1:
        return {}
    found = {m: stagger(problem, plan, n) for m, plan in plans.items()}
    best = min(found, key=lambda m: found[m].seconds)
    return {
        'seconds': found[best].seconds,
        'planned_for_ranks': best,
        'offset_seconds': max(found[best].offsets),
    }
