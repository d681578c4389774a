"""``hybridmem inference``: blobs, lifetimes, pools; or in one line why not."""

from __future__ import annotations

import json

import pytest

from chainer_hybridmem import commands
from chainer_hybridmem.lab.pools.catalogue import POOLS

OWN = """
import chainer, chainer.functions as F, chainer.links as L

class Own(chainer.Chain):
    insize = 16

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(None, 8, 3, pad=1)
            self.last = L.Linear(None, 10)

    def forward(self, x, t):
        h = F.max_pooling_2d(F.relu(self.first(x)), 2)
        return F.softmax_cross_entropy(self.last(F.dropout(h)), t)
"""


@pytest.fixture
def own(folder, monkeypatch):
    """A network of the user's own: ``inference_net:Own``."""
    (folder / 'inference_net.py').write_text(OWN)
    monkeypatch.syspath_prepend(str(folder))
    return ('inference', '--arch', 'inference_net:Own', '--n-class', '10')


def test_figures(own, hybridmem, folder):
    arguments = (*own, '--batchsize', '100', '--json', 'f.json', '-o', 'l.csv')
    status, out, err = hybridmem(*arguments)
    assert status == 0
    assert 'recording inference_net:Own, 2 pictures' in err
    figures = json.loads((folder / 'f.json').read_text())
    assert [row['pool'] for row in figures['pools']] == list(POOLS)
    assert all(name in out for name in (*POOLS, 'run', 'last-use', 'in-place'))
    # batch, labels, convolution, relu, pooling, dense, loss
    plane = 8 * 16 * 16 * 4
    blobs = 100 * (3 * 16 * 16 * 4 + 4 + 2 * plane + plane // 4 + 10 * 4) + 4
    assert figures['blob_bytes'] == blobs
    assert figures['in_place_blob_bytes'] == blobs - 100 * plane
    last_use = {row['lifetimes']: row for row in figures['lifetimes']}['last-use']
    assert last_use['blob_peak_bytes'] == 100 * (2 * plane + 4)
    assert last_use['blob_saving'] == 1 - last_use['blob_peak_bytes'] / blobs
    smallest = next(row for row in figures['pools'] if row['pool'] == 'exact')
    assert smallest['optimal'] and smallest['found_by']
    assert smallest['saving_of_blobs'] == 1 - smallest['footprint_bytes'] / blobs
    today = figures['cupy_run_bytes']
    assert smallest['saving_of_cupy'] == 1 - smallest['footprint_bytes'] / today
    assert sum(row['recommended'] for row in figures['pools']) == 1
    assert (folder / 'l.csv').read_text().startswith('id,lower,upper,size,offset\n')
    # What it writes can be read again.
    assert commands.main(['layout', 'l.csv', '--pool', 'exact']) == 0


def test_lifetimes_and_convolution(own, hybridmem):
    def pools(*more):
        arguments = (*own, '--batchsize', '9999', '--pool', 'exact', '--json', '-')
        status, out, _ = hybridmem(*arguments, *more)
        assert status == 0
        return json.loads(out)

    run, last_use, in_place = (
        pools('--lifetimes', lifetimes)['pools'][0]['peak_load_bytes']
        for lifetimes in ('run', 'last-use', 'in-place')
    )
    assert run > last_use > in_place
    recorded = pools('--convolution', 'im2col')
    assert recorded['blob_bytes'] == pools()['blob_bytes']
    assert recorded['convolution'] == 'im2col'


def test_what_is_refused(own, refused):
    named = (*own, '--batchsize', '8')
    assert "no pool 'exakt'" in refused(*named, '--pool', 'exakt')
    assert 'power of two' in refused(*named, '--alignment', '100')
    assert 'ascending' in refused(*named, '--sample-batches', '4', '2')
    assert 'out of range' in refused(*own, '--batchsize', '99999999999')
    assert 'no folder' in refused(*named, '-o', 'missing/l.csv')
    arguments = ('inference', '--batchsize', '8', '--arch')
    assert 'Did you mean' in refused(*arguments, 'vgg61')
