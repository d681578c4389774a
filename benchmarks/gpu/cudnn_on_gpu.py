"""Does cuDNN compute what it must, and how fast is it? The first minutes on a GPU.

First each of Chainer's functions that ask cuDNN is compared with itself without it, in
three types at a time, in processes that may crash; then float32 with TF32; then
networks are trained in-core, float32 first, with algorithms chosen in several ways.
Every row is saved as it comes.

    python -m benchmarks run gpu.cudnn_on_gpu [--scale 0.01] [--insize 64] [--jobs 1]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import saving
from benchmarks.gpu import arithmetic, children
from chainer_hybridmem.units import parse_bytes

NAME = 'gpu_cudnn'
DTYPES = ('float32', 'float16', 'float64')
BATCHES = {'resnet50': 256, 'googlenet': 512, 'alexnet': 1024}
ITERATIONS = 5
# How algorithms are chosen: autotune, bytes of workspace, and Chainer's configuration.
SETTINGS: dict[str, tuple[bool, str | None, dict[str, Any]]] = {
    'default': (False, None, {}),
    'autotune': (True, None, {}),
    'tuned': (True, arithmetic.TUNED_WORKSPACE, {}),
    'tuned, persistent': (
        True,
        arithmetic.TUNED_WORKSPACE,
        {'cudnn_fast_batch_normalization': True},
    ),
    'without cuDNN': (False, None, {'use_cudnn': 'never'}),
}
SPEEDS = (
    ('resnet50', 'float32', 'tuned'),
    ('resnet50', 'float32', 'default'),
    ('resnet50', 'tf32', 'tuned'),
    ('resnet50', 'mixed16', 'tuned'),
    ('googlenet', 'float32', 'tuned'),
    ('alexnet', 'float32', 'tuned'),
    ('resnet50', 'float32', 'autotune'),
    ('resnet50', 'float32', 'tuned, persistent'),
    ('resnet50', 'mixed16', 'tuned, persistent'),
    ('googlenet', 'tf32', 'tuned'),
    ('alexnet', 'tf32', 'tuned'),
    ('googlenet', 'mixed16', 'tuned'),
    ('alexnet', 'mixed16', 'tuned'),
    ('resnet50', 'float32', 'without cuDNN'),
)
SILENCE_SECONDS = 90.0  # of a case: the first one loads, compiles and measures
Row = dict[str, Any]


def speed(arch: str, kind: str, setting: str, scale: float, insize: int) -> Row:
    """Seconds of an in-core iteration of plain Chainer."""
    import chainer

    from benchmarks import methods
    from benchmarks.gpu import cudnn_choices

    batchsize = max(1, int(BATCHES[arch] * scale))
    autotune, workspace, config = SETTINGS[setting]
    with contextlib.ExitStack() as stack:
        stack.enter_context(arithmetic.using(kind))
        nbytes = None if workspace is None else parse_bytes(workspace)
        stack.enter_context(arithmetic.tuned(autotune, nbytes))
        for key, value in config.items():
            stack.enter_context(chainer.using_config(key, value))
        choices = stack.enter_context(cudnn_choices.recorded())
        row = methods.plain(arch, batchsize, ITERATIONS, insize)
    row |= {'arithmetic': kind, 'setting': setting}
    row |= {'pictures_per_second': batchsize / row['iteration_seconds']}
    row |= cudnn_choices.sum_up(choices)
    if (arch, setting) in (('resnet50', 'default'), ('resnet50', 'tuned')):
        row['choices'] = choices
    return row


def compare_arithmetics() -> Iterator[Row]:
    """float32 and TF32 beside float64: are float32's factors whole?"""
    import chainer.functions as F

    from benchmarks.gpu.cudnn_families import WAYS, Family, expect, measure

    shapes = {'x': (8, 64, 14, 14), 'W': (64, 64, 3, 3)}
    family = Family(shapes, lambda v: F.convolution_2d(v.x, v.W, pad=1))
    expected = expect(family, 'float32')
    for way, config in WAYS.items():
        found = {}
        for kind in ('float32', 'tf32'):
            with arithmetic.using(kind):
                found[kind] = measure(family, 'float32', expected, config)
        exact, rounded = (f['largest_difference'] for f in found.values())
        yield {
            'way': way,
            'float32_difference': exact,
            'tf32_difference': rounded,
            'repeats': all(f['repeats'] for f in found.values()),
            'agrees': 4 * exact < rounded < 1e-2,
        }


def record_calls() -> set[str]:
    """Names of cuDNN's functions, as they are called from now on.

    Comes before Chainer is imported, which takes some of them by name.
    """
    from chainer_hybridmem.training.cudnn.functions import FUNCTIONS

    called: set[str] = set()

    def watch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            called.add(name)
            return function(*args)

        return call

    for name, function in FUNCTIONS.items():
        FUNCTIONS[name] = watch(name, function)
    return called


