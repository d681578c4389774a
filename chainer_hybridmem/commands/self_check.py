"""Small proofs that the package works on this machine, for ``hybridmem doctor``."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.commands import programs, verify
from chainer_hybridmem.commands.networks import Network
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.units import format_bytes

ITERATIONS = 6  # one passive, two recorded, the others follow the plan
N_CLASS = 10
PLANNER = 'swap-all'


class TinyNetwork(chainer.Chain):
    """Statistics, random numbers and feature maps in a few hundred kilobytes."""

    insize = 16

    def __init__(self, n_class: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 8, 3, pad=1)
            self.norm = L.BatchNormalization(8)
            self.first = L.Linear(8 * 4 * 4, 64)
            self.last = L.Linear(64, n_class)

    def forward(self, x: Any, t: Any) -> Any:
        """Returns the loss."""
        h = F.relu(self.norm(self.conv(x)))
        for _ in range(8):
            h = F.tanh(h)
        h = F.dropout(F.relu(self.first(F.average_pooling_2d(h, 4))))
        return F.softmax_cross_entropy(self.last(h), t)


def training_is_the_same(device_name: str) -> str:
    """Trains inside a memory limit and without one, and compares every bit.

    Args:
        device_name: ``'cpu'`` or ``'cuda'``.

    Returns:
        str: What has been shown.

    Raises:
        HybridMemoryError: If the results differ or the limit is not kept.
    """
    name = f'{__name__}:{TinyNetwork.__name__}'
    network = Network(name, 8, TinyNetwork.insize, N_CLASS, device_name)
    problem = programs.record(network).find_largest()
    in_core_bytes = problem.in_core_peak_bytes
    # half-way between the needs of single operations and of in-core training
    limit_bytes = (least_memory(problem)[0] + in_core_bytes) // 2
    limited, plain = (
        verify.train(network, {'memory_limit': limit_bytes}, ITERATIONS, planner)
        for planner in (PLANNER, None)
    )
    figures = verify.compare(limited, plain)
    for row in figures['iterations']:
        if row['first_difference'] is not None:
            name = ' '.join(row['first_difference'])
            raise HybridMemoryError(f'{name} differs from plain Chainer.')
    if figures['peak_bytes'] > limit_bytes or not figures['swapped_maps']:
        raise HybridMemoryError(
            f'The peak was {figures["peak_bytes"]} bytes with '
            f'{figures["swapped_maps"]} swaps; at most {limit_bytes} bytes and '
            f'at least one swap were expected.'
        )
    return (
        f'{ITERATIONS} iterations in {format_bytes(limit_bytes)} instead of '
        f'{format_bytes(in_core_bytes)}, every bit equal'
    )
