"""The small networks of the tests on a GPU: plain Chainer's bits in less memory?

Each network is trained twice by plain Chainer and then under ``swap-all`` and
``hybrid``; losses, parameters, gradients, optimizer states and statistics are
compared. Backward functions that add atomically (of indexing, embeddings, ROI pooling,
resizing, the sampler of spatial transformers) give other bits each time, also without
us: networks that have one are judged by a tolerance.

    python -m benchmarks run gpu.exactness_on_gpu [--networks NAME ...]
"""

from __future__ import annotations

import argparse
import time
import traceback
from typing import Any

from benchmarks import saving
from benchmarks.gpu.smoke import compare, figures_of
from tests.support import gpu_programs as programs

PLANNERS = ('swap-all', 'hybrid')


def judge(row: dict[str, Any], atomic: list[str]) -> str:
    """What a comparison comes to, in words."""
    if row['same_bits']:
        return 'same bits'
    difference = row['largest_difference']
    if atomic and difference is not None and difference <= programs.TOLERANCE:
        return 'within tolerance'
    return 'DIFFERENT'


def measure(result: saving.Rows, name: str) -> bool:
    """The rows of one network; tells whether all is as it must be."""
    program = programs.PROGRAMS[name]
    with programs.AtomicFunctions() as functions:
        expected = programs.train(program)[0]
    atomic = sorted(functions.seen)
    begin = {'network': name, 'atomic': atomic}

    def add(way: str, actual: Any, seconds: float, **rest: Any) -> bool:
        row = {**begin, 'way': way, 'seconds': seconds, **compare(expected, actual)}
        row |= {'verdict': judge(row, atomic), **rest}
        result.add(row)
        print(name, way, row['verdict'], row['largest_difference'], flush=True)
        return row['verdict'] != 'DIFFERENT'

    began = time.perf_counter()
    actual = programs.train(program)[0]
    add('plain, again', actual, time.perf_counter() - began)
    _, session, _ = programs.train(program, memory_limit='4GiB', planner='in-core')
    peak = session.statistics()['in_core_peak_bytes']
    del session  # with its model, whose recurrent states hold a graph
    limit = int(peak * program.share)
    good = True
    for planner in PLANNERS:
        began = time.perf_counter()
        actual, session, _ = programs.train(
            program, memory_limit=limit, planner=planner
        )
        figures = figures_of(session)
        del session
        inside = figures['footprint_bytes'] <= limit
        seconds = time.perf_counter() - began
        rest = {'limit_bytes': limit, 'inside': inside, **figures}
        good &= add(planner, actual, seconds, **rest) and inside
    return good


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--networks', nargs='+', default=list(programs.PROGRAMS))


def main(options: argparse.Namespace) -> int:
    failures: list[dict[str, Any]] = []
    result = saving.Rows(
        'gpu_exactness', tolerance=programs.TOLERANCE, failures=failures
    )
    good = True
    for name in options.networks:
        try:
            good &= measure(result, name)
        except Exception as error:
            good = False
            traceback.print_exc()
            failures.append({'network': name, 'why': repr(error)})
            result.tell(failures=failures)
    print('all as plain Chainer' if good else 'NOT all as plain Chainer', flush=True)
    return 0 if good else 1
