"""The ImageNet example in several processes."""

from __future__ import annotations

import re
from pathlib import Path

from support.mpi import needs_mpi, run_ranks

PROGRAM = Path(__file__).parents[2] / 'examples' / 'imagenet' / 'train_mn.py'
OPTIONS = """
    --arch resnet18 --insize 32 --batchsize 4 --dataset synthetic
    --memory-limit 400MiB --planner swap-all
    --iterations 3 --log-interval 1 --snapshot-interval 0
"""


@needs_mpi
def test_all_train_and_one_reports(tmp_path):
    out = tmp_path / 'run'
    done = run_ranks(PROGRAM, *OPTIONS.split(), '--out', out, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '2 processes' in done.stdout
    assert done.stdout.count('memory limit') == 1  # one process reports
    assert re.search(r'^.*\b3 .*MiB', done.stdout, re.MULTILINE)
