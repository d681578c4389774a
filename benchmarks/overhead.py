"""What an iteration of a session costs over one of plain Chainer, in CPU seconds.

Each program runs in several processes, with the repair alone and with each limit, which
take their updates in turns: what slows the machine slows all of them. A ratio is the
median, over the last quarter of the updates, of a limit's CPU seconds over those of
plain Chainer beside it. Plans differ from run to run, and ratios with them: ``rounds``
are such runs, and a row has the ratio of each. With OLD, a clone of another commit, its
package takes turns with this one under each limit.

    python -m benchmarks run overhead [NAME=COMMAND ...] [--limits 200% 75% 60%]
        [--old OLD]

COMMAND is a script and its arguments, for programs beside those of ``predicted``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
from typing import Any

from benchmarks import common
from benchmarks.predicted.run import MOST_SECONDS, OWN, read_seen, start
from benchmarks.saving import Rows

LIMITS = ('200%', '75%', '60%')
COLUMNS = {
    'program': str,
    'limit': str,
    'package': str,
    'plain_cpu_seconds': '{:.4f}'.format,
    'ratio': '{:.2f}'.format,
    'ratios': lambda ratios: ' '.join(f'{ratio:.2f}' for ratio in ratios),
}


def run_in_turns(
    command: str, variants: list[tuple[str, list[str]]]
) -> list[list[float]]:
    """Runs a program with each of several clones and options of the command.

    Returns:
        CPU seconds of the updates in the last quarter of each run.

    Raises:
        RuntimeError: If the program has failed.
    """
    pipes = [os.pipe() for _ in variants]
    n = len(pipes)
    turns = [(pipes[i][0], pipes[(i + 1) % n][1]) for i in range(n)]
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [os.path.join(scratch, f'{i}.json') for i in range(len(variants))]
        processes = [
            start(command, options, output, turn, root)
            for (root, options), output, turn in zip(
                variants, outputs, turns, strict=True
            )
        ]
        os.write(pipes[0][1], b'.')
        for end in itertools.chain.from_iterable(pipes):
            os.close(end)
        for process in processes:
            process.wait(MOST_SECONDS)
        return [read_seen(output)[0] for output in outputs]


def measure(
    name: str, command: str, limits: list[str], rounds: int, old: str | None = None
) -> list[Any]:
    """A row for each limit and package."""
    own = ['--old-names']
    roots = {'this': common.ROOT} | ({'old': old} if old else {})
    kinds = list(itertools.product(limits, roots))
    variants = [
        (common.ROOT, own),
        *((roots[root], [*own, '--memory-limit', limit]) for limit, root in kinds),
    ]
    plain: list[float] = []
    ratios: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        first, *others = run_in_turns(command, variants)
        plain.append(statistics.median(first))
        for kind, seconds in zip(kinds, others, strict=True):
            pairs = zip(seconds, first, strict=False)
            ratios[kind].append(statistics.median(a / b for a, b in pairs))
    return [
        {
            'program': name,
            'limit': limit,
            'package': root,
            'plain_cpu_seconds': statistics.median(plain),
            'ratio': statistics.median(ratios[limit, root]),
            'ratios': ratios[limit, root],
        }
        for limit, root in kinds
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('programs', nargs='*', metavar='NAME=COMMAND')
    parser.add_argument('--own', nargs='*', default=list(OWN), choices=list(OWN))
    parser.add_argument('--limits', nargs='+', default=list(LIMITS))
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--old', type=os.path.abspath, default=None)


def main(options: argparse.Namespace) -> int:
    programs = {name: OWN[name] for name in options.own}
    programs |= dict(one.split('=', 1) for one in options.programs)
    file = 'host_overhead_beside_old' if options.old else 'host_overhead'
    rows = Rows(file, rounds=options.rounds)
    for name, command in programs.items():
        found = measure(name, command, options.limits, options.rounds, options.old)
        for row in found:
            rows.add(row)
        print(common.table(found, COLUMNS), flush=True)
    return 0
