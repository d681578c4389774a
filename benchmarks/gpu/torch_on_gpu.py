"""ResNet-50 in PyTorch, with the memory that we have: its own ways beside ours.

The network is that of ``chainer_hybridmem.architectures`` (strides in the first 1x1
convolution of a stage), with momentum SGD, trained in-core, with
``torch.utils.checkpoint`` around every block, with
``torch.autograd.graph.save_on_cpu(pin_memory=True)``, and compiled, also with half of
its budget of memory for feature maps (``run.sh`` calls that step ``torch_compile``). It
computes in float32 without TF32, in TF32 and with autocast to float16 (*mixed16*), in
the last one also with channels last. Its algorithms are measured
(``cudnn.benchmark``), as ours are in ``methods_on_gpu.py``.

    python -m benchmarks run gpu.torch_on_gpu [--memory-limit 16GiB] [--device cuda]
    python -m benchmarks run gpu.torch_on_gpu --cases compile --result gpu_torch_compile
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
from typing import Any, NamedTuple

from benchmarks import saving
from benchmarks.gpu import arithmetic
from chainer_hybridmem.units import parse_bytes

BATCHSIZE, INSIZE, CLASSES = 256, 224, 1000
BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))
IN_CORE = ('in-core', 'compile')  # without the limit
BUDGET = 0.5  # of torch.compile's feature maps
WARM_UPS = 2
NAME = 'gpu_torch'


class Case(NamedTuple):
    """One way to train.

    Attributes:
        way: ``in-core``, ``checkpoint``, ``save_on_cpu``, ``compile`` or
            ``compile, budget``.
        arithmetic: Of ``arithmetic.NAMES``.
        channels_last: Whether pictures and filters lie so.
    """

    way: str
    arithmetic: str = 'float32'
    channels_last: bool = False

    @property
    def name(self) -> str:
        """The way, with its layout if that is not NCHW."""
        return f'{self.way}, channels last' if self.channels_last else self.way


# The most valuable ones first.
CASES = {
    'eager': (
        Case('in-core'),
        Case('checkpoint'),
        Case('save_on_cpu'),
        *(
            Case(way, *how)
            for how in (('tf32',), ('mixed16',), ('mixed16', True))
            for way in ('in-core', 'checkpoint')
        ),
        Case('save_on_cpu', 'tf32'),
        Case('save_on_cpu', 'mixed16', True),
    ),
    'compile': (
        Case('compile, budget'),
        Case('compile'),
        Case('compile, budget', 'mixed16', True),
    ),
}


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


def measure(
    torch: Any, case: Case, size: tuple[int, int], device: str, iterations: int
) -> dict[str, Any]:
    """The row of one case: seconds of each iteration, and memory.

    Args:
        torch: PyTorch.
        case: How to train.
        size: Pictures per iteration, and their side.
        device: ``cuda`` or ``cpu``.
        iterations: After warming up.
    """
    from torch.utils.checkpoint import checkpoint

    on_gpu, way = device == 'cuda', case.way
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = case.arithmetic == 'tf32'
    torch.backends.cuda.matmul.allow_tf32 = case.arithmetic == 'tf32'

    def blockwise(block: Any, x: Any) -> Any:
        if way == 'checkpoint':
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    saved: Any = contextlib.nullcontext
    if way == 'save_on_cpu':
        saved = lambda: torch.autograd.graph.save_on_cpu(pin_memory=on_gpu)  # noqa: E731
    batchsize, insize = size
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    network = make_network(torch, blockwise).to(device, memory_format=layout)
    optimizer = torch.optim.SGD(network.parameters(), 0.002, momentum=0.9)
    mixed = case.arithmetic == 'mixed16'
    scaler = torch.amp.GradScaler(device, enabled=mixed)
    x = torch.rand(batchsize, 3, insize, insize, device=device)
    x = x.contiguous(memory_format=layout)
    t = torch.randint(0, CLASSES, (batchsize,), device=device)
    forward = compiled(torch, network) if 'compile' in way else network
    seconds, losses = [], []
    with contextlib.ExitStack() as stack:
        if way == 'compile, budget':
            stack.enter_context(half_budget())
        for _ in range(WARM_UPS + iterations):
            began = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            with saved(), torch.autocast(device, torch.float16, enabled=mixed):
                loss = torch.nn.functional.cross_entropy(forward(x), t)
            scaler.scale(loss).backward()
            losses.append(float(loss.detach()))  # which waits, as our loop does
            scaler.step(optimizer)
            scaler.update()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            print(
                f'torch {case.name}, {case.arithmetic}: {seconds[-1]:.3f} s', flush=True
            )
    median = statistics.median(seconds[WARM_UPS:])
    row = {
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


def compiled(torch: Any, network: Any) -> Any:
    """The network, compiled anew."""
    torch.compiler.reset()
    return torch.compile(network)


def half_budget() -> Any:
    """What is compiled meanwhile keeps ``BUDGET`` of its feature maps' bytes."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=BUDGET)


