"""Processes that share a link: plans that know of each other, measured on the host.

    python -m benchmarks run ranks_measured [--processes 2 4] [--rounds 3 1] [--keep]

Trains networks with ChainerMN over MPI on a throttled link that all processes share, at
1/1.33 and 1/2 of what plain Chainer needs. Networks are so deep that one layer's
workspace is small beside the feature maps, as on a GPU. The link is so fast that all
feature maps leave it within :data:`COPIES` plain iterations if one process has it for
itself: what ResNet-50 with batch 640 needs on a V100 with 12 GB/s. `alone`: every
process plans for the link as if it were its own. `together`: with ``communicator``. In
turns in the same processes, beside plain ChainerMN; told are medians of guided
iterations. Writes ``ranks_measured.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import common, saving

SHARES = (1.33, 2.0)
NETWORKS = {
    # name: side of the pictures, batch size
    'Plain': (32, 4),
    'Normalised': (32, 4),
    'Residual': (32, 8),
}
COPIES = 2.27
MOST_SECONDS = 3600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--processes', type=int, nargs='+', default=[2, 4])
    parser.add_argument('--networks', nargs='+', default=sorted(NETWORKS))
    parser.add_argument(
        '--keep',
        action='store_true',
        help='keeps the rows of an earlier run that are not measured again',
    )
    parser.add_argument(
        '--rounds',
        type=int,
        nargs='+',
        default=[3],
        help='for each number of processes; the last one counts for those that follow',
    )


def main(options: argparse.Namespace) -> int:
    """Runs every case and saves each row as it is measured."""
    rows = saving.Rows('ranks_measured')
    if options.keep:
        rows.keep_earlier()
    last = options.rounds[-1]
    cases = itertools.zip_longest(options.processes, options.rounds, fillvalue=last)
    for processes, rounds in itertools.islice(cases, len(options.processes)):
        for network in options.networks:
            for row in run(network, processes, rounds):
                rows.put(row, 'network', 'processes', 'share')
                print(describe(row), flush=True)
    return 0 if all(row['equal'] for row in rows.rows) else 1


def run(network: str, processes: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one network and number of processes.

    Raises:
        subprocess.SubprocessError: If a process fails.
    """
    insize, batchsize = NETWORKS[network]
    case = {
        'network': network,
        'insize': insize,
        'batchsize': batchsize,
        'copies': COPIES,
        'rounds': rounds,
        'shares': SHARES,
    }
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, 'rows.json')
        ended = run_ranks(
            'ranks_worker', processes, [json.dumps(case), output], MOST_SECONDS
        )
        ended.check_returncode()
        with open(output, encoding='utf-8') as file:
            found: list[dict[str, Any]] = json.load(file)
    return found


def run_ranks(
    module: str, processes: int, arguments: list[str], most_seconds: float, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a module of the benchmarks in each of so many processes over MPI.

    Args:
        module: Its name.
        processes: How many.
        arguments: Of each.
        most_seconds: After which they are killed.
        how: For :func:`subprocess.run`.

    Raises:
        subprocess.SubprocessError: If there is no MPI, or they take longer.
    """
    path = [common.ROOT, *sys.path[1:]]
    environment = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join(p for p in path if p),
        'OMP_NUM_THREADS': '1',
        'OPENBLAS_NUM_THREADS': '1',
    }
    words = [find_mpiexec(), '-n', str(processes)]
    words += [sys.executable, '-m', f'benchmarks.{module}', *arguments]
    return subprocess.run(
        words, env=environment, text=True, check=False, timeout=most_seconds, **how
    )


def find_mpiexec() -> str:
    """The program that starts processes over MPI.

    Raises:
        subprocess.SubprocessError: If there is none.
    """
    own = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    found = own if os.access(own, os.X_OK) else shutil.which('mpiexec')
    if found is None:
        raise subprocess.SubprocessError('needs an MPI: pip install mpi4py mpich')
    return found


def describe(row: dict[str, Any]) -> str:
    """A row in a line."""
    return (
        '{network}, {processes} processes, memory / {share}: plain {plain_seconds:.3f} '
        's, alone {alone_seconds:.3f} s, together {together_seconds:.3f} s '
        '({gain:.2f}x), forecast {forecast_error:+.1%}, bits {equal}'
    ).format(**row)
