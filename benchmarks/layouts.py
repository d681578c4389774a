"""Layouts of other people's instances: MiniMalloc's eleven, and what else a folder has.

    python -m benchmarks run layouts FOLDER [--minimalloc PROGRAM]

FOLDER holds files ``NAME.CAPACITY.csv`` as github.com/google/minimalloc has them in
``benchmarks/challenging`` (Apache-2.0), or ``NAME.csv`` without a capacity, as
github.com/cappadokes/idealloc has MindSpore's in ``benchmarks/somas_tensors``. PROGRAM
is MiniMalloc's own, built there; it runs right after ours on each instance that has a
capacity. Seconds are those of the CPU, ours once compiled, the median of three. Writes
``benchmarks/results/layouts.json``.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import common
from chainer_hybridmem.lab.pools import minimalloc
from chainer_hybridmem.planning.layouts import Trace, check_layout, exact, smartpool

REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('folder', type=pathlib.Path, metavar='FOLDER')
    parser.add_argument('--minimalloc', metavar='PROGRAM')


def main(options: argparse.Namespace) -> int:
    """Lays out every instance of a folder, writes and prints the results."""
    paths = sorted(options.folder.glob('*.csv'))
    if not paths:
        print(f'There is no .csv file in {options.folder}.', file=sys.stderr)
        return 2
    lay_out(minimalloc.loads(paths[0].read_text())[0], 0)  # compiles
    rows = [instance(path, options.minimalloc) for path in paths]
    common.save('layouts', {'instances': rows})
    return 0


def instance(path: pathlib.Path, program: str | None) -> dict[str, Any]:
    """Bytes and seconds of one instance, ours and MiniMalloc's."""
    trace, _ = minimalloc.loads(path.read_text())
    name, _, capacity = path.stem.partition('.')
    enough_bytes = int(capacity) if capacity.isdigit() else 0
    if not enough_bytes:
        name = path.stem
    runs = [lay_out(trace, enough_bytes) for _ in range(REPEATS)]
    layout = runs[0][1]
    theirs = []
    if program and enough_bytes:
        theirs = [
            run_minimalloc(program, path, enough_bytes, trace) for _ in range(REPEATS)
        ]
    row = {
        'instance': name,
        'buffers': len(trace.sizes),
        'capacity_bytes': enough_bytes or None,
        'bound_bytes': layout.bound_bytes,
        'smartpool_bytes': smartpool(trace).footprint_bytes,
        'footprint_bytes': layout.footprint_bytes,
        'optimal': layout.optimal,
        'found_by': layout.found_by,
        'cpu_seconds': statistics.median(seconds for seconds, _ in runs),
        'minimalloc_cpu_seconds': statistics.median(theirs) if theirs else None,
        'load_average': os.getloadavg()[0],
    }
    print(row, file=sys.stderr, flush=True)
    return row


def lay_out(trace: Trace, enough_bytes: int) -> tuple[float, Any]:
    """CPU seconds of our layout, and the layout, checked."""
    start = time.process_time()
    layout = exact(trace, enough_bytes=enough_bytes)
    took = time.process_time() - start
    check_layout(trace, layout)
    return took, layout


def run_minimalloc(
    program: str, path: pathlib.Path, capacity: int, trace: Trace
) -> float:
    """CPU seconds of MiniMalloc's own program, whose layout is checked, too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / 'layout.csv'
        command = [program, f'--capacity={capacity}', f'--input={path}']
        subprocess.run([*command, f'--output={output}'], check=True)
        _, offsets = minimalloc.loads(output.read_text())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    ends = [o + s for o, s in zip(offsets or (), trace.sizes, strict=True)]
    if max(ends) > capacity:
        raise ValueError(f'{path}: MiniMalloc needs {max(ends)} of {capacity} bytes.')
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