def serve(options: argparse.Namespace) -> int:
    """Runs the cases of another process."""
    import chainer_hybridmem  # noqa: F401  makes cuDNN known

    comparing = any(name.split('/')[0] in DTYPES for name in options.cases)
    called = record_calls() if comparing else set()  # it would cost speeds some time
    import chainer  # noqa: F401
    import cupy

    def compare(family: str, dtype: str) -> Iterator[Row]:
        from benchmarks.gpu import cudnn_families

        yield cudnn_families.compare(family, dtype, called)

    def measure(arch: str, kind: str, setting: str) -> Iterator[Row]:
        yield speed(arch, kind, setting, options.scale, options.insize)

    def answers() -> bool:
        try:
            cupy.cuda.Device().synchronize()
            return bool(cupy.arange(3).sum() == 3)
        except cupy.cuda.runtime.CUDARuntimeError:
            return False

    cases: dict[str, Callable[[], Iterator[Row]]] = {}
    for name in options.cases:
        first, *rest = name.split('/')
        if first in DTYPES:
            cases[name] = functools.partial(compare, rest[0], first)
        elif first == 'speed':
            cases[name] = functools.partial(measure, *rest)
        else:
            cases[name] = compare_arithmetics
    return children.serve(cases, options.cases, answers)


def judge(rows: list[Row], families: dict[str, tuple[str, ...]]) -> Row:
    """How many families agree in all of their types, and which do not."""
    good: dict[str, set[str]] = {family: set() for family in families}
    for row in rows:
        if row.get('agrees'):
            good[row['family']].add(row['dtype'])
    bad = {f: [d for d in families[f] if d not in good[f]] for f in families}
    bad = {family: lacking for family, lacking in bad.items() if lacking}
    count = len(families) - len(bad)
    says = f'{count} of {len(families)} families agree'
    if bad:
        details = (f'{family} ({", ".join(types)})' for family, types in bad.items())
        says += f'; not: {"; ".join(details)}'
    return {'agree': count, 'families': len(families), 'says': says}


def show(row: Row) -> str:
    """A row in one line."""
    name = row['case']
    if 'iteration_seconds' in row:
        told = f'{row["iteration_seconds"]:.3f} s, '
        told += f'{row["pictures_per_second"]:.0f} pictures/s'
        if 'algorithms' in row:
            largest = row['largest_workspace_bytes'] / 2**20
            told += f', workspaces up to {largest:.0f} MiB, {row["algorithms"]}'
        return f'{name}: {told}'
    if 'float32_difference' in row:
        told = f'float32 {row["float32_difference"]:.1e}, '
        told += f'TF32 {row["tf32_difference"]:.1e}'
        name = f'{name}, {row["way"]}'
    else:
        far = row.get('largest_difference')
        told = 'no result' if far is None else f'{far:.1e} ({row["where"]})'
    verdict = 'agrees' if row.get('agrees') else 'DOES NOT AGREE'
    verdict = verdict if 'agrees' in row else 'FAILED'
    repeats = '' if row.get('repeats', True) else ', other bits when repeated'
    ways = row.get('ways', {})
    other = [way for way, one in ways.items() if not one.get('repeats', True)]
    repeats += f' ({"; ".join(other)})' if len(ways) > 1 and other else ''
    why = f': {row["why"]}' if 'why' in row else ''
    return f'{name}: {verdict}, {told}{repeats}{why}'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--scale', type=float, default=1.0, help='of the batches')
    parser.add_argument('--insize', type=int, default=224, help='of the pictures')
    parser.add_argument('--jobs', type=int, default=3, help='types compared at a time')
    parser.add_argument('--speeds', type=int, default=len(SPEEDS), help='how many')
    parser.add_argument('--cases', nargs='+', help='runs these and tells their rows')


def main(options: argparse.Namespace) -> int:
    if options.cases:
        return serve(options)
    began, lock = time.monotonic(), threading.Lock()
    from benchmarks.gpu.cudnn_families import FAMILIES
    from chainer_hybridmem.training.chainer_access import compat

    result = saving.Rows(NAME, agree=None, cudnn=arithmetic.cudnn_version())
    if arithmetic.cudnn_version() is None or compat.cupy_has_cudnn():
        says = 'Not judged: Chainer has no cuDNN, or that of CuPy itself'
        print(says, flush=True)
        result.tell(says=says)
        return 1
    command = [sys.executable, '-m', 'benchmarks', 'run', 'gpu.cudnn_on_gpu']
    command += ['--scale', str(options.scale), '--insize', str(options.insize)]
    command += ['--cases']
    run = functools.partial(children.run, command, silence_seconds=SILENCE_SECONDS)

    def keep(row: Row) -> None:
        with lock:
            result.add({**row, 'second': time.monotonic() - began})
            print(show(row), flush=True)

    families = {name: tuple(family.dtypes) for name, family in FAMILIES.items()}

    def names_of(dtype: str) -> list[str]:
        return [f'{dtype}/{f}' for f, types in families.items() if dtype in types]

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        compared = [pool.submit(run, names_of(dtype), keep) for dtype in DTYPES]
    for future in compared:
        future.result()
    verdict = judge(result.rows, families)
    result.tell(**verdict, seconds=time.monotonic() - began)
    print(verdict['says'], flush=True)
    speeds = [f'speed/{"/".join(what)}' for what in SPEEDS[: options.speeds]]
    run(['arithmetic', *speeds], keep)
    result.tell(seconds=time.monotonic() - began)
    print(verdict['says'], flush=True)
    bad = [row for row in result.rows if 'why' in row or row.get('agrees') is False]
    return 1 if bad else 0
