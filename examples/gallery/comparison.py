"""What the examples of the gallery share: one training, plain and inside a limit.

A program is trained three times from the same seed: plain for its losses and seconds,
plain while its memory is watched, and inside ``hybridmem.optimize``. Losses and
parameters have to be the same, bit for bit. The picture shows the memory of the last
iteration of both.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chainer_hybridmem as hybridmem  # before chainer

# isort: split
import chainer
from chainer.backends import cuda
from matplotlib.figure import Figure

from chainer_hybridmem.planning.planners import DEFAULT
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.training.devices import parse_device
from chainer_hybridmem.training.recompute.drawing import seed_gpu
from chainer_hybridmem.units import format_bytes

TIMED = 3  # the last third of the iterations is timed
MIB = 2**20


class Program(NamedTuple):
    """A training that has not begun.

    Attributes:
        models: What :func:`chainer_hybridmem.optimize` gets.
        step: Trains the batch with this number; returns its loss.
    """

    models: list[chainer.Link]
    step: Callable[[int], float]


class Defaults(NamedTuple):
    """What an example takes if its command line says nothing else.

    Attributes:
        batchsize: Training examples per iteration.
        width: Channels or units of the smallest layer.
        share: Memory limit over the peak of plain Chainer.
        iterations: In each of the three runs.
    """

    batchsize: int
    width: int
    share: float
    iterations: int = 24


def learn(model: chainer.Link, optimizer: chainer.Optimizer, *batch: Any) -> float:
    """Trains one iteration of a model that returns its loss; returns the loss."""
    loss = model(*(send(model.device, array) for array in batch))
    model.cleargrads()
    loss.backward()
    optimizer.update()
    return float(loss.array)


def send(device: Any, batch: Any) -> Any:
    """Returns arrays, or lists of them, on a device."""
    if isinstance(batch, list):
        return [send(device, array) for array in batch]
    return device.send(batch)


class Run(NamedTuple):
    """What one run gives.

    Attributes:
        losses: Of all iterations.
        seconds: Of all iterations.
        cpu_seconds: Of all iterations, of all threads.
        digest: Of all parameters at the end.
    """

    losses: list[float]
    seconds: list[float]
    cpu_seconds: list[float]
    digest: str


class Curve(NamedTuple):
    """Memory of one iteration.

    Attributes:
        seconds: Since the iteration began, one for each sample.
        peak_bytes: The most in use since the sample before.
    """

    seconds: list[float]
    peak_bytes: list[int]


def main(
    name: str,
    text: str | None,
    make: Callable[[argparse.Namespace], Program],
    defaults: Defaults,
    arguments: Sequence[str] | None = None,
    writes: bool = True,
) -> int:
    """Runs an example from its command line.

    Args:
        name: Of the example, and of the files that it writes.
        text: Its docstring.
        make: Makes the program, the same one each time.
        defaults: For the options.
        arguments: The command line; None for that of this process.
        writes: Whether this process prints figures and writes files.

    Returns:
        int: 0 if both runs end with the same bits within the limit, else 1.
    """
    options = parse(text or name, defaults, arguments)
    folder = pathlib.Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = compare(make, options)
    except (hybridmem.HybridMemoryError, OSError) as error:
        print(f'{name}: {error}', file=sys.stderr)
        return 1
    if writes:
        print(describe(found), flush=True)
        print(f'The picture is {write(found, name, folder)}.')
    within = found['limited_peak_bytes'] <= found['limit_bytes']
    return 0 if found['equal'] and within else 1


def write(found: dict[str, Any], name: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes figures and picture into a folder; returns the path of the picture."""
    picture = folder / f'{name}.png'
    draw(found, picture)
    figures = {key: value for key, value in found.items() if not key.endswith('curve')}
    (folder / f'{name}.json').write_text(json.dumps(figures, indent=1) + '\n')
    return picture


