"""Ranks on emulated GPUs: ChainerMN's communicators for them, each inside its limit."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
from support.matrices import several
from support.mpi import needs_mpi, run_ranks

pytestmark = [
    pytest.mark.gpu,
    needs_mpi,
    pytest.mark.skipif(
        'EMU_LIBRARY' not in os.environ, reason='needs the emulator: make test-cuda'
    ),
]
PROGRAM = pathlib.Path(__file__).with_name('ranks_cuda_program.py')
COUNT = 2
WAYS = ('pure_nccl', 'double', 'half', 'flat')[: several(2, all_of_them=4)]
SEEDS = several(1, all_of_them=4)


def found_in(ways, seed, folder, *options, **environment):
    """What the ranks have found in each way, once they have ended well."""
    given = {'EMU_NCCL_SECONDS': '100', **environment}
    done = run_ranks(PROGRAM, ways, seed, folder, *options, timeout=300, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    files = [folder / f'{rank}.json' for rank in range(COUNT)]
    found = [json.loads(file.read_text(encoding='utf-8')) for file in files]
    return {way: [one[way] for one in found] for way in ways.split(',')}


# One test: processes of all ways start together, and a fixture's would in each worker.
@pytest.mark.parametrize('seed', range(SEEDS))
def test_the_same_bits_inside_the_limit(seed, tmp_path):
    for way, found in found_in(','.join(WAYS), seed, tmp_path).items():
        check(found, double=way == 'double')


def check(found, double):
    """Judges what the ranks have found in one way."""
    expected = found[0]['plain']['parameters']
    assert found[0]['small']['maps'] == found[1]['small']['maps']
    for one in found:
        assert one['plain']['parameters'] == expected
        small, limit = one['small'], one['small']['limit']
        assert small['parameters'] == expected
        assert small['said'] == []
        assert not [line for line in small['lines'] if 'alone' in line]
        assert small['same_allocator']
        assert small['taken'] <= limit < one['plain']['taken']
        figures, last = small['figures'], small['last']
        assert figures['state'] == 'guided' and figures['deviations'] == 0
        assert figures['peak_bytes'] <= limit
        assert figures['footprint_bytes'] <= limit
        assert figures['swap'] + figures['recompute'] > 0
        assert last['placed'] > 50 and last['unplaced'] == 0
        before = [] if double else ['all-reduce']
        assert small['after_backward'] == [*before, 'update']


def test_the_repaired_double_buffering_has_no_race(tmp_path):
    """Without the repair of ChainerMN this reports both kinds; see compat.chainermn."""
    found = found_in('double', 0, tmp_path, 'plain', EMU_RACES='1', EMU_MODE='eager')
    assert [one['races'] for one in found['double']] == [0, 0]
