"""Where the cost of an iteration goes, for programs of small functions.

Each program trains plain and under sessions at the limits of an earlier result, in
turns. Parts of the session are timed, each without what it calls of the others: what
hooks do, decisions (what leaves, what comes back, and when), copies, and replays. The
rest is what remains between an iteration's time and plain Chainer's: counting
allocations, and what other memory does to caches. Medians of the last iterations.

    python -m benchmarks run programs.costs SOURCE [names...] --limits RESULT

Timing a part takes half a microsecond for each call, which counts as its cost.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import common, saving
from benchmarks.programs import programs
from chainer_hybridmem.training.execution.evictor import Evictor, Prefetcher
from chainer_hybridmem.training.execution.live_map import LiveMap
from chainer_hybridmem.training.execution.replayer import Restorer
from chainer_hybridmem.training.session.iterations.loop import Loop

DEFAULT = ('ptb', 'seq2seq', 'sentiment')
LIMITS = ('200 %', '75 %', '60 %')
PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    'hooks': (
        (Loop, 'forward_preprocess'),
        (Loop, '_end_forward'),
        (Loop, 'backward_preprocess'),
        (Loop, 'backward_postprocess'),
    ),
    'decisions': (
        (Loop, '_reclaim_quietly'),
        (Evictor, 'reclaim'),
        (Prefetcher, 'prefetch'),
        (Restorer, 'bring_back'),
    ),
    'copies': (
        (LiveMap, 'start_swap_out'),
        (LiveMap, 'release'),
        (LiveMap, 'start_swap_in'),
        (LiveMap, 'finish_swap_in'),
    ),
    'replays': ((Restorer, '_run'),),
}
COMPARED = 8  # iterations at the end


class Parts:
    """Seconds of each part, without those of parts that it calls."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._stack: list[float] = [0.0]  # seconds of inner parts

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A method that counts as a part."""
        seconds, stack, clock = self.seconds, self._stack, time.perf_counter

        def timed(*arguments: Any) -> Any:
            stack.append(0.0)
            start = clock()
            try:
                return function(*arguments)
            finally:
                whole = clock() - start
                seconds[part] += whole - stack.pop()
                stack[-1] += whole

        return timed

    def install(self) -> Callable[[], None]:
        """Times the methods from here on; returns what ends that."""
        methods = [(part, *method) for part, found in PARTS.items() for method in found]
        former = [(kind, name, vars(kind)[name]) for _, kind, name in methods]
        for part, kind, name in methods:
            setattr(kind, name, self.wrap(part, vars(kind)[name]))

        def end() -> None:
            for kind, name, function in former:
                setattr(kind, name, function)

        return end


def train(
    options: argparse.Namespace, name: str, limit: int | None, parts: Parts | None
) -> list[dict[str, float]]:
    """Seconds of each iteration, as a whole and by part."""
    gc.collect()
    count = options.iterations
    program = programs.make(name, options.source, count)
    rows: list[dict[str, float]] = []

    def loop() -> None:
        for i in range(count):
            before = dict(parts.seconds) if parts is not None else {}
            start = time.perf_counter()
            program.step(i)
            row = {'whole': time.perf_counter() - start}
            for part, seconds in before.items():
                assert parts is not None
                row[part] = parts.seconds[part] - seconds
            rows.append(row)

    if limit is None:
        loop()
        return rows
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        end = parts.install() if parts is not None else (lambda: None)
        try:
            with hybridmem.optimize(program.model, limit):
                loop()
        finally:
            end()
    return rows


def measure(options: argparse.Namespace, name: str, limits: dict[str, int]) -> None:
    """Adds a row for each limit to the result."""
    train(options, name, None, None)  # warms up
    for at in LIMITS:
        plain, whole, timed = [], [], []
        for _ in range(options.rounds):
            plain.append(train(options, name, None, None))
            whole.append(train(options, name, limits[at], None))
            timed.append(train(options, name, limits[at], Parts()))
        base = columns(plain, 'whole')
        row = {
            'program': name,
            'limit': at,
            'plain_seconds': statistics.median(base),
            'whole': over(columns(whole, 'whole'), base),
            'whole_timed': over(columns(timed, 'whole'), base),
        }
        for part in PARTS:
            row[part] = over(columns(timed, part), base)
        row['rest'] = row['whole_timed'] - 1 - sum(row[part] for part in PARTS)
        options.rows.add(row)


def columns(rounds: list[list[dict[str, float]]], key: str) -> list[float]:
    """For each of the last iterations the median over rounds."""
    found = [[row[key] for row in rows[-COMPARED:]] for rows in rounds]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def over(ours: list[float], base: list[float]) -> float:
    """Median share of what the same iteration takes plain Chainer."""
    return statistics.median(a / b for a, b in zip(ours, base, strict=True))


COLUMNS: dict[str, Any] = {
    'program': str,
    'limit': str,
    'plain_seconds': '{:.4f}'.format,
    'whole': '{:.2f}'.format,
    'whole_timed': '{:.2f}'.format,
    **dict.fromkeys((*PARTS, 'rest'), '{:.2f}'.format),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('source')
    parser.add_argument('names', nargs='*', metavar='name', help='of programs')
    parser.add_argument('--iterations', type=int, default=32)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument(
        '--limits', default=os.path.join(saving.RESULTS, 'programs_after.json')
    )


def main(options: argparse.Namespace) -> int:
    options.source = os.path.abspath(options.source)
    with open(options.limits, encoding='utf-8') as file:
        limits = json.load(file)['limits']
    options.rows = saving.Rows('programs_costs', iterations=options.iterations)
    for name in options.names or DEFAULT:
        measure(options, name, limits[name])
    print(common.table(options.rows.rows, COLUMNS))
    return 0