def parse(
    text: str, defaults: Defaults, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Returns the options of an example; bad ones end the process."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, help in (
        ('batchsize', 'training examples per iteration'),
        ('width', 'channels or units of the smallest layer'),
        ('iterations', 'in each of the three runs'),
    ):
        value = getattr(defaults, name)
        parser.add_argument(
            f'--{name}', type=int, default=value, metavar='N', help=f'{help}: {value}'
        )
    parser.add_argument(
        '--share',
        type=float,
        default=defaults.share,
        help=f'memory limit over the peak of plain Chainer: {defaults.share}',
    )
    parser.add_argument(
        '--link-bandwidth',
        metavar='RATE',
        help='slows copies down to what a bus would do, such as 100MB/s',
    )
    parser.add_argument(
        '--device',
        default='cpu',
        help='where it trains, cpu or a GPU such as cuda: cpu',
    )
    parser.add_argument(
        '--planner', default=DEFAULT, help=f'who plans the limited run: {DEFAULT}'
    )
    parser.add_argument(
        '--out', default='result', help='folder of picture and figures: result'
    )
    options = parser.parse_args(arguments)
    for name, least in (('batchsize', 1), ('width', 1), ('iterations', 8)):
        if getattr(options, name) < least:
            parser.error(
                f'--{name} {getattr(options, name)} is too small; {least} or more.'
            )
    if not 0 < options.share < 1:
        parser.error(f'--share {options.share} is no limit; try {defaults.share}.')
    return options


