"""What ``hybridmem run`` predicts of a program, beside CPU seconds over plain Chainer.

Each program runs in turns: with the repair alone, then with each limit. CPU seconds of
an iteration are the median of the updates in the last quarter of a run; ratios are
those of one round, and a row has their median over rounds. ``said`` is what the last
line of the command has as measured, ``predicted`` what it has as predicted.

    python -m benchmarks run predicted.run [NAME=COMMAND ...] [--limits 60% 80% auto]

COMMAND is a script and its arguments, for programs beside those of this folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import common
from benchmarks.saving import Rows

FOLDER = pathlib.Path(__file__).parent
OWN = {
    'small functions': f'{FOLDER / "small_functions.py"} 80',
    'convolutions': f'{FOLDER / "convolutions.py"} 40',
}
LIMITS = ('60%', '80%', 'auto')
MOST_SECONDS = 1800
SAID = re.compile(r'([\d.]+)(?: to ([\d.]+))? times that of plain Chainer')
PREDICTED = re.compile(r'\(([\d.]+)(?: to ([\d.]+))? predicted\)')


def start(
    command: str,
    options: list[str],
    output: str,
    turns: tuple[int, ...] = (),
    root: str = common.ROOT,
) -> subprocess.Popen[bytes]:
    """Starts a program in a process of its own; :func:`read_seen` tells the rest.

    Args:
        command: A script and its arguments.
        options: Of ``hybridmem run``.
        output: A file for what is seen; what is told is beside it.
        turns: Two pipes, see :mod:`..packages.worker`; none without turns.
        root: The clone whose package runs it.
    """
    script, *arguments = command.split()
    script = os.path.abspath(script)
    path = [root, *os.environ.get('PYTHONPATH', '').split(os.pathsep)]
    with open(f'{output}.txt', 'wb') as told:
        return subprocess.Popen(
            [sys.executable, '-m', 'benchmarks.packages.worker', output, *options,
             script, *arguments],
            env={
                **os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, path)),
                'PYTHONHASHSEED': '0', 'OMP_NUM_THREADS': '1',
                'OPENBLAS_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1',
                'TURNS': ','.join(map(str, turns)),
            },
            cwd=os.path.dirname(script), pass_fds=turns,
            stdout=subprocess.DEVNULL, stderr=told,
        )  # fmt: skip


def read_seen(output: str) -> tuple[list[float], str]:
    """CPU seconds of the updates in the last quarter of a run, and what it has told.

    Raises:
        RuntimeError: If the program has failed.
    """
    lines = pathlib.Path(f'{output}.txt').read_text(encoding='utf-8').splitlines()
    seen: dict[str, Any] = {'status': 'no result'}
    if os.path.exists(output):
        with open(output, encoding='utf-8') as file:
            seen = json.load(file)
    if seen['status']:
        raise RuntimeError(lines[-1] if lines else f'it ended with {seen["status"]}')
    steps = [b - a for a, b in itertools.pairwise(seen['cpu_seconds'])]
    told = [line for line in lines if 'hybridmem:' in line]
    return steps[-max(1, len(steps) // 4) :], '\n'.join(told)


def run(command: str, options: list[str]) -> tuple[float, str]:
    """CPU seconds of an update at the end of a run, and what it has told."""
    with tempfile.TemporaryDirectory() as scratch:
        output = os.path.join(scratch, 'seen.json')
        start(command, options, output).wait(MOST_SECONDS)
        steps, told = read_seen(output)
    return statistics.median(steps), told


def read(pattern: re.Pattern[str], told: str) -> float | None:
    """A ratio that was told; the middle of a range."""
    found = pattern.search(told)
    if found is None:
        return None
    return statistics.mean(float(text) for text in found.groups() if text)


def measure(name: str, command: str, limits: list[str], rounds: int) -> list[Any]:
    """A row for each limit."""
    found: dict[str, list[dict[str, Any]]] = {limit: [] for limit in limits}
    own = ['--old-names']
    for _ in range(rounds):
        plain, _ = run(command, own)
        for limit in limits:
            seconds, told = run(command, [*own, '--memory-limit', limit])
            found[limit].append(
                {
                    'plain_cpu_seconds': plain,
                    'cpu_seconds': seconds,
                    'ratio': seconds / plain,
                    'said': read(SAID, told),
                    'predicted': read(PREDICTED, told),
                    'told': told,
                }
            )
            print(told, flush=True)
    return [summarize(name, limit, seen) for limit, seen in found.items()]


def summarize(name: str, limit: str, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of all rounds; what has not been told in each of them is None."""
    row: dict[str, Any] = {'program': name, 'limit': limit, 'rounds': len(seen)}
    for key in ('plain_cpu_seconds', 'cpu_seconds', 'ratio', 'said', 'predicted'):
        values = [one[key] for one in seen]
        row[key] = None if None in values else statistics.median(values)
    error = None
    if row['predicted'] is not None:
        error = statistics.median(one['predicted'] / one['ratio'] - 1 for one in seen)
    return {**row, 'error': error, 'told': [one['told'] for one in seen]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('programs', nargs='*', metavar='NAME=COMMAND')
    parser.add_argument('--own', nargs='*', default=list(OWN), choices=list(OWN))
    parser.add_argument('--limits', nargs='+', default=list(LIMITS))
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--result', default='predicted', help='name of the file')


def main(options: argparse.Namespace) -> int:
    programs = {name: OWN[name] for name in options.own}
    programs |= dict(one.split('=', 1) for one in options.programs)
    rows = Rows(options.result, rounds=options.rounds)
    for name, command in programs.items():
        for row in measure(name, command, options.limits, options.rounds):
            rows.add(row)
            if row['error'] is not None:
                print(common.table([row], COLUMNS), flush=True)
    return 0


def _number(value: float | None) -> str:
    return 'none' if value is None else f'{value:.2f}'


COLUMNS = {
    'program': str,
    'limit': str,
    'plain_cpu_seconds': '{:.3f}'.format,
    'cpu_seconds': '{:.3f}'.format,
    'ratio': '{:.2f}'.format,
    'said': _number,
    'predicted': _number,
    'error': lambda value: 'none' if value is None else f'{value:+.0%}',
}
