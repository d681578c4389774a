"""Trains ResNet-50 twice from the same seed: plain, then in half of the memory.

python demo.py        # what `make train` runs; takes the options of train.py
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import train  # prepares NumPy for chainer

# isort: split
import chainer
import numpy as np
import picture_files
from chainer.training import extension

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.units import format_bytes, format_seconds

PAGE = 'report.html'
ENDS = 3  # losses that are averaged at either end, and seconds at the last
TAKES = ': about three minutes on two quiet cores'
NEXT = '.venv/bin/hybridmem run --memory-limit 60% YOUR_PROGRAM.py'
# What the iterations inside the limit take beside those of plain Chainer, as long as
# they have not been timed: learning swaps everything.
SLOWER = 1.7


class Run(NamedTuple):
    """What one training gives.

    Attributes:
        losses (list of float): Of all iterations.
        seconds (list of float): Of all iterations.
        peak_bytes (int): Most memory in use.
    """

    losses: list[float]
    seconds: list[float]
    peak_bytes: int


class Progress(extension.Extension):
    """Prints a line for each iteration: which one, its loss, and the time left.

    Args:
        name: Of the training.
        count: Number of its iterations.
        left: Seconds that are left, from the seconds of its iterations so far.
    """

    trigger = (1, 'iteration')
    priority = extension.PRIORITY_READER

    def __init__(self, name: str, count: int, left: Any) -> None:
        self._name, self._count, self._left = name, count, left
        self._began = 0.0
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Notes and prints an iteration."""
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now
        self.losses.append(float(trainer.observation['main/loss'].array))
        print(
            f'{self._name} {len(self.losses):3} of {self._count}   '
            f'loss {self.losses[-1]:6.3f}   {self.seconds[-1]:6.2f} s   '
            f'{left_text(self._left(self.seconds))}',
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says.

    Args:
        argv: Options of ``train.py``; None for those of the process.

    Returns:
        The exit status: 0, or 1 if the losses differ or the limit does not do.
    """
    parser = train.make_parser()
    given = sys.argv[1:] if argv is None else list(argv)
    args = train.parse_arguments(parser, ['--demo', *given])
    for name in ('no_hybridmem', 'epoch', 'resume', 'val'):
        if getattr(args, name):
            parser.error(f'--{name.replace("_", "-")} is for train.py, not for a demo')
    args.log_interval = 0
    try:
        return compare(args)
    except (train.UsageError, picture_files.DatasetError, HybridMemoryError) as error:
        print(f'{parser.prog}: error: {error}', file=sys.stderr)
        return 1


def compare(args: argparse.Namespace) -> int:
    """Trains plain and inside the limit; prints what comes out."""
    count = args.iterations
    # Made once to refuse bad options before anything is trained, and anew to train.
    trainer, _ = train.make_trainer(args)
    print(f'{train.describe(args, trainer)}.')
    print(
        f'{count} iterations without a limit, then the same {count} inside it'
        f'{"" if trainer.updater.device.xp is not np else TAKES}.',
        flush=True,
    )
    del trainer
    plain = train_plain(args)
    limited, session = train_limited(args, plain)
    page = Path(args.out) / PAGE
    session.report(html=str(page))
    print(describe(plain, limited, page))
    return 0 if plain.losses == limited.losses else 1


def train_plain(args: argparse.Namespace) -> Run:
    """Trains without a limit, and watches the memory."""
    options = argparse.Namespace(**{**vars(args), 'no_hybridmem': True})
    trainer, _ = train.make_trainer(options)
    count = args.iterations

    def left(seconds: list[float]) -> float:
        return statistics.mean(seconds) * (count * (1 + SLOWER) - len(seconds))

    progress = Progress('plain', count, left)
    trainer.extend(progress)
    model = trainer.updater.get_optimizer('main').target
    with hybridmem.profile_memory(model) as memory:
        trainer.run(show_loop_exception_msg=False)
    return Run(progress.losses, progress.seconds, memory.summary()['peak_bytes'])


def train_limited(args: argparse.Namespace, plain: Run) -> tuple[Run, Any]:
    """Trains inside the limit; returns the session, too."""
    trainer, memory = train.make_trainer(args)
    assert memory is not None
    count, usual = args.iterations, statistics.mean(plain.seconds)

    def left(seconds: list[float]) -> float:
        times = memory.session.iteration_times()
        if times:
            return statistics.median(times) * (count - len(seconds))
        return usual * SLOWER * (count - len(seconds))

    progress = Progress('limited', count, left)
    trainer.extend(progress)
    trainer.run(show_loop_exception_msg=False)
    figures = memory.session.statistics()
    run = Run(progress.losses, progress.seconds, figures['peak_bytes'])
    return run, memory.session


def describe(plain: Run, limited: Run, page: Path) -> str:
    """Returns what came out, in three lines."""
    count = len(plain.losses)
    first, last = (
        statistics.mean(part) for part in (plain.losses[:ENDS], plain.losses[-ENDS:])
    )
    pairs = zip(plain.losses, limited.losses, strict=True)
    differing = sum(one != other for one, other in pairs)
    losses = f'The same {count} losses, bit for bit'
    if differing:
        losses = f'OTHER LOSSES in {differing} of {count} iterations'
    slow, quick = (statistics.median(r.seconds[-ENDS:]) for r in (limited, plain))
    return (
        f'{losses}; from {first:.2f} to {last:.2f} (means of {ENDS}).\n'
        f'Peak {format_bytes(limited.peak_bytes)}, plain '
        f'{format_bytes(plain.peak_bytes)}; {format_seconds(slow)} an iteration, plain '
        f'{format_seconds(quick)}.\n'
        f'Look at {page}; next, a program of yours: {NEXT}'
    )


def left_text(seconds: float) -> str:
    """Returns how much longer it takes, for people."""
    if not seconds:
        return 'done'
    minutes, rest = divmod(math.ceil(seconds / 5) * 5, 60)
    return f'{minutes} min {rest:2} s left' if minutes else f'{rest} s left'


if __name__ == '__main__':
    sys.exit(main())
