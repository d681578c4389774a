"""Every planner on every shipped profile, from the least memory to the in-core peak.

    python -m benchmarks run rivals.compare [--sweep N] [--profile NAME ...] [--redraw]

What ``hybridmem compare --sweep`` does, kept as a result. ``exact`` is left out (it
starts from hybrid's plan and proves), and so is ``manual`` (it does what it is told).
Fails if any planner is faster than the default one anywhere. Writes
``rivals_compare.json``, ``.md`` and ``.png`` to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from PIL import Image

from benchmarks import common, saving
from chainer_hybridmem import shipped_profiles
from chainer_hybridmem.commands import compare, figures
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.planning.planners import DEFAULT, names
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.reporting import comparison
from chainer_hybridmem.reporting.comparison import summary

Row = dict[str, Any]

NAME = 'rivals_compare'
LEFT_OUT = ('exact', 'manual')
BULKY = ('reason',)
COLORS = 64  # of the picture, which has few
LEVEL = 1e-6  # of the time; a plan this much faster is as fast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--sweep', type=int, default=6, help='limits for each profile')
    parser.add_argument('--profile', nargs='+', default=shipped_profiles())
    parser.add_argument('--redraw', action='store_true', help='from the JSON file')


def main(options: argparse.Namespace) -> int:
    if options.redraw:
        body = saving.read(NAME)
        publish(body['rows'], body['peaks'])
        return 0
    planners = [name for name in names() if name not in LEFT_OUT]
    problems = {
        path: make_problem(library.load_profile(path)) for path in options.profile
    }
    for problem in problems.values():
        figures.load_kernels(problem)
    cases = [
        compare.Case(path, problem, limit)
        for path, problem in problems.items()
        for limit in compare.choose_limits(problem, None, options.sweep)
    ]
    progress = Progress(len(cases) * len(planners), sys.stderr)
    rows = []
    for case in cases:
        rows += compare.compare_all(case, planners, {}, progress)
    peaks = {path: problem.in_core_peak_bytes for path, problem in problems.items()}
    kept = [{k: v for k, v in row.items() if k not in BULKY} for row in rows]
    common.save(NAME, {'peaks': peaks, 'rows': kept})
    publish(rows, peaks)
    beaten = faster(rows)
    for row in beaten:
        print(f'faster than {DEFAULT}: {row}')
    return 1 if beaten else 0


def faster(rows: list[Row]) -> list[str]:
    """Where a planner is faster than the default one, or fits where that does not."""
    ours = {
        (row['profile'], row['memory_limit_bytes']): row
        for row in rows
        if row['planner'] == DEFAULT
    }
    result = []
    for row in rows:
        if not row['fits']:
            continue
        own = ours[row['profile'], row['memory_limit_bytes']]
        if (
            not own['fits']
            or row['iteration_seconds'] < (1 - LEVEL) * own['iteration_seconds']
        ):
            result.append(
                f'{row["planner"]} on {row["profile"]} in {row["memory_limit_bytes"]}'
            )
    return result


def publish(rows: list[Row], peaks: dict[str, int]) -> None:
    """Writes and prints the summary and one table per profile, draws the picture."""
    parts = [
        '# Every planner on every shipped profile',
        f'{len(peaks)} profiles, limits from the least memory of any plan to the '
        f'in-core peak. Over all of them, best first:',
        f'```\n{summary(rows)}\n```',
    ]
    for profile, peak in peaks.items():
        here = [row for row in rows if row['profile'] == profile]
        parts += [f'## {profile}', overheads(here, peak)]
    text = '\n\n'.join([*parts, ''])
    saving.save_text(NAME, text)
    print(text)
    comparison.draw_comparison(rows, saving.path(NAME, 'png'), peaks, names(), DEFAULT)
    with Image.open(saving.path(NAME, 'png')) as picture:
        small = picture.convert('RGB').quantize(COLORS)
    small.save(saving.path(NAME, 'png'), optimize=True)


def overheads(rows: list[Row], peak: int) -> str:
    """One row for each planner, one column for each limit, and the bound."""
    limits = list(dict.fromkeys(row['memory_limit_bytes'] for row in rows))
    by_planner: dict[str, Row] = {}
    bound: Row = {'planner': 'bound'}
    for row in rows:
        title = f'{row["memory_limit_bytes"] / peak:.0%}'
        line = by_planner.setdefault(row['planner'], {'planner': row['planner']})
        line[title] = row['overhead'] if row['fits'] else None
        if row['fits'] and row['planner'] == DEFAULT:
            seconds = row['lower_bound_seconds']
            bound[title] = seconds / row['in_core_seconds'] - 1
    columns = {f'{limit / peak:.0%}': _percent for limit in limits}
    return common.table([*by_planner.values(), bound], {'planner': str, **columns})


def _percent(value: float | None) -> str:
    return '' if value is None else f'{value:+.1%}'
