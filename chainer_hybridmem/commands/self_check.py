"""Small proofs that the package works on this machine, for ``hybridmem doctor``."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from chainer_hybridmem.commands.recording import (
    DEVICES,
    Memory,
    Training,
    open_session,
    random_examples,
)
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.training.recompute import drawing
from chainer_hybridmem.units import format_bytes

ITERATIONS = 6  # one passive, two recorded, the others follow the plan
N_CLASS = 10
AMPLE_BYTES = 2**30


class TinyNetwork(chainer.Chain):
    """Statistics, random numbers and feature maps in a few hundred kilobytes."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 8, 3, pad=1)
            self.norm = L.BatchNormalization(8)
            self.first = L.Linear(8 * 4 * 4, 64)
            self.last = L.Linear(64, N_CLASS)

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
    plain = _prepare(device_name)
    for _ in range(ITERATIONS):
        plain.step()
    limit_bytes = _find_limit(device_name)
    limited = _prepare(device_name)
    session = open_session(limited.model, Memory(limit_bytes))
    with session:
        for _ in range(ITERATIONS):
            limited.step()
    figures = session.statistics()
    _check(plain, limited, figures)
    return (
        f'{ITERATIONS} iterations in {format_bytes(limit_bytes)} instead of '
        f'{format_bytes(figures["in_core_peak_bytes"])}, every bit equal'
    )


def _prepare(device_name: str) -> Training:
    device = chainer.get_device(DEVICES[device_name])
    np.random.seed(0)
    device.use()
    if device_name == 'cuda':
        drawing.seed_gpu(0)
    model = TinyNetwork()
    model.to_device(device)
    optimizer = chainer.optimizers.MomentumSGD()
    optimizer.setup(model)
    return Training(model, optimizer, random_examples((8, 3, 16, 16), N_CLASS))


def _find_limit(device_name: str) -> int:
    """Half-way between the needs of single operations and of in-core training."""
    training = _prepare(device_name)
    session = open_session(training.model, Memory(AMPLE_BYTES))
    with session:
        for _ in range(ITERATIONS):
            training.step()
    if session.problem is None:
        raise HybridMemoryError(f'Nothing was recorded in {ITERATIONS} iterations.')
    least, _ = least_memory(session.problem)
    return (least + session.problem.in_core_peak_bytes) // 2


def _check(plain: Training, limited: Training, figures: dict[str, Any]) -> None:
    if figures['peak_bytes'] > figures['limit_bytes']:
        raise HybridMemoryError(
            f'The peak was {figures["peak_bytes"]} bytes, the limit is '
            f'{figures["limit_bytes"]}.'
        )
    if not figures['guided_iterations'] or not figures['swap']:
        raise HybridMemoryError(
            f'{figures["guided_iterations"]} iterations followed a plan with '
            f'{figures["swap"]} swaps; at least one of both was expected.'
        )
    for name, left, right in _pairs(plain.model, limited.model):
        to_cpu = chainer.backends.cuda.to_cpu
        if to_cpu(left).tobytes() != to_cpu(right).tobytes():
            raise HybridMemoryError(f'{name} differs from plain Chainer.')


def _pairs(left: chainer.Link, right: chainer.Link) -> list[tuple[str, Any, Any]]:
    """Parameters, gradients and statistics of two models, by name."""
    pairs = []
    for (name, a), (_, b) in zip(left.namedparams(), right.namedparams(), strict=True):
        pairs += [(name, a.array, b.array), (f'gradient of {name}', a.grad, b.grad)]
    for name in ('avg_mean', 'avg_var'):
        pairs.append((name, getattr(left.norm, name), getattr(right.norm, name)))
    return pairs
