"""Command line: ``python -m tests.fuzz --seed 0 --minutes 10``, from the repository."""

from __future__ import annotations

import argparse
import collections
import gc
import multiprocessing
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from fuzz.cases import Case, draw
from fuzz.checking import Result, check, planner_of, shrunk

SHRINKING_SECONDS = 60.0
STRIDE = 1 << 20  # seeds of one run; another run's begin beyond them


def main() -> int:
    """Runs cases until the time is over; 1 if one has failed."""
    parser = argparse.ArgumentParser(prog='python -m tests.fuzz', description=__doc__)
    parser.add_argument('--seed', type=int, default=0, help='of the run')
    parser.add_argument('--minutes', type=float, default=10.0)
    parser.add_argument('--cases', type=int, default=STRIDE, help='at most so many')
    parser.add_argument('--jobs', type=int, default=1, help='processes')
    parser.add_argument('--case', type=int, help='run only the case of this seed')
    parser.add_argument('--replay', help='run only the cases of this file, one a line')
    parser.add_argument('--shrink', action='store_true', help='make failures smaller')
    arguments = parser.parse_args()
    if arguments.case is not None:
        return _report([draw(arguments.case)], arguments.shrink)
    if arguments.replay:
        lines = pathlib.Path(arguments.replay).read_text().splitlines()
        cases = [Case.from_json(line) for line in lines if line.startswith('{')]
        return _report(cases, arguments.shrink)
    return _run(arguments)


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
        print(case.to_json(), flush=True)
    return int(failures > 0)


def _one(seed: int) -> tuple[int, str, Result]:
    case = draw(seed)
    return seed, planner_of(case), check(case)


def _run(arguments: argparse.Namespace) -> int:
    begin = time.monotonic()
    end = begin + 60 * arguments.minutes
    seeds = iter(range(arguments.seed * STRIDE, arguments.seed * STRIDE + arguments.cases))
    outcomes: collections.Counter[str] = collections.Counter()
    by_planner: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    totals: collections.Counter[str] = collections.Counter()
    failures: list[int] = []
    gc.freeze()
    with multiprocessing.get_context('spawn').Pool(arguments.jobs) as pool:
        results = (
            map(_one, seeds) if arguments.jobs == 1 else pool.imap_unordered(_one, seeds)
        )
        for seed, planner, result in results:
            outcomes[result.outcome] += 1
            by_planner[planner][result.outcome] += 1
            totals['guided'] += result.guided
            totals['refusals'] += result.refusals
            totals['deviations'] += result.deviations
            totals['moved'] += any(result.moved)
            if result.failed:
                failures.append(seed)
                print(f'FAILED {result.outcome}: {result.detail}')
                print(f'  python -m tests.fuzz --case {seed} --shrink', flush=True)
            if time.monotonic() > end:
                break
    count, seconds = sum(outcomes.values()), time.monotonic() - begin
    print(f'{count} cases in {seconds:.0f} s: {dict(outcomes)}')
    print(
        f'{totals["guided"]} guided iterations, {totals["deviations"]} left their plan; '
        f'{totals["moved"]} last plans move maps'
    )
    for planner, counts in sorted(by_planner.items()):
        print(f'  {planner:22} {dict(counts)}')
    print(f'{len(failures)} failures' + ''.join(f'\n  --case {s}' for s in failures))
    return int(bool(failures))


if __name__ == '__main__':
    sys.exit(main())
