"""What a session costs before its plan is followed, in iterations of plain Chainer.

Warm-up, profiling and planning: the time of the first iterations under a session, less
what the later ones take, over a median iteration of plain Chainer. Once with an empty
`cache_dir` and once with the plan that the first run has left there.

    python -m benchmarks run programs.first SOURCE [names...] --limits RESULT
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import common, saving
from benchmarks.programs import programs

DEFAULT = ('resnet50', 'googlenet', 'ptb')
STEADY = 4  # iterations at the end


def train(name: str, source: str, count: int, **session: Any) -> list[float]:
    """Seconds of each iteration; plain without arguments of a session."""
    program, seconds = programs.make(name, source, count), []

    def loop() -> None:
        for i in range(count):
            start = time.perf_counter()
            program.step(i)
            seconds.append(time.perf_counter() - start)

    if not session:
        loop()
        return seconds
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with hybridmem.optimize(program.model, **session):
            loop()
    return seconds


def extra(seconds: list[float], plain_seconds: float) -> float:
    """Plain iterations that the first ones cost beyond what the last ones do."""
    steady = statistics.median(seconds[-STEADY:])
    return (sum(seconds) - steady * len(seconds)) / plain_seconds


def measure(options: argparse.Namespace, name: str, limit: int) -> dict[str, Any]:
    """The figures of one program."""
    count = options.iterations
    train(name, options.source, 2)  # warms up
    fresh, cached, steady, bases = [], [], [], []
    for _ in range(options.rounds):
        plain = train(name, options.source, count)
        base = statistics.median(plain[2:])
        bases.append(base)
        with tempfile.TemporaryDirectory() as folder:
            session = {'memory_limit': limit, 'cache_dir': folder}
            first = train(name, options.source, count, **session)
            again = train(name, options.source, count, **session)
        fresh.append(extra(first, base))
        cached.append(extra(again, base))
        steady.append(statistics.median(first[-STEADY:]) / base)
    return {
        'program': name,
        'limit_bytes': limit,
        'plain_seconds': statistics.median(bases),
        'steady': statistics.median(steady),
        'extra_iterations': statistics.median(fresh),
        'extra_iterations_cached': statistics.median(cached),
    }


COLUMNS: dict[str, Any] = {
    'program': str,
    'limit_bytes': '{:,}'.format,
    'plain_seconds': '{:.3f}'.format,
    'steady': '{:.2f}'.format,
    'extra_iterations': '{:.1f}'.format,
    'extra_iterations_cached': '{:.1f}'.format,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('source')
    parser.add_argument('names', nargs='*', metavar='name', help='of programs')
    parser.add_argument('--iterations', type=int, default=12)
    parser.add_argument('--rounds', type=int, default=1)
    parser.add_argument('--limits', nargs='+', required=True, help='earlier results')
    parser.add_argument('--at', default='75 %', help='which of their limits')


def main(options: argparse.Namespace) -> int:
    options.source = os.path.abspath(options.source)
    limits: dict[str, dict[str, int]] = {}
    for path in options.limits:
        with open(path, encoding='utf-8') as file:
            limits |= json.load(file)['limits']
    rows = saving.Rows('programs_first', iterations=options.iterations)
    for name in options.names or DEFAULT:
        rows.add(measure(options, name, limits[name][options.at]))
    print(common.table(rows.rows, COLUMNS))
    return 0
