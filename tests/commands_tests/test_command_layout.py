"""``hybridmem layout`` compares pools, or says in one line why not."""

from __future__ import annotations

import json

from support import toys

from chainer_hybridmem import make_plan
from chainer_hybridmem.lab.pools.catalogue import POOLS
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


def test_offsets_that_overlap(refused, folder):
    (folder / 'bad.csv').write_text(
        'id,lower,upper,size,offset\na,0,3,4,0\nb,1,9,4,2\n'
    )
    assert 'overlaps' in refused('layout', 'bad.csv')


def test_what_is_refused(profile, refused, folder):
    other = make_plan(toys.chain(5), '1GB', 'swap-all')
    library.save(other, str(folder / 'other.json'))
    assert 'or plan again' in refused('layout', 'p.json', '--plan', 'other.json')
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
