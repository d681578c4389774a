"""Programs after public bug reports: bits, guided share, CPU time over plain Chainer.

Each program of ``tests/support/reports.py`` trains plain and in parts of the memory
that it needs in-core. CPU seconds are those of the process, in turns with plain
Chainer's, so learning and planning count; the programs are short.

    python -m benchmarks run public_reports [--programs volumes] [--shares 0.85 0.7]
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common
from benchmarks.saving import ROOT

sys.path.insert(0, os.path.join(ROOT, 'tests'))
from support import reports
from support.scenarios import Run

CYCLES = range(2, 8)  # iterations over which a graph lives
PLANNERS = ('none named', 'hybrid', 'swap-all', 'swap-opt', 'pooch')
QUICK: dict[str, dict[str, Any]] = {
    'hybrid': {'steps': 1000},
    'swap-opt': {'node_budget': 60},
    'pooch': {'node_budget': 60},
}


def find_programs() -> dict[str, Callable[[Run], None]]:
    """All programs by name; graphs over several iterations are one for each number."""
    cycles = {
        f'cycle_of_{n}': functools.partial(reports.cycle, length=n) for n in CYCLES
    }
    return {**reports.PROGRAMS, **cycles}


def measure(program: Callable[[Run], None], run: Run) -> float:
    """CPU seconds of a run."""
    start = time.process_time()
    program(run)
    return time.process_time() - start


def try_one(
    program: Callable[[Run], None], expected: Run, share: float, planner: str
) -> dict[str, Any]:
    """One row: a run inside a share of the memory, and a plain one right before."""
    options: dict[str, Any] = {'memory_limit': int(share * expected.peak_bytes)}
    if planner != PLANNERS[0]:
        options |= {'planner': planner, **QUICK.get(planner, {})}
    plain_seconds = measure(program, Run())
    run, error = Run(options), ''
    start = time.process_time()
    try:
        program(run)
    except Exception as caught:  # the table has it
        error = type(caught).__name__
    seconds = time.process_time() - start
    figures = run.session.statistics()
    return {
        'share': share,
        'planner': planner,
        'same_bits': run.records == expected.records[: len(run.records)],
        'error': error,
        'iterations': figures['iterations'],
        'guided_iterations': figures['guided_iterations'],
        'deviations': figures['deviations'],
        'cpu_ratio': None if error else seconds / plain_seconds,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    names = list(find_programs())
    parser.add_argument('--programs', nargs='+', choices=names, default=names)
    parser.add_argument('--shares', nargs='+', type=float, default=[0.85, 0.7])
    parser.add_argument(
        '--planners', nargs='+', choices=PLANNERS, default=list(PLANNERS)
    )


def main(options: argparse.Namespace) -> int:
    rows = []
    for name in options.programs:
        program = find_programs()[name]
        expected = Run(counted=True)
        program(expected)
        for share in options.shares:
            for planner in options.planners:
                row = {'program': name, **try_one(program, expected, share, planner)}
                rows.append(row)
                ratio = row['error'] or f'{row["cpu_ratio"]:.2f}'
                bits = 'same bits' if row['same_bits'] else 'OTHER BITS'
                guided = f'{row["guided_iterations"]}/{row["iterations"]}'
                print(
                    f'{name:24} {share:.2f} {planner:11} {bits} guided {guided:>6} '
                    f'left {row["deviations"]:2} CPU {ratio}',
                    flush=True,
                )
    common.save('public_reports', {'rows': rows})
    return int(not all(row['same_bits'] for row in rows))
