"""What comes back without a plan does not leave again before it is used."""

from __future__ import annotations

import numpy as np
from support import networks

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L


class Deep(chainer.ChainList):
    """Each backward function takes as much as many of the feature maps."""

    def __init__(self):
        super().__init__(
            *[L.Convolution2D(3 if i == 0 else 8, 8, 3, pad=1) for i in range(24)]
        )

    def forward(self, x, t):
        for convolution in self:
            x = F.relu(convolution(x))
        return F.softmax_cross_entropy(F.average(x, axis=(2, 3)), t)


def test_maps_come_back_once():
    data = [
        (
            np.random.RandomState(i).rand(4, 3, 32, 32).astype(np.float32),
            np.arange(4, dtype=np.int32),
        )
        for i in range(2)
    ]
    in_core = networks.train(Deep, data * 3, memory_limit='1GiB')[1]
    needed = in_core.statistics()['in_core_peak_bytes']
    maps = len(in_core.profile.feature_maps())
    _, session = networks.train(
        Deep, data[:1], memory_limit=needed // 2, link_bandwidth='1GB/s'
    )
    first = networks.entries_of(session)[0]
    # In forward, when backward takes much for the first time, and after their last use.
    assert maps / 2 < first['evictions'] < 3 * maps
