"""Programs that users write: what a session costs each of them.

Trains the models of Chainer's examples, and some of chainercv, on small synthetic data:
plain and under `optimize()` at three limits. These are 200 % of plain Chainer's peak,
where nothing has to leave, and 75 % and 60 % of what can move between the smallest
limit that trains the largest iteration and that peak. Everything runs in turns in one
process per program. CPU seconds of each iteration are divided by those of the same
iteration of plain Chainer; told are the medians of the first and of the last eight
iterations. A program that fails is a row with its error.

    python -m benchmarks run programs.run SOURCE [names...] [--label before]
        [--limits benchmarks/results/programs_before.json]

SOURCE is a source tree of Chainer with its examples; chainercv is installed or lies
beside it. `--limits` takes the limits of an
earlier result instead of finding them, so that versions are compared at the same ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import common, saving
from benchmarks.programs import programs
from benchmarks.saving import Rows

MOST_SECONDS = 1800  # for one program
SLOW_ITERATIONS = 12  # of programs whose iterations take seconds


def work(
    options: argparse.Namespace, name: str, limits: dict[str, int] | None
) -> dict[str, Any]:
    """What worker.py finds, in a process of its own.

    Raises:
        subprocess.SubprocessError: If it ends without a result.
    """
    slow = name in programs.SLOW
    count = SLOW_ITERATIONS if slow else options.iterations
    path = [common.ROOT, *sys.path[1:]]
    environment = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join(p for p in path if p),
        'PYTHONHASHSEED': '0',
    }
    with tempfile.TemporaryDirectory() as scratch:
        output = os.path.join(scratch, 'rows.json')
        subprocess.run(
            [*launcher(name), sys.executable, '-m', 'benchmarks.programs.worker',
             options.source, name, str(count), str(options.rounds), json.dumps(limits),
             output],
            env=environment, check=True, timeout=MOST_SECONDS, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        with open(output, encoding='utf-8') as file:
            found: dict[str, Any] = json.load(file)
    return found


def launcher(name: str) -> list[str]:
    """What starts the processes of a program that needs several.

    Raises:
        subprocess.SubprocessError: If there is no MPI.
    """
    count = programs.PROCESSES.get(name, 1)
    if count == 1:
        return []
    own = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    mpiexec = own if os.access(own, os.X_OK) else shutil.which('mpiexec')
    if mpiexec is None:
        raise subprocess.SubprocessError('needs an MPI: pip install mpi4py mpich')
    return [mpiexec, '-n', str(count)]


def earlier_limits(path: str | None) -> dict[str, dict[str, int]]:
    """Limits of an earlier result by program; none without a path."""
    if path is None:
        return {}
    with open(path, encoding='utf-8') as file:
        limits: dict[str, dict[str, int]] = json.load(file)['limits']
    return limits


def failure(error: subprocess.SubprocessError) -> str:
    """The last line that a worker has written, or that it took too long."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f'took more than {MOST_SECONDS} s'
    lines = str(getattr(error, 'stderr', '') or error).strip().splitlines()
    return lines[-1] if lines else str(error)


def _optional(form: str) -> Any:
    return lambda value: '' if value is None else form.format(value)


COLUMNS: dict[str, Any] = {
    'program': str,
    'limit': str,
    'equal': lambda value: {True: 'yes', False: 'no', None: ''}[value],
    'guided': _optional('{:.0%}'),
    'cpu_first': _optional('{:.2f}'),
    'cpu_last': _optional('{:.2f}'),
    'cpu_all': _optional('{:.2f}'),
    'wall_last': _optional('{:.2f}'),
    'peak_bytes': _optional('{:,}'),
    'limit_bytes': _optional('{:,}'),
    'plain_cpu_seconds': _optional('{:.4f}'),
    'error': lambda value: value or '',
}


def write_table(name: str, rows: list[dict[str, Any]]) -> None:
    """Writes the rows as a Markdown table beside the result."""
    text = (
        f"# Programs of Chainer's examples\n\nCPU and wall "
        f'seconds per iteration over those of plain Chainer (medians of the first and '
        f'of the last eight iterations, and the sum of all). `guided`: iterations '
        f'that followed a plan, per step; dcgan has two backward passes in each.\n\n'
        f'{common.table(rows, COLUMNS)}\n'
    )
    saving.save_text(name, text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('source')
    parser.add_argument('names', nargs='*', metavar='name', help='of programs')
    parser.add_argument('--iterations', type=int, default=32)
    parser.add_argument('--rounds', type=int, default=1)
    parser.add_argument('--label', default='', help='end of the name of the result')
    parser.add_argument('--limits', help='an earlier result')


def main(options: argparse.Namespace) -> int:
    options.source = os.path.abspath(options.source)
    unknown = [name for name in options.names if name not in programs.PROGRAMS]
    if unknown:
        known = ', '.join(programs.PROGRAMS)
        raise SystemExit(f'no program {unknown[0]!r}; known are {known}')
    if options.iterations < 16:
        raise SystemExit(
            f'--iterations is {options.iterations}; at least 16 are needed'
        )
    limits = earlier_limits(options.limits)
    name = 'programs' + (f'_{options.label}' if options.label else '')
    used: dict[str, Any] = {}
    rows = Rows(name, iterations=options.iterations, limits=used)
    for program in options.names or programs.PROGRAMS:
        try:
            found = work(options, program, limits.get(program))
        except subprocess.SubprocessError as error:
            empty = dict.fromkeys(COLUMNS)
            rows.add({**empty, 'program': program, 'error': failure(error)})
            continue
        used[program] = found['limits']
        for row in found['rows']:
            rows.add(row)
        print(common.table(found['rows'], COLUMNS), flush=True)
        write_table(name, rows.rows)
    write_table(name, rows.rows)
    return 0