def compare(
    make: Callable[[argparse.Namespace], Program], options: argparse.Namespace
) -> dict[str, Any]:
    """Trains plain and inside the limit; returns the figures and both curves."""
    count = options.iterations
    plain = train(begin(make, options), count)
    peak, plain_curve = watch_plain(make, options)
    limit = int(peak * options.share)
    program = begin(make, options)
    bandwidth = options.link_bandwidth
    with hybridmem.optimize(
        program.models, limit, options.planner, link_bandwidth=bandwidth
    ) as session:
        limited = train(program, count)
        with hybridmem.profile_memory(share=0) as memory:
            start = time.perf_counter()
            program.step(count)
            end = time.perf_counter()
    limited_curve = curve_of(memory, 0, end - start)
    last = slice(-max(1, count // TIMED), None)
    pairs = zip(limited.cpu_seconds[last], plain.cpu_seconds[last], strict=True)
    figures = session.statistics()
    return {
        'iterations': count,
        'plain_peak_bytes': peak,
        'limit_bytes': limit,
        'limited_peak_bytes': figures['peak_bytes'],
        'plain_seconds': statistics.median(plain.seconds[last]),
        'limited_seconds': statistics.median(limited.seconds[last]),
        'plain_cpu_seconds': statistics.median(plain.cpu_seconds[last]),
        'limited_cpu_seconds': statistics.median(limited.cpu_seconds[last]),
        'ratio': statistics.median(ours / theirs for ours, theirs in pairs),
        'guided_iterations': figures['guided_iterations'],
        'decisions': decisions_of(session.plan),
        'equal': plain.losses == limited.losses and plain.digest == limited.digest,
        'first_loss': plain.losses[0],
        'last_loss': plain.losses[-1],
        'plain_curve': plain_curve,
        'limited_curve': limited_curve,
    }


def begin(
    make: Callable[[argparse.Namespace], Program], options: argparse.Namespace
) -> Program:
    """Makes the program, on the device that it trains on."""
    gc.collect()  # of the run before, nothing is left there
    program = make(options)
    kind, number = parse_device(options.device)
    if kind == 'cuda':
        device = chainer.get_device(f'@cupy:{number or 0}')
        device.use()
        seed_gpu(0)
        chainer.global_config.cudnn_deterministic = True  # bits are compared
        for model in program.models:
            model.to_device(device)
    return program


def decisions_of(plan: Plan | None) -> dict[str, int] | None:
    """Returns how many feature maps a plan keeps, swaps and recomputes."""
    if plan is None:
        return None
    return {action.value: plan.count(action) for action in Action}


def train(program: Program, count: int) -> Run:
    """Trains so many iterations."""
    losses, seconds, cpu_seconds = [], [], []
    for i in range(count):
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(program.step(i))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    digest = hashlib.sha256()
    for model in program.models:
        for name, parameter in sorted(model.namedparams()):
            digest.update(name.encode())
            digest.update(cuda.to_cpu(parameter.array).tobytes())
    return Run(losses, seconds, cpu_seconds, digest.hexdigest())


def watch_plain(
    make: Callable[[argparse.Namespace], Program], options: argparse.Namespace
) -> tuple[int, Curve]:
    """Returns the peak of plain Chainer in bytes, and its last iteration."""
    gc.collect()
    with hybridmem.profile_memory(device=options.device, share=0) as memory:
        entered = time.perf_counter()
        program = begin(make, options)
        for i in range(options.iterations):
            program.step(i)
        start = time.perf_counter()
        program.step(options.iterations)
        end = time.perf_counter()
    curve = curve_of(memory, start - entered, end - entered)
    return memory.summary()['peak_bytes'], curve


def curve_of(memory: Any, start: float, end: float) -> Curve:
    """Returns the samples of a watched run between two moments, in seconds."""
    samples = [s for s in memory.samples if start <= s.seconds <= end]
    return Curve(
        [sample.seconds - start for sample in samples],
        [sample.peak_bytes for sample in samples],
    )


def describe(found: dict[str, Any]) -> str:
    """Returns the figures as a table for people."""
    bits = 'the same bits' if found['equal'] else 'OTHER BITS'
    head = f'{"":10}{"peak":>12}{"limit":>12}{"s / iteration":>16}{"CPU s":>9}'
    lines = [head]
    for key in ('plain', 'limited'):
        limit = format_bytes(found['limit_bytes']) if key == 'limited' else 'none'
        lines.append(
            f'{key:10}{format_bytes(found[f"{key}_peak_bytes"]):>12}{limit:>12}'
            f'{found[f"{key}_seconds"]:16.3f}{found[f"{key}_cpu_seconds"]:9.3f}'
        )
    lines.append(
        f'CPU time {found["ratio"]:.2f} times that of plain Chainer; loss from '
        f'{found["first_loss"]:.3f} to {found["last_loss"]:.3f}; {bits}.'
    )
    if found['decisions'] is None:
        lines.append('No plan: no iteration came again.')
    else:
        counts = ', '.join(f'{n} {name}' for name, n in found['decisions'].items())
        lines.append(f'The last plan: {counts}.')
    return '\n'.join(lines)


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the memory of one iteration, plain and limited, against the limit.

    Args:
        found: What :func:`compare` returns.
        path: Picture to write.
    """
    figure = Figure(figsize=(8, 3.4), layout='constrained')
    axes = figure.subplots()
    for key, colour in (('plain', '#8d8d8d'), ('limited', '#3b7dd8')):
        curve = found[f'{key}_curve']
        axes.fill_between(
            curve.seconds,
            [nbytes / MIB for nbytes in curve.peak_bytes],
            step='pre',
            alpha=0.3 if key == 'plain' else 0.5,
            color=colour,
            label=f'{key}, peak {format_bytes(max(curve.peak_bytes))}',
        )
    limit = found['limit_bytes']
    axes.axhline(
        limit / MIB,
        color='#d64545',
        linestyle='--',
        label=f'limit {format_bytes(limit)}',
    )
    axes.set(xlabel='seconds of one iteration', ylabel='memory in use, MiB')
    axes.set_xlim(0)
    axes.set_ylim(0, 1.05 * found['plain_peak_bytes'] / MIB)
    axes.legend(loc='upper center', bbox_to_anchor=(0.5, 1.18), ncols=3, frameon=False)
    figure.savefig(path, dpi=100)
