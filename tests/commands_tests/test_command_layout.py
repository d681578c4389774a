"""``hybridmem layout`` compares pools, or says in one line why not."""

from __future__ import annotations

import json
import random

import pytest
from support import toys

from chainer_hybridmem import make_plan
from chainer_hybridmem.commands import layout
from chainer_hybridmem.lab.pools.catalogue import POOLS
from chainer_hybridmem.planning.layouts.layout import Layout
from chainer_hybridmem.planning.records import library

CSV = 'id,lower,upper,size\na,0,3,4\nb,3,9,4\nc,0,9,4\n'


def test_all_pools_on_a_profile(profile, hybridmem, folder):
    status, out, err = hybridmem('layout', 'p.json', '--json', 'l.json')
    assert (status, err) == (0, '')
    assert all(name in out for name in POOLS)
    assert 'Recommended: ' in out
    assert 'optimal' in out
    rows = json.loads((folder / 'l.json').read_text())
    assert [row['pool'] for row in rows] == list(POOLS)
    for row in rows:
        assert {
            'pool',
            'footprint_bytes',
            'peak_load_bytes',
            'competitive_ratio',
            'device_calls',
            'pool_bytes',
        } <= set(row)
        assert row['footprint_bytes'] >= row['peak_load_bytes']
    assert sum(row['recommended'] for row in rows) == 1
    assert next(row for row in rows if row['pool'] == 'exact')['optimal']


def test_under_a_plan(profile, hybridmem, folder):
    plan = make_plan(profile, '60MiB', 'pooch')
    library.save(plan, str(folder / 'plan.json'))
    arguments = ('layout', 'p.json', '--plan', 'plan.json', '--json', '-')
    status, out, _ = hybridmem(*arguments, '--pool', 'exact')
    assert status == 0
    (row,) = json.loads(out)
    assert row['peak_load_bytes'] == plan.predicted_peak_bytes
    assert row['footprint_bytes'] <= plan.memory_limit_bytes


def test_a_file_of_minimalloc(hybridmem, folder):
    (folder / 'problem.csv').write_text(CSV)
    status, out, _ = hybridmem('layout', 'problem.csv', '-o', 'solution.csv')
    assert status == 0
    assert 'peak load 8 B' in out
    solution = (folder / 'solution.csv').read_text()
    assert solution.startswith('id,lower,upper,size,offset\na,')
    assert hybridmem('layout', 'solution.csv')[0] == 0


def test_a_capacity_is_fitted_or_proven_too_small(hybridmem, folder):
    (folder / 'problem.csv').write_text(CSV)
    arguments = ('layout', 'problem.csv', '--pool', 'smartpool', '--capacity')
    status, out, _ = hybridmem(*arguments, '8B', '--json', 'l.json', '-o', 's.csv')
    assert (status, json.loads((folder / 'l.json').read_text())[0]['fits']) == (0, True)
    assert 'It fits 8 B (8 bytes): a layout takes 8 B' in out
    status, out, _ = hybridmem(*arguments, '7B')
    assert status == 1
    assert 'which is proven: no layout is below 8 B (8 bytes)' in out


def test_a_capacity_that_only_a_search_fits(hybridmem, folder):
    # Buffers by size, then order: 'smartpool' leaves a hole that exact does without.
    rng = random.Random(8)
    rows = [
        (rng.randrange(20), rng.randrange(1, 9), rng.randrange(1, 9)) for _ in range(40)
    ]
    lines = [f'{i},{a},{a + n},{size}' for i, (a, n, size) in enumerate(rows)]
    (folder / 'problem.csv').write_text('id,lower,upper,size\n' + '\n'.join(lines))
    sizes = []
    for pool in ('smartpool', 'exact'):
        hybridmem('layout', 'problem.csv', '--pool', pool, '--json', 'l.json')
        sizes.append(json.loads((folder / 'l.json').read_text())[0]['footprint_bytes'])
    assert sizes[1] < sizes[0]
    arguments = ('layout', 'problem.csv', '--pool', 'smartpool', '--capacity')
    status, out, _ = hybridmem(*arguments, f'{sizes[1]}B', '-o', 's.csv')
    assert status == 0 and f'a layout takes {sizes[1]} B' in out
    assert hybridmem('layout', 's.csv')[0] == 0


@pytest.mark.parametrize(
    ('footprint', 'bound', 'says'),
    [
        (9, 8, 'not proven: the bound is 8 B'),
        (9, 9, 'is proven: no layout is below 9 B'),
        (8, 7, 'It fits 8 B'),
    ],
)
def test_what_is_said_of_a_capacity(footprint, bound, says):
    found = Layout((0,), footprint, bound, 7, 1, 'x')
    assert says in layout.verdict(found, 8)


def test_offsets_that_overlap(refused, folder):
    (folder / 'bad.csv').write_text(
        'id,lower,upper,size,offset\na,0,3,4,0\nb,1,9,4,2\n'
    )
    assert 'overlaps' in refused('layout', 'bad.csv')


def test_what_is_refused(profile, refused, folder):
    other = make_plan(toys.chain(5), '1GB', 'swap-all')
    library.save(other, str(folder / 'other.json'))
    assert 'make it again' in refused('layout', 'p.json', '--plan', 'other.json')
    assert "no pool 'exakt'" in refused('layout', 'p.json', '--pool', 'exakt')
    assert 'power of two' in refused('layout', 'p.json', '--alignment', '100')
    assert 'cannot be read' in refused('layout', 'missing.json')
    assert 'cannot be read' in refused('layout', 'missing.csv')
    assert 'format' in refused('layout', 'other.json')
    (folder / 'empty.csv').write_text('')
    assert 'empty.csv' in refused('layout', 'empty.csv')
    (folder / 'binary.csv').write_bytes(b'\xff\xfe\x00')
    assert 'cannot be read' in refused('layout', 'binary.csv')
    (folder / 'fine.csv').write_text(CSV)
    assert 'needs one' in refused('layout', 'fine.csv', '--plan', 'other.json')
    assert 'reads' in refused('layout', 'p.json', '-o', 'p.json')
