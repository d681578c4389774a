"""ResNet-50 in PyTorch, with the memory that we have: its own ways beside ours.

The network is that of ``chainer_hybridmem.architectures`` (strides in the first 1x1
convolution of a stage), trained in-core, with ``torch.utils.checkpoint`` around every
block, and with ``torch.autograd.graph.save_on_cpu(pin_memory=True)``: float32, TF32
off, NCHW, momentum SGD. Its convolutions are cuDNN's, ours are im2col and matrix
products where CuPy has no cuDNN: the ratio of speeds shows that as well, each side's
overhead over its own in-core time does not.

    python -m benchmarks run gpu.torch_on_gpu [--memory-limit 16GiB] [--device cuda]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks import saving
from chainer_hybridmem.units import parse_bytes

BATCHSIZE, INSIZE, CLASSES = 256, 224, 1000
BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))
WAYS = ('in-core', 'checkpoint', 'save_on_cpu')
WARM_UPS = 2
NAME = 'gpu_torch'


def make_network(torch: Any, blockwise: Callable[..., Any]) -> Any:
    """ResNet-50; ``blockwise(block, x)`` runs a block."""
    nn = torch.nn

    def convolution(n_in: int, n_out: int, ksize: int, stride: int = 1) -> list[Any]:
        conv = nn.Conv2d(n_in, n_out, ksize, stride, ksize // 2, bias=False)
        return [conv, nn.BatchNorm2d(n_out)]

    class Block(nn.Module):
        def __init__(self, n_in: int, n_mid: int, stride: int) -> None:
            super().__init__()
            n_out = 4 * n_mid
            self.convs = nn.Sequential(
                *convolution(n_in, n_mid, 1, stride),
                nn.ReLU(),
                *convolution(n_mid, n_mid, 3),
                nn.ReLU(),
                *convolution(n_mid, n_out, 1),
            )
            self.shortcut = nn.Sequential()
            if stride != 1 or n_in != n_out:
                self.shortcut = nn.Sequential(*convolution(n_in, n_out, 1, stride))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.convs(x) + self.shortcut(x))

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(
                *convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
            )
            blocks, n_in = [], 64
            for stage, (n_mid, count) in enumerate(BLOCKS):
                for index in range(count):
                    stride = 2 if stage > 0 and index == 0 else 1
                    blocks.append(Block(n_in, n_mid, stride))
                    n_in = 4 * n_mid
            self.blocks = nn.ModuleList(blocks)
            self.last = nn.Linear(n_in, CLASSES)

        def forward(self, x: Any) -> Any:
            h = self.stem(x)
            for block in self.blocks:
                h = blockwise(block, h)
            return self.last(h.mean((2, 3)))

    return ResNet()


def measure(torch: Any, way: str, size: tuple[int, int], device: str, iterations: int):
    """The row of one way: seconds of each iteration, and memory."""
    from torch.utils.checkpoint import checkpoint

    on_gpu = device == 'cuda'
    torch.manual_seed(0)

    def blockwise(block: Any, x: Any) -> Any:
        if way == 'checkpoint':
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    saved: Any = contextlib.nullcontext
    if way == 'save_on_cpu':
        saved = lambda: torch.autograd.graph.save_on_cpu(pin_memory=on_gpu)  # noqa: E731
    batchsize, insize = size
    network = make_network(torch, blockwise).to(device)
    optimizer = torch.optim.SGD(network.parameters(), 0.002, momentum=0.9)
    x = torch.rand(batchsize, 3, insize, insize, device=device)
    t = torch.randint(0, CLASSES, (batchsize,), device=device)
    seconds, losses = [], []
    for _ in range(WARM_UPS + iterations):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with saved():
            loss = torch.nn.functional.cross_entropy(network(x), t)
        loss.backward()
        losses.append(float(loss.detach()))  # which waits, as our loop does
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        print(f'torch {way}: {seconds[-1]:.3f} s', flush=True)
    median = statistics.median(seconds[WARM_UPS:])
    row = {
        'way': way,
        'fits': True,
        'batchsize': batchsize,
        'iteration_seconds': median,
        'pictures_per_second': batchsize / median,
        'all_seconds': seconds,
        'losses': losses,
    }
    if on_gpu:
        row['allocated_bytes'] = torch.cuda.max_memory_allocated()
        row['reserved_bytes'] = torch.cuda.max_memory_reserved()
    return row


def our_rows(limit: int, batchsize: int) -> dict[str, dict[str, Any]]:
    """What ``methods_on_gpu.py`` has saved of the same network, batch and limit."""
    try:
        path = os.path.join(saving.RESULTS, 'gpu_methods.json')
        with open(path, encoding='utf-8') as file:
            rows = json.load(file)['rows']
    except (OSError, ValueError):
        return {}
    return {
        row['planner']: row
        for row in rows
        if row['arch'] == 'resnet50'
        and row['batchsize'] == batchsize
        and row.get('iteration_seconds')
        and row.get('limit_bytes', limit) == limit
    }


def ratios(rows: list[dict[str, Any]], ours: dict[str, Any]) -> list[dict[str, Any]]:
    """Our speed over theirs, and both over their own in-core time, pair by pair."""
    theirs = {row['way']: row['iteration_seconds'] for row in rows if row.get('fits')}
    return [
        {
            'ours': planner,
            'theirs': way,
            'speed_ratio': seconds / row['iteration_seconds'],
            'our_overhead': _over(row, ours.get('in-core')),
            'their_overhead': seconds / theirs['in-core'] - 1
            if 'in-core' in theirs
            else None,
        }
        for planner, row in ours.items()
        for way, seconds in theirs.items()
        if (planner == 'in-core') == (way == 'in-core')
    ]


def _over(row: dict[str, Any], base: dict[str, Any] | None) -> float | None:
    return row['iteration_seconds'] / base['iteration_seconds'] - 1 if base else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--memory-limit', default='16GiB')
    parser.add_argument('--iterations', type=int, default=3)
    parser.add_argument('--scale', type=float, default=1.0, help='of the batch')
    parser.add_argument('--insize', type=int, default=INSIZE)
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')


def main(options: argparse.Namespace) -> int:
    limit, device = parse_bytes(options.memory_limit), options.device
    result = saving.Rows(NAME, limit_bytes=limit, device=device, ratios=[])
    try:
        import torch
    except ImportError as error:
        return skip(result, f'PyTorch cannot be imported: {error}')
    if device == 'cuda' and not torch.cuda.is_available():
        return skip(result, 'PyTorch finds no GPU')
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    size = max(2, int(BATCHSIZE * options.scale)), options.insize
    result.tell(tf32=False, cudnn_benchmark=True, insize=size[1])
    ours = our_rows(limit, size[0])
    good = True
    for way in WAYS:
        if device == 'cuda':
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            total = torch.cuda.get_device_properties(0).total_memory
            share = 1.0 if way == 'in-core' else min(1.0, limit / total)
            torch.cuda.set_per_process_memory_fraction(share)
        try:
            row = measure(torch, way, size, device, options.iterations)
        except Exception as error:
            traceback.print_exc()
            row = {'way': way, 'fits': False, 'why': str(error).split('\n')[0]}
            good = False
        result.add({**row, 'limit_bytes': None if way == 'in-core' else limit})
        result.tell(ratios=ratios(result.rows, ours))
    for row in ratios(result.rows, ours):
        print(row, flush=True)
    return 0 if good else 1


def skip(result: saving.Rows, why: str) -> int:
    """Nothing to measure here."""
    print(f'skipped: {why}', flush=True)
    result.tell(skipped=why)
    return 0
