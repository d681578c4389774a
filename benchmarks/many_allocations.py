"""Where a session's own time goes when iterations make many small allocations.

    python -m benchmarks run many_allocations [--allocations 1000 10000 100000]
        [--planner hybrid swap-all] [--layouts 10000 30000] [--profile] [--name NAME]

A made-up detector: convolutions whose feature maps matter, and between them what
Faster R-CNN does for its proposals: loops of NumPy that make arrays of some hundred
bytes to some kilobytes (and every tenth of some hundred kilobytes) and drop them at
once, after the function, at the end of the iteration or in the next one. The limit is
``SHARE`` of the way from what stays to the in-core peak. For each iteration the table
says its seconds, those of the session's own work by stage, and what the session tells.
``--layouts`` lays out arenas in which every allocation has a place, as on CUDA.
Writes JSON to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import io
import os
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import common

# isort: split
import chainer
import numpy as np

import chainer_hybridmem as hybridmem
from chainer_hybridmem.planning.layouts import exact, from_lifetimes
from chainer_hybridmem.training.recording import recorder
from chainer_hybridmem.training.session.guides import guide
from chainer_hybridmem.training.session.planning import planning

Row = dict[str, Any]

SHARE = 0.75
STAGES = {
    'build profile': (recorder.Recorder, 'build'),
    'learn': (guide.Guide, 'learn'),
    'plan': (planning.Planning, 'plan'),
    'retime': (planning.Planning, 'retime'),
    'lay out': (planning.Planning, 'lay_out'),
}
WALL = 'wall'  # of all stages
ITERATIONS = 12
CONVOLUTIONS = 12
SIDE, CHANNELS = 128, 16
BOXES = 6000  # an array of one number each is below 64 KiB, of five above
LARGE_EVERY = 10


class Loops(chainer.FunctionNode):
    """The identity, after many small arrays.

    Args:
        allocations: How many in forward; half as many in backward.
        rng: Draws their sizes.
    """

    def __init__(self, allocations: int, rng: np.random.RandomState) -> None:
        super().__init__()
        self._sizes = rng.randint(16, 600, allocations)

    def forward(self, inputs: Any) -> Any:
        """Makes them; some live as long as it runs."""
        (x,) = inputs
        scratch(self._sizes)
        return (x * np.float32(1),)

    def backward(self, indexes: Any, grads: Any) -> Any:
        """Makes half as many."""
        scratch(self._sizes[::2])
        return grads


def scratch(sizes: np.ndarray, kept: list[np.ndarray] | None = None) -> None:
    """Makes arrays of these sizes: most die at once, some at the end, some are kept."""
    waiting = []
    for i, size in enumerate(sizes.tolist()):
        count = 5 * BOXES + size if i % LARGE_EVERY == 0 else size
        made = np.empty(count, np.float32)
        if i % 7 == 3:
            waiting.append(made[:1] if i % LARGE_EVERY else made)
            del waiting[:-40]
        if kept is not None and i % 50 == 1:
            kept.append(made)


class Detector(chainer.Chain):
    """Convolutions with loops of NumPy after each.

    Args:
        allocations: About how many an iteration makes.
    """

    def __init__(self, allocations: int) -> None:
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.layers = chainer.ChainList(
                *[
                    chainer.links.Convolution2D(CHANNELS, CHANNELS, 3, pad=1)
                    for _ in range(CONVOLUTIONS)
                ]
            )
        self._each = allocations * 2 // (5 * CONVOLUTIONS)
        self.targets: list[np.ndarray] = []

    def forward(self, x: Any) -> Any:
        """The loss."""
        rng = np.random.RandomState(2)
        older, self.targets = self.targets, []
        for layer in self.layers:
            x = chainer.functions.relu(layer(x))
            (x,) = Loops(self._each, rng).apply((x,))
            scratch(rng.randint(16, 600, self._each), self.targets)
        del older
        return chainer.functions.sum(x * x)


class Training:
    """The detector, its batch and its optimizer."""

    def __init__(self, allocations: int) -> None:
        self.model = Detector(allocations)
        shape = (2, CHANNELS, SIDE, SIDE)
        self._x = np.random.RandomState(1).rand(*shape).astype(np.float32)
        self._optimizer = chainer.optimizers.MomentumSGD(1e-6).setup(self.model)

    def step(self) -> None:
        """One iteration."""
        loss = self.model(self._x)
        self.model.cleargrads()
        loss.backward()
        del loss
        self._optimizer.update()


class Told(io.TextIOBase):
    """Takes the session's lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, text: str) -> int:
        """One or more lines."""
        self.lines += [line for line in text.splitlines() if line]
        return len(text)


