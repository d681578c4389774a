"""The ImageNet example in several processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from session_tests.test_data_parallel import find_mpiexec, needs_mpi

PROGRAM = Path(__file__).parents[2] / 'examples' / 'imagenet' / 'train_mn.py'
pytestmark = needs_mpi


def run(out, *options):
    path = os.pathsep.join(p for p in sys.path if p)
    command = [find_mpiexec(), '-n', '2', sys.executable, str(PROGRAM)]
    command += [
        '--arch',
        'resnet18',
        '--insize',
        '32',
        '--batchsize',
        '4',
        '--dataset',
        'synthetic',
    ]
    command += ['--memory-limit', '400MiB', '--planner', 'swap-all']
    command += ['--log-interval', '1', '--out', str(out)]
    return subprocess.run(
        [*command, *options],
        env={**os.environ, 'PYTHONPATH': path, 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_all_train_and_one_reports(tmp_path):
    first = run(tmp_path / 'run', '--iterations', '3', '--snapshot-interval', '0')
    assert first.returncode == 0, first.stdout + first.stderr
    assert '2 processes' in first.stdout
    assert first.stdout.count('memory limit') == 1  # one process reports
    assert re.search(r'^.*\b3 .*MiB', first.stdout, re.MULTILINE)


def test_a_limit_that_is_too_small_ends_all(tmp_path):
    result = run(tmp_path / 'run', '--iterations', '3', '--memory-limit', '60MiB')
    assert result.returncode != 0
    assert 'OutOfMemoryError' in result.stderr
    assert 'Raise memory_limit' in result.stdout + result.stderr
