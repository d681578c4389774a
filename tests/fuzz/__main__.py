"""Command line: ``python -m tests.fuzz --seed 0 --minutes 10``, from the repository.

``FUZZ_DEVICE=cuda`` in the environment lets the cases run with CuPy.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Iterable

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from chainer_hybridmem.training.chainer_access import compat

# isort: split
from fuzz.cases import Case, draw
from fuzz.checking import Result, check, shrunk
from fuzz.places import place

SHRINKING_SECONDS = 60.0
TOLD_EVERY = 100  # cases
ENOUGH = 20  # cases: if none of so many is valid, the run has tried nothing
STRIDE = 1 << 20  # seeds of one run; another run's begin beyond them


def main() -> int:
    """Runs cases until the time is over; 1 if one has failed or nothing was tried."""
    parser = argparse.ArgumentParser(prog='python -m tests.fuzz', description=__doc__)
    parser.add_argument('--seed', type=int, default=0, help='of the run')
    parser.add_argument('--minutes', type=float, default=10.0)
    parser.add_argument('--cases', type=int, default=STRIDE, help='at most so many')
    parser.add_argument('--jobs', type=int, default=1, help='processes')
    parser.add_argument('--case', type=int, help='run only the case of this seed')
    parser.add_argument('--replay', help='run only the cases of this file, one a line')
    parser.add_argument('--shrink', action='store_true', help='make failures smaller')
    arguments = parser.parse_args()
    problem = _device_problem()
    if problem:
        parser.error(problem)
    if arguments.case is not None:
        return _report([draw(arguments.case)], arguments.shrink)
    if arguments.replay:
        lines = pathlib.Path(arguments.replay).read_text().splitlines()
        cases = [Case.from_json(line) for line in lines if line.startswith('{')]
        return _report(cases, arguments.shrink)
    return _run(arguments)


def _device_problem() -> str:
    """Why cases cannot run where ``FUZZ_DEVICE`` says; empty if they can."""
    name = os.environ.get('FUZZ_DEVICE', '')
    if name not in ('', 'host', 'cuda'):
        return f'FUZZ_DEVICE is {name!r}; it must be host or cuda'
    if name == 'cuda' and not compat.cuda_available():
        return (
            'FUZZ_DEVICE=cuda needs CuPy and a GPU; without them: make cuda-emulator, '
            'then make fuzz'
        )
    return ''


def _report(cases: list[Case], shrink: bool) -> int:
    """Runs given cases and tells all about them."""
    failures = 0
    for case in cases:
        result = check(case)
        failures += result.failed
        if result.failed and shrink:
            case = shrunk(case, result.outcome, SHRINKING_SECONDS)
            result = check(case)
        print(f'{result.outcome}: {result.detail or result}')
        print(place().adapted(case).to_json(), flush=True)
    return int(failures > 0)


def _one(seed: int) -> tuple[int, str, Result]:
    case = draw(seed)
    return seed, case.session['planner'], check(case)


class _Totals:
    """What has been seen so far."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.planners: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.sums: collections.Counter[str] = collections.Counter()
        self.failures: list[int] = []
        self.last_invalid = ''

    def add(self, seed: int, planner: str, result: Result) -> None:
        """Counts a case, and tells if it has failed."""
        self.outcomes[result.outcome] += 1
        self.planners[planner][result.outcome] += 1
        if result.outcome == 'invalid':
            self.last_invalid = result.detail
        self.sums['guided'] += result.guided
        self.sums['deviations'] += result.deviations
        self.sums['refusals'] += result.refusals
        self.sums['moving'] += any(result.moved)
        self.sums['sources'] += bool(result.sources)
        if result.failed:
            self.failures.append(seed)
            print(f'FAILED {result.outcome}: {result.detail}')
            print(f'  python -m tests.fuzz --case {seed} --shrink', flush=True)
        count = sum(self.outcomes.values())
        if count % TOLD_EVERY == 0:
            seconds = time.monotonic() - self.begin
            print(f'{count} cases, {seconds:.0f} s: {dict(self.outcomes)}', flush=True)

    def nothing_tried(self) -> bool:
        """Whether plain Chainer could train none of many cases; says so."""
        count, invalid = sum(self.outcomes.values()), self.outcomes['invalid']
        if count < ENOUGH or invalid < count:
            return False
        print(
            f'FAILED: plain Chainer could train none of the {count} cases, '
            f'so nothing was compared; the last one said {self.last_invalid}'
        )
        return True

    def report(self) -> None:
        """Prints all counts."""
        seconds, sums = time.monotonic() - self.begin, self.sums
        count = sum(self.outcomes.values())
        print(f'{count} cases in {seconds:.0f} s: {dict(self.outcomes)}')
        print(
            f'{sums["guided"]} guided iterations, '
            f'{sums["deviations"]} left their plan; '
            f'{sums["moving"]} cases end with a plan that moves maps, '
            f'{sums["sources"]} with one that lets something stay for replays; '
            f'{sums["refusals"]} limits were too small'
        )
        for planner, counts in sorted(self.planners.items()):
            print(f'  {planner:22} {dict(counts)}')
        print(f'{len(self.failures)} failures')
        for seed in self.failures:
            print(f'  python -m tests.fuzz --case {seed} --shrink')


def _run(arguments: argparse.Namespace) -> int:
    totals = _Totals()
    end = totals.begin + 60 * arguments.minutes
    first = arguments.seed * STRIDE
    # Ctrl-C ends the run as the time does.
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        seeds = iter(range(first, first + arguments.cases))
        results: Iterable[tuple[int, str, Result]] = map(_one, seeds)
        if arguments.jobs > 1:
            context = multiprocessing.get_context('spawn')
            pool = stack.enter_context(context.Pool(arguments.jobs))
            # A spawned process does not find the names of this one's __main__.
            named = importlib.import_module('fuzz.__main__')
            results = pool.imap_unordered(named._one, seeds)
        for seed, planner, result in results:
            totals.add(seed, planner, result)
            if time.monotonic() > end:
                break
    totals.report()
    return int(bool(totals.failures) or totals.nothing_tried())


if __name__ == '__main__':
    sys.exit(main())