@contextlib.contextmanager
def watched(spent: Counter[str]) -> Iterator[None]:
    """Adds the CPU seconds of each stage to ``spent``, and the wall seconds of all."""
    before: list[tuple[Any, str, Callable[..., Any]]] = []
    for stage, (owner, name) in STAGES.items():
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, _timed(stage, getattr(owner, name), spent))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _timed(
    stage: str, function: Callable[..., Any], spent: Counter[str]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun, start = time.perf_counter(), time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[stage] += time.process_time() - start
            spent[WALL] += time.perf_counter() - begun

    return timed


def lay_out(blocks: int) -> Row:
    """Lays out an arena of a few large blocks and many that live shortly."""
    rng = np.random.RandomState(0)
    end = 2 * blocks
    large = np.arange(24) * end // 60
    size = rng.randint(60, 2400, blocks)
    size[::LARGE_EVERY] = rng.randint(100_000, 200_000, len(size[::LARGE_EVERY]))
    lower = rng.randint(0, end - 300, blocks)
    most = np.where(rng.rand(blocks) < 0.8, 4, 200)
    most = np.where(rng.rand(blocks) < 0.02, end - lower - 1, most)
    upper = lower + 1 + (rng.rand(blocks) * most).astype(int)
    trace = from_lifetimes(
        [*([4 << 20] * len(large)), *size.tolist()],
        [*large.tolist(), *lower.tolist()],
        [*(end - large - 1).tolist(), *upper.tolist()],
    )
    start = time.process_time()
    layout = exact(trace, 512)
    row = {
        'blocks': blocks,
        'cpu_seconds': time.process_time() - start,
        'gap': layout.gap,
        'found_by': layout.found_by,
    }
    print(row, flush=True)
    return row


def tight(allocations: int) -> int:
    """The limit in bytes."""
    peak, fixed = in_core_peak(allocations)
    return fixed + int((peak - fixed) * SHARE)


def in_core_peak(allocations: int) -> tuple[int, int]:
    """Peak of an iteration without a plan, and what is there before it, in bytes."""
    training = Training(allocations)
    with hybridmem.optimize(
        training.model, '1TB', planner='in-core', arena=False
    ) as own:
        for _ in range(5):
            training.step()
        assert own.profile is not None
        return own.statistics()['guided_peak_bytes'], own.profile.initial_bytes


def measure(
    allocations: int,
    planner: str,
    limit: int,
    iterations: int,
    profiler: cProfile.Profile | None,
) -> Row:
    """One session."""
    training = Training(allocations)
    told, spent = Told(), Counter[str]()
    rows: list[Row] = []
    with (
        watched(spent),
        hybridmem.optimize(
            training.model, limit, planner=planner, progress=told
        ) as own,
    ):
        for number in range(iterations):
            told.lines.clear()
            spent.clear()
            wall, cpu = time.perf_counter(), time.process_time()
            if profiler is not None:
                profiler.enable()
            training.step()
            own.finish_iteration()
            if profiler is not None:
                profiler.disable()
            rows.append(
                {
                    'iteration': number + 1,
                    'state': own.state,
                    'wall_seconds': time.perf_counter() - wall,
                    'cpu_seconds': time.process_time() - cpu,
                    'stages_wall_seconds': spent.pop(WALL, 0.0),
                    'stages': dict(spent),
                    'told': list(told.lines),
                }
            )
            print_row(rows[-1])
        profile, told_seconds = own.profile, own.statistics()['planning_seconds']
    assert profile is not None
    steady = sorted(row['cpu_seconds'] for row in rows[-4:])[1]
    return {
        'allocations': allocations,
        'profile_storages': len(profile.storages),
        'operations': len(profile.operations),
        'planner': planner,
        'limit_bytes': limit,
        'told_seconds': told_seconds,
        'spent_wall_seconds': sum(row['stages_wall_seconds'] for row in rows),
        'steady_cpu_seconds': steady,
        'longest_pause_cpu_seconds': max(sum(r['stages'].values()) for r in rows),
        'stages_cpu_seconds': {
            stage: sum(row['stages'].get(stage, 0.0) for row in rows)
            for stage in STAGES
        },
        'iterations': rows,
    }


def print_row(row: Row) -> None:
    """One iteration as text."""
    stages = ', '.join(f'{stage} {s:.2f}' for stage, s in row['stages'].items())
    print(
        f'{row["iteration"]:>3} {row["state"]:<10} {row["wall_seconds"]:7.2f} s, '
        f'CPU {row["cpu_seconds"]:7.2f} s  {stages}'
    )
    for line in row['told']:
        print(f'    {line}')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument(
        '--allocations', type=int, nargs='+', default=[1000, 10_000, 100_000]
    )
    parser.add_argument('--planner', nargs='+', default=['hybrid', 'swap-all'])
    parser.add_argument(
        '--layouts', type=int, nargs='*', default=[10_000, 30_000, 100_000]
    )
    parser.add_argument('--iterations', type=int, default=ITERATIONS)
    parser.add_argument('--profile', action='store_true', help='prints where time goes')
    parser.add_argument('--name', default='many_allocations', help='of the result file')


def main(options: argparse.Namespace) -> int:
    measure(1000, 'hybrid', tight(1000), ITERATIONS, None)  # loads what is compiled
    layouts = [lay_out(blocks) for blocks in options.layouts]
    results: list[Row] = []
    for allocations in options.allocations:
        limit = tight(allocations)
        for planner in options.planner:
            print(f'-- {allocations} allocations, {planner}', flush=True)
            profiler = cProfile.Profile() if options.profile else None
            results.append(
                measure(allocations, planner, limit, options.iterations, profiler)
            )
            if profiler is not None:
                pstats.Stats(profiler).sort_stats('tottime').print_stats(45)
    if not options.profile:
        load = os.getloadavg()[0]
        common.save(
            options.name, {'rows': results, 'layouts': layouts, 'load_average': load}
        )
    for row in results:
        stages = ', '.join(f'{s} {v:.2f}' for s, v in row['stages_cpu_seconds'].items())
        print(
            f'{row["allocations"]:>7} allocations, {row["planner"]}: told '
            f'{row["told_seconds"]:.2f} s of {row["spent_wall_seconds"]:.2f} s; '
            f'CPU: longest pause {row["longest_pause_cpu_seconds"]:.2f} s; {stages}'
        )
    return 0
