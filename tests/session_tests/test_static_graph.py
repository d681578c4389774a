"""Static graphs keep their arrays to themselves: they are refused."""

from __future__ import annotations

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
from chainer import static_graph

from chainer_hybridmem.errors import SessionError

ITERATIONS = 6


class Static(networks.Ends):
    """A chain of which a part is static."""

    @static_graph
    def body(self, x):
        return self.last(F.max_pooling_2d(F.sigmoid(self.conv(x)), 2))

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.body(x), t)


@pytest.mark.parametrize('planner', ['in-core', 'hybrid'])
@pytest.mark.parametrize('train', [True, False])
def test_it_is_refused_before_the_first_number(planner, train, data, capsys):
    model = Static()
    with (
        chainer.using_config('train', train),
        hybridmem.optimize(model, '1GB', planner),
        pytest.raises(SessionError, match='use_static_graph = False'),
    ):
        model(*data[0])


def test_a_schedule_of_before_is_refused_as_well(data, capsys):
    model = Static()
    loss = model(*data[0])
    model.cleargrads()
    loss.backward()
    with (
        hybridmem.optimize(model, '1GB'),
        pytest.raises(SessionError, match='use_static_graph = False'),
    ):
        model(*data[0])


def test_the_same_network_trains_define_by_run(data):
    with chainer.using_config('use_static_graph', False):
        expected = networks.train(Static, data)[0]
        result, _ = networks.train(Static, data, memory_limit=2_000_000)
    networks.assert_same(expected, result)
    assert np.isfinite(result['losses']).all()
