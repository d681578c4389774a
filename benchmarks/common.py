"""What the benchmark scripts share: training step, recordings, tables."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import numpy as np

from benchmarks.saving import ROOT, environment, save  # noqa: F401  for the scripts
from chainer_hybridmem import architectures
from chainer_hybridmem.commands import arguments, programs, samples
from chainer_hybridmem.commands.networks import Network
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.training.recompute import drawing

# Batch sizes whose feature maps clearly outweigh parameters on a small machine.
HOST_BATCHES = {'resnet50': 8, 'googlenet': 16, 'alexnet': 32}
# AlexNet's second convolution alone, as im2col and matrix product, needs three
# fifths of what lies above parameters, gradients and optimizer state.
ALEXNET_PART = 0.65
LOSS_SCALE = 128.0  # of mixed16


class Training:
    """One network with fixed data and a fixed seed.

    In mixed16 (Chainer's ``config.dtype``) with updates in float32 and a loss that is
    scaled.

    Args:
        arch: Name of the architecture.
        batchsize: Pictures per iteration.
        insize: Side of the pictures.
        gpu: Whether to train on the current GPU.
    """

    def __init__(
        self, arch: str, batchsize: int, insize: int = 224, gpu: bool = False
    ) -> None:
        np.random.seed(0)
        self.model = architectures.make(arch)
        rng = np.random.RandomState(1)
        x = rng.rand(batchsize, 3, insize, insize).astype(np.float32)
        x = x.astype(chainer.get_dtype(map_mixed16=np.float16), copy=False)
        t = rng.randint(0, 1000, batchsize).astype(np.int32)
        if gpu:
            drawing.seed_gpu(0)  # dropout
            self.model.to_device('@cupy:0')
            x, t = chainer.get_device('@cupy:0').send((x, t))
        self.batch = (x, t)
        self.optimizer = chainer.optimizers.MomentumSGD(0.002).setup(self.model)
        self.loss_scale: float | None = None
        if chainer.config.dtype is chainer.mixed16:
            self.optimizer.use_fp32_update()
            self.loss_scale = LOSS_SCALE
        self.losses: list[float] = []

    def step(self) -> None:
        """One iteration, as Chainer's StandardUpdater does it."""
        loss = self.model(*self.batch)
        self.model.cleargrads()
        loss.backward(loss_scale=self.loss_scale)
        self.losses.append(float(loss.array))
        del loss
        self.optimizer.update()

    def fixed_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        total = 0
        for parameter in self.model.params():
            arrays = [parameter.array, parameter._grad]
            rule = parameter.update_rule
            arrays.extend((rule.state or {}).values() if rule is not None else ())
            total += sum(a.nbytes for a in arrays if a is not None)
        return total


def free_gpu() -> None:
    """Gives back what garbage and CuPy's pools keep of what ran before."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()


def recordings(
    arch: str, folder: str | None, n_class: int = 1000
) -> samples.SamplePair:
    """Two recorded iterations of a network, from a file if there is one."""
    path = None
    if folder:
        name = arch.rpartition('.')[2].replace(':', '-')
        path = os.path.join(folder, f'{name}.json')
    sizes, progress = arguments.SAMPLE_BATCHSIZES, Progress(2, sys.stderr)

    def record(network: Network) -> samples.SamplePair:
        return programs.record_samples(network, sizes, True, progress)[0][0][0]

    network = Network(arch, 1, n_class=n_class, device='cpu')
    return samples.obtain(network, path, record)[1]


def in_core_peak(arch: str, batchsize: int, insize: int = 224) -> tuple[int, int]:
    """Measured in-core peak, and the bytes no plan can move; both in bytes."""
    training = Training(arch, batchsize, insize)
    with hybridmem.optimize(training.model, '1TB', planner='in-core') as session:
        for _ in range(5):
            training.step()
        fixed = training.fixed_bytes()
    return session.statistics()['guided_peak_bytes'], fixed


def half_limit(arch: str, peak: int, fixed: int) -> int:
    """Half of the in-core peak; for AlexNet the least part that any plan fits.

    AlexNet's parameters dominate at small batches: for it, a part of what lies
    above parameters, gradients and optimizer state.
    """
    if arch == 'alexnet':
        return fixed + int((peak - fixed) * ALEXNET_PART)
    return peak // 2


def table(rows: list[dict[str, Any]], columns: dict[str, Callable[[Any], str]]) -> str:
    """A Markdown table; columns map keys to formatters."""
    lines = ['| ' + ' | '.join(columns) + ' |', '|---' * len(columns) + '|']
    for row in rows:
        cells = [show(row[key]) for key, show in columns.items()]
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)
