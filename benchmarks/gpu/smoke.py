"""The first minute on a GPU: does an updater's loop train with the same bits?

A residual network is trained by plain Chainer, once more by plain Chainer (does the GPU
repeat itself?), in a session where everything fits, and under ``swap-all`` and
``hybrid`` in half the memory that it needs. Nothing in it adds atomically.

    python -m benchmarks run gpu.smoke [--scale 0.1] [--insize 112]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
import traceback
from typing import Any

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training

from benchmarks import saving
from chainer_hybridmem.architectures.resnet import ResidualBlock
from chainer_hybridmem.training.recompute import drawing

ITERATIONS = 14  # the last ones after the plan has been timed
BATCHSIZE, INSIZE = 24, 112
BLOCKS = 12
PLANNERS = ('swap-all', 'hybrid')
Outcome = dict[str, np.ndarray]


class Residual(chainer.Chain):
    """Bottlenecks of one width: many feature maps and few parameters."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 64, 3, pad=1)
            blocks = (ResidualBlock(64, 16, 1, True) for _ in range(BLOCKS))
            self.blocks = chainer.ChainList(*blocks)
            self.last = L.Linear(64, 10)

    def forward(self, x: Any, t: Any) -> Any:
        h = F.relu(self.first(x))
        for block in self.blocks:
            h = block(h)
        y = self.last(F.dropout(F.average(h, axis=(2, 3)), 0.2))
        loss = F.softmax_cross_entropy(y, t)
        chainer.report({'loss': loss}, self)
        return loss


def train(batchsize: int, insize: int, **options: Any) -> tuple[Outcome, Any, float]:
    """Trains by an updater, which waits for nothing.

    Args:
        batchsize: Pictures per iteration.
        insize: Side of the pictures.
        options: Of a session; none without any.

    Returns:
        Everything that must be equal, the session, seconds of all iterations.
    """
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    np.random.seed(0)
    drawing.seed_gpu(0)
    rng = np.random.RandomState(1)
    x = rng.rand(2 * batchsize, 3, insize, insize).astype(np.float32)
    t = rng.randint(0, 10, 2 * batchsize).astype(np.int32)
    model = Residual()
    model.to_device('@cupy:0')
    optimizer = chainer.optimizers.MomentumSGD(0.002).setup(model)
    updater = training.StandardUpdater(
        chainer.iterators.SerialIterator(
            chainer.datasets.TupleDataset(x, t), batchsize, shuffle=False
        ),
        optimizer,
        device='@cupy:0',
    )
    reporter = chainer.Reporter()
    reporter.add_observer('main', model)
    losses = []
    session = contextlib.nullcontext()
    if options:
        session = hybridmem.optimize(model, progress=sys.stderr, **options)
    cupy.cuda.Device().synchronize()
    began = time.perf_counter()
    with session, chainer.using_config('cudnn_deterministic', True):
        for _ in range(ITERATIONS):
            observation: dict[str, Any] = {}
            with reporter.scope(observation):
                updater.update()
            losses.append(observation['main/loss'].array)  # without its graph
        cupy.cuda.Device().synchronize()
        seconds = time.perf_counter() - began
    return outcome(model, losses), session, seconds


def outcome(model: chainer.Link, losses: list[Any]) -> Outcome:
    """Losses, parameters, gradients, optimizer states and statistics, on the host."""
    send = chainer.get_device('@numpy').send
    values = [float(send(loss)) for loss in losses]
    result = {'losses': np.array(values)}
    for name, parameter in model.namedparams():
        result[name] = send(parameter.array)
        result[f'{name}.grad'] = send(parameter.grad)
        for key, value in (parameter.update_rule.state or {}).items():
            result[f'{name}:{key}'] = np.asarray(send(value))
    for path, link in model.namedlinks():
        for name in link._persistent:
            result[f'{path}.{name}'] = np.asarray(send(getattr(link, name)))
    return result


def compare(expected: Outcome, actual: Outcome) -> dict[str, Any]:
    """Whether every bit is the same, and else what differs most.

    Differences are relative to the largest value of each array.
    """
    names = [name for name in expected if name not in actual]
    if names or len(expected) != len(actual):
        return {'same_bits': False, 'largest_difference': None, 'where': names[:3]}
    differing = {
        name: _difference(value, actual[name])
        for name, value in expected.items()
        if np.asarray(value).tobytes() != np.asarray(actual[name]).tobytes()
    }
    where = max(differing, key=lambda name: differing[name], default=None)
    return {
        'same_bits': not differing,
        'differing': len(differing),
        'largest_difference': differing[where] if where is not None else 0.0,
        'where': where,
    }


def _difference(expected: np.ndarray, actual: np.ndarray) -> float:
    expected = np.asarray(expected, np.float64)
    difference = np.abs(expected - np.asarray(actual, np.float64)).max()
    relative = difference / max(float(np.abs(expected).max()), 1e-30)
    return float(relative) if np.isfinite(relative) else float('inf')


def figures_of(session: hybridmem.Session) -> dict[str, Any]:
    """What a row says of a session."""
    figures = session.statistics()
    names = ('state', 'keep', 'swap', 'recompute', 'evictions', 'restores')
    names += ('deviations', 'iteration_seconds', 'predicted_seconds', 'peak_bytes')
    names += ('predicted_peak_bytes', 'in_core_peak_bytes', 'footprint_bytes')
    names += ('arena_bytes', 'placed', 'unplaced', 'planning_seconds')
    names += ('host_bytes', 'older_bytes', 'foreign_bytes')
    return {name: figures[name] for name in names}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--scale', type=float, default=1.0, help='of the batch')
    parser.add_argument('--insize', type=int, default=INSIZE)


def main(options: argparse.Namespace) -> int:
    size = max(2, int(BATCHSIZE * options.scale)), options.insize
    network = f'residual network b{size[0]} at {size[1]}'
    result = saving.Rows('gpu_smoke', network=network, iterations=ITERATIONS)
    expected, _, seconds = train(*size)
    result.add({'way': 'plain', 'all_seconds': seconds})
    again, _, seconds = train(*size)
    row = {'way': 'plain, again', 'all_seconds': seconds, **compare(expected, again)}
    result.add(row)
    print(row, flush=True)
    peak, good = 0, True
    for planner in ('in-core', *PLANNERS):
        limit = '1TB' if planner == 'in-core' else peak // 2
        row = {'way': planner, 'limit_bytes': limit if peak else None}
        try:
            actual, session, seconds = train(*size, memory_limit=limit, planner=planner)
        except Exception as error:
            traceback.print_exc()
            row |= {'why': repr(error), 'same_bits': False}
        else:
            row |= {'all_seconds': seconds, **compare(expected, actual)}
            row |= figures_of(session)
            row['inside'] = not peak or row['footprint_bytes'] <= limit
            if not peak:
                peak = row['in_core_peak_bytes']
        good &= row['same_bits'] and row.get('inside', False)
        result.add(row)
        print(row, flush=True)
        if not peak:
            break
    print('same bits in half the memory' if good else 'NOT the same bits', flush=True)
    return 0 if good else 1