def saved_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a result that this run has saved; none if it has not."""
    try:
        path = os.path.join(saving.RESULTS, f'{name}.json')
        with open(path, encoding='utf-8') as file:
            rows: list[dict[str, Any]] = json.load(file)['rows']
    except (OSError, ValueError):
        return []
    return rows


def our_rows(
    limit: int, batchsize: int, kind: str = 'float32'
) -> dict[str, dict[str, Any]]:
    """What ``methods_on_gpu.py`` has saved of the same network, batch and limit."""
    limit = arithmetic.limit_of(kind, limit)
    return {
        row['planner']: row
        for row in saved_rows('gpu_methods')
        if row['arch'] == 'resnet50'
        and row['batchsize'] == batchsize
        and row.get('arithmetic', 'float32') == kind
        and row.get('iteration_seconds')
        and row.get('limit_bytes', limit) == limit
    }


def ratios(
    rows: list[dict[str, Any]], ours: dict[str, Any], base: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Our speed over theirs, and both over their own in-core time, pair by pair.

    Args:
        rows: Theirs, of one arithmetic.
        ours: Ours of the same one, by planner.
        base: Theirs with those in-core.
    """
    in_core = {
        row.get('channels_last', False): row['iteration_seconds']
        for row in base
        if row['way'] == 'in-core' and row.get('fits')
    }
    pairs = []
    for planner, row in ours.items():
        for their in rows:
            free = their['way'] in IN_CORE
            if not their.get('fits') or (planner == 'in-core') != free:
                continue
            seconds = their['iteration_seconds']
            beside = in_core.get(their.get('channels_last', False))
            pairs.append(
                {
                    'ours': planner,
                    'theirs': their.get('name', their['way']),
                    'speed_ratio': seconds / row['iteration_seconds'],
                    'our_overhead': _over(row, ours.get('in-core')),
                    'their_overhead': seconds / beside - 1 if beside else None,
                }
            )
    return pairs


def all_ratios(
    rows: list[dict[str, Any]], limit: int, batchsize: int
) -> list[dict[str, Any]]:
    """The pairs of every arithmetic."""
    everything = saved_rows(NAME) + rows

    def of(kind: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if row.get('arithmetic', 'float32') == kind]

    return [
        {'arithmetic': kind, **pair}
        for kind in arithmetic.NAMES
        for pair in ratios(
            of(kind, rows), our_rows(limit, batchsize, kind), of(kind, everything)
        )
    ]


def _over(row: dict[str, Any], base: dict[str, Any] | None) -> float | None:
    return row['iteration_seconds'] / base['iteration_seconds'] - 1 if base else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--memory-limit', default='16GiB')
    parser.add_argument('--iterations', type=int, default=3)
    parser.add_argument('--scale', type=float, default=1.0, help='of the batch')
    parser.add_argument('--insize', type=int, default=INSIZE)
    parser.add_argument('--cases', choices=CASES, default='eager')
    parser.add_argument('--result', default=NAME, help='name of its file')
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')


def main(options: argparse.Namespace) -> int:
    limit, device = parse_bytes(options.memory_limit), options.device
    result = saving.Rows(options.result, limit_bytes=limit, device=device, ratios=[])
    try:
        import torch
    except ImportError as error:
        return skip(result, f'PyTorch cannot be imported: {error}')
    if device == 'cuda' and not torch.cuda.is_available():
        return skip(result, 'PyTorch finds no GPU')
    torch.backends.cudnn.benchmark = True
    size = max(2, int(BATCHSIZE * options.scale)), options.insize
    cudnn = torch.backends.cudnn.version()
    result.tell(cudnn_benchmark=True, cudnn=cudnn, budget=BUDGET, insize=size[1])
    good = True
    for case in CASES[options.cases]:
        allowed = arithmetic.limit_of(case.arithmetic, limit)
        allowed = None if case.way in IN_CORE else allowed
        if device == 'cuda':
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            total = torch.cuda.get_device_properties(0).total_memory
            share = 1.0 if allowed is None else min(1.0, allowed / total)
            torch.cuda.set_per_process_memory_fraction(share)
        row = {**case._asdict(), 'name': case.name, 'limit_bytes': allowed}
        try:
            row |= measure(torch, case, size, device, options.iterations)
        except Exception as error:
            traceback.print_exc()
            row |= {'fits': False, 'why': str(error).split('\n')[0]}
            good = False
        result.add(row)
        result.tell(ratios=all_ratios(result.rows, limit, size[0]))
    for pair in all_ratios(result.rows, limit, size[0]):
        print(pair, flush=True)
    return 0 if good else 1


def skip(result: saving.Rows, why: str) -> int:
    """Nothing to measure here."""
    print(f'skipped: {why}', flush=True)
    result.tell(skipped=why)
    return 0
