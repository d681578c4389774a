"""How long the default planner takes and how close it comes, up to 1,000 layers.

    python -m benchmarks run scale [--samples FOLDER] [--arch NAME ...] [--name NAME]

The networks of ``benchmarks/paper`` and a ResNet of a thousand layers (``deep.py``)
on a modelled V100 with 16e9 bytes. Default options, after a short run that loads
what is compiled. Writes JSON to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from benchmarks import common
from benchmarks.paper import ito
from chainer_hybridmem.commands import figures
from chainer_hybridmem.forecasting.estimation import Estimator, load_device_model
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.simulation import Problem, make_problem

Row = dict[str, Any]

DEEP = 'benchmarks.deep:ResNet1001'
BATCHES = {
    'alexnet': 1792,
    'googlenet': 1024,
    'resnet50': 640,
    'resnet152': 256,
    DEEP: 256,
}
CLASSES = {DEEP: 10}  # instead of 1,000
COLUMNS = {
    'network': str,
    'operations': str,
    'maps': str,
    'planning_seconds': '{:.2f}'.format,
    'planning_cpu_seconds': '{:.2f}'.format,
    'bound_seconds': '{:.2f}'.format,
    'gap': '{:.2%}'.format,
    'simulations': str,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--samples', metavar='FOLDER', help='keeps the recordings')
    parser.add_argument('--arch', nargs='+', choices=list(BATCHES), metavar='NAME')
    parser.add_argument('--name', default='planning_scale', help='of the result file')


def main(options: argparse.Namespace) -> int:
    model = load_device_model(ito.GPU)
    reference = Estimator.make(
        common.recordings(ito.CALIBRATED_ON, options.samples), model
    )
    reference = reference.calibrated(ito.IN_CORE_SPEED, ito.CALIBRATION_BATCH)
    rows: list[Row] = []
    for arch in options.arch or BATCHES:
        pair = common.recordings(arch, options.samples, CLASSES.get(arch, 1000))
        estimator = Estimator.make(pair, model).with_factor_of(reference)
        problem = make_problem(estimator.profile(BATCHES[arch]))
        rows.append(measure(arch, problem, model.memory_bytes))
        print(common.table(rows[-1:], COLUMNS), flush=True)
    body = {'gpu': ito.GPU, 'memory_limit_bytes': model.memory_bytes, 'rows': rows}
    common.save(options.name, body)
    print(common.table(rows, COLUMNS))
    return 0


def measure(arch: str, problem: Problem, limit: int) -> Row:
    """One network's figures."""
    figures.load_kernels(problem)
    make_plan(problem, limit, 'hybrid', steps=1)  # loads what is compiled
    problem.bounds.clear()
    start = time.perf_counter()
    lower_bound(problem, limit)
    bound_seconds = time.perf_counter() - start
    problem.bounds.clear()
    start, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(problem, limit)
    return {
        'network': f'{arch} b{BATCHES[arch]}',
        'operations': len(problem.arrays.seconds),
        'maps': len(problem.maps),
        'in_core_peak_bytes': problem.in_core_peak_bytes,
        'in_core_seconds': problem.in_core_seconds,
        'planning_seconds': plan.planning_seconds,
        'make_plan_seconds': time.perf_counter() - start,
        'planning_cpu_seconds': time.process_time() - cpu,
        'bound_seconds': bound_seconds,
        'lower_bound_seconds': plan.lower_bound_seconds,
        'predicted_seconds': plan.predicted_seconds,
        'gap': plan.gap,
        'simulations': plan.simulations,
        'load_average': os.getloadavg()[0],
        'found_by': plan.options.get('found_by', 'hybrid'),
    }
