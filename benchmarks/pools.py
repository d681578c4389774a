"""Pools and offline layouts: SmartPool's Table I, MXNet's example, planned iterations.

    python -m benchmarks run pools [--samples FOLDER] [--only PART ...]

Table I: VGG and ResNets on CIFAR-10 shapes (``cifar.py``), batch 100, recorded
with 2 and 4 pictures on the CPU and extrapolated to a GTX 1080 Ti with cuDNN
(docs/guide/estimate.md), in-core. Planned: networks far beyond 16 GB under some
planners, as planned and relaxed. Fitted: what it costs that the layout fits, not
only the load. Sizes of the offline layouts are rounded to 512 bytes, as CuPy's and
CnMem's are. Writes ``benchmarks/results/pools.json`` and ``pools.md``.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common, saving
from chainer_hybridmem import make_plan
from chainer_hybridmem.forecasting.estimation import Estimator, load_device_model
from chainer_hybridmem.lab.pools.replay import compare, replay
from chainer_hybridmem.planning.layouts import (
    Trace,
    check_layout,
    exact,
    from_log,
    in_core_trace,
    planned_trace,
)
from chainer_hybridmem.planning.layouts.fitting import fit
from chainer_hybridmem.planning.layouts.layout import Layout
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.search.relaxed import relaxed
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate

Row = dict[str, Any]

TABLE_1 = (
    *('VGG11', 'VGG13', 'VGG16', 'VGG19'),
    *('ResNet18', 'ResNet34', 'ResNet50', 'ResNet101'),
)
CIFAR_CLASSES, CIFAR_BATCH = 10, 100
CIFAR_GPU, GPU = 'gtx1080ti', 'v100-16gb-pcie3'
PLANNED = {'resnet50': 640, 'googlenet': 1024, 'alexnet': 1024, 'resnet152': 256}
PLANNERS = ('swap-all', 'swap-opt', 'superneurons', 'hybrid')
REPEATS = 3  # of measured times; the median counts
ROUNDS = 8  # of fitting
ALIGNMENT = 512
PUBLISHED = {'smartpool': '<= 1.016', 'cnmem': 'up to 1.133 times SmartPool'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--samples', metavar='FOLDER', help='keeps the recordings')
    parser.add_argument(
        '--only', nargs='+', choices=('table1', 'mxnet', 'planned'), metavar='PART'
    )


def main(options: argparse.Namespace) -> int:
    """Runs the parts, writes the results, prints the tables."""
    parts = options.only or ['table1', 'mxnet', 'planned']
    body: Row = {'alignment': ALIGNMENT, 'published': PUBLISHED}
    if 'table1' in parts:
        body['table1'] = [table_1(arch, options.samples) for arch in TABLE_1]
    if 'mxnet' in parts:
        body['mxnet'] = mxnet()
    if 'planned' in parts:
        body['planned'], body['fitted'] = [], []
        for arch in PLANNED:
            rows, fitted = planned(arch, options.samples)
            body['planned'] += rows
            body['fitted'] += fitted
    common.save('pools', body)
    text = markdown(body)
    saving.save_text('pools', text)
    print(text)
    return 0


def figures(trace: Trace) -> Row:
    """All pools on one iteration."""
    replays = {r.pool: r for r in compare(trace, ALIGNMENT)}
    took, layout = seconds_of(trace)
    row: Row = {
        'buffers': len(trace.sizes),
        'peak_load_bytes': trace.peak_load_bytes,
        'optimal': layout.optimal,
        'bound_ratio': layout.footprint_bytes / layout.bound_bytes,
        'found_by': layout.found_by,
        'seconds': took,
    }
    for name, result in replays.items():
        row[name] = result.competitive_ratio
        row[f'{name} calls'] = result.warm_device_calls
    row['cnmem over smartpool'] = row['cnmem'] / row['smartpool']
    return row


def seconds_of(trace: Trace) -> tuple[float, Any]:
    """Seconds of the exact layout, once compiled, and the layout, checked."""
    took = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        layout = exact(trace, ALIGNMENT)
        took.append(time.perf_counter() - start)
    check_layout(trace, layout)
    return statistics.median(took), layout


def table_1(arch: str, folder: str | None) -> Row:
    """One network of Table I."""
    pair = common.recordings(f'benchmarks.cifar:{arch}', folder, CIFAR_CLASSES)
    estimator = Estimator.make(pair, load_device_model(CIFAR_GPU))
    trace = in_core_trace(estimator.profile(CIFAR_BATCH))
    row = {'network': arch, **figures(trace)}
    print(row, file=sys.stderr, flush=True)
    return row


def planned(arch: str, folder: str | None) -> tuple[list[Row], list[Row]]:
    """One network in-core and under several planners; and plans whose layout fits."""
    model = load_device_model(GPU)
    estimator = Estimator.make(common.recordings(arch, folder, 1000), model)
    profile = estimator.profile(PLANNED[arch])
    problem = make_problem(profile)
    network = f'{arch} b{PLANNED[arch]}'
    base = {'network': network, 'planner': 'in-core', 'relaxing_seconds': 0.0}
    rows = [{**base, 'mean_load': 1.0, **figures(in_core_trace(profile))}]
    fitted = []
    for planner in PLANNERS:
        plan = make_plan(problem, model.memory_bytes, planner)
        took = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            later = relaxed(problem, plan)
            took.append(time.perf_counter() - start)
        before, after = (
            statistics.fmean(simulate(problem, p).load_bytes) for p in (plan, later)
        )
        for name, version, seconds, load in (
            (planner, plan, 0.0, 1.0),
            (f'{planner}, relaxed', later, statistics.median(took), after / before),
        ):
            row = {'network': network, 'planner': name, 'mean_load': load}
            row['relaxing_seconds'] = seconds
            rows.append({**row, **figures(planned_trace(profile, version))})
            print(rows[-1], file=sys.stderr, flush=True)
        for name, move in ((planner, as_planned), (f'{planner}, relaxed', relaxed)):
            found = fit(
                functools.partial(placed_within, problem, planner, move),
                model.memory_bytes,
                ROUNDS,
            )
            row = {'network': network, 'planner': name, 'load_fits': plan.overhead}
            row['layout_fits'] = found.plan.overhead if found.fits else None
            row['footprint_bytes'] = found.placed.footprint_bytes
            row['planned_bytes'] = found.planned_bytes
            row['rounds'] = found.rounds
            fitted.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows, fitted


def placed_within(
    problem: Problem,
    planner: str,
    move: Callable[[Problem, Plan], Plan],
    limit_bytes: int,
) -> tuple[Plan, Layout]:
    """A plan for a limit, with its positions moved, and its layout."""
    plan = move(problem, make_plan(problem, limit_bytes, planner))
    return plan, exact(planned_trace(problem.profile, plan), ALIGNMENT)


def as_planned(problem: Problem, plan: Plan) -> Plan:
    """A plan as its planner has made it."""
    return plan


def mxnet() -> list[Row]:
    """A hundred arrays of slightly different size, the old one freed after the new."""
    log: list[tuple[int, int]] = []
    for i in range(100):
        log.append((i, 4 * (10000 + i) ** 2))
        if i:
            log.append((i - 1, -1))
    trace = from_log([*log, (99, -1)])
    rows = []
    for pool, published in (('round', 39), ('naive', 36)):
        result = replay(trace, pool, 1)
        rows.append(
            {
                'pool': pool,
                'asked_bytes': sum(trace.sizes),
                'pool_bytes': result.pool_bytes,
                'device_bytes': result.device_bytes,
                'device_calls': result.device_calls,
                'published_pool_gb': published,
            }
        )
    return rows


# -- text --------------------------------------------------------------------------

RATIO = '{:.4f}'.format
POOL_COLUMNS = {
    'buffers': str,
    'peak_load_bytes': lambda n: f'{n / 1e6:.1f} MB',
    'cnmem': RATIO,
    'cupy': RATIO,
    'naive': RATIO,
    'round': RATIO,
    'smartpool-first-fit': RATIO,
    'smartpool': RATIO,
    'exact': '{:.6f}'.format,
    'optimal': lambda yes: 'proven' if yes else 'no',
    'seconds': '{:.3f}'.format,
}


def markdown(body: Row) -> str:
    """All tables."""
    parts = ['# Pools and layouts: footprint over peak load\n']
    if 'table1' in body:
        columns = {'network': str, **POOL_COLUMNS, 'cnmem over smartpool': RATIO}
        parts.append(
            f'## CIFAR-10 shapes, batch {CIFAR_BATCH}, {CIFAR_GPU}, in-core\n\n'
            f'Zhang et al., Table I: SmartPool {PUBLISHED["smartpool"]}, CnMem '
            f'{PUBLISHED["cnmem"]}.\n\n{common.table(body["table1"], columns)}\n'
        )
    if 'mxnet' in body:
        columns = {
            'pool': str,
            'asked_bytes': lambda n: f'{n / 1e9:.1f} GB',
            'pool_bytes': lambda n: f'{n / 1e9:.1f} GB',
            'device_bytes': lambda n: f'{n / 1e9:.1f} GB',
            'device_calls': str,
            'published_pool_gb': lambda n: f'{n} GB',
        }
        parts.append(
            f'## MXNet: 100 arrays of slightly different size\n\n'
            f'{common.table(body["mxnet"], columns)}\n'
        )
    if 'planned' in body:
        columns = {
            'network': str,
            'planner': str,
            'mean_load': '{:.2f}'.format,
            'relaxing_seconds': '{:.3f}'.format,
            **POOL_COLUMNS,
        }
        parts.append(
            f'## Under a plan for 16 GB, {GPU}\n\n'
            f'Seconds: the median of {REPEATS} layouts. Mean load: over that of the '
            f'plan as planned.\n\n{common.table(body["planned"], columns)}\n'
        )
    if 'fitted' in body:
        columns = {
            'network': str,
            'planner': str,
            'load_fits': '{:.2%}'.format,
            'layout_fits': lambda share: '-' if share is None else f'{share:.2%}',
            'footprint_bytes': lambda n: f'{n / 1e6:.1f} MB',
            'planned_bytes': lambda n: f'{n / 1e6:.1f} MB',
            'rounds': str,
        }
        parts.append(
            f'## Plans whose layout fits 16 GB, {GPU}\n\n'
            f'Time over in-core, where the load fits and where the layout fits.\n\n'
            f'{common.table(body["fitted"], columns)}\n'
        )
    return '\n'.join(parts)
