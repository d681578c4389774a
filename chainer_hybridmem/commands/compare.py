"""``hybridmem compare``: planners on recorded iterations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from chainer_hybridmem.commands import arguments, base, outputs
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.errors import HybridMemoryError, InfeasibleError, OptionError
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.profiles import shipped_profiles
from chainer_hybridmem.reporting import canvas
from chainer_hybridmem.reporting.comparison import (
    comparison,
    draw_comparison,
    summary,
    sweep,
)
from chainer_hybridmem.reporting.rows import times_rows
from chainer_hybridmem.terminal import printable

if TYPE_CHECKING:
    from chainer_hybridmem.planning.simulation import Problem


FEWEST_LIMITS = 2
SEARCH_SECONDS = 5.0  # for each limit, of planners that by themselves search longer
# What a reader compares: plain Chainer, only copies, the best published search, only
# recomputing, and the default. Planners of other packages are there to be compared.
USUAL = ('in-core', 'swap-all', 'pooch', 'checkpoint-dp', 'hybrid')
NO_LIMIT = 'at which limits? Name some with --memory-limit, or --sweep 8'


class CompareCommand(base.Command):
    """Runs planners on recorded iterations and shows their predictions.

    Exit status 1 if none of them fits any of the limits.
    """

    name = 'compare'
    help = 'compare planners on recorded iterations'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        parser.add_argument(
            'profiles',
            nargs='*',
            metavar='PROFILE',
            help='recorded iteration: a file, or one that comes with the package: '
            f'{", ".join(shipped_profiles())}',
        )
        arguments.add_limit(parser, nargs='+')
        parser.add_argument(
            '--sweep',
            type=several,
            metavar='N',
            help='N limits, from the least memory of any plan to the in-core peak; '
            'those of --memory-limit are among them, and marked',
        )
        which = parser.add_mutually_exclusive_group()
        which.add_argument(
            '--planner',
            nargs='+',
            action='extend',
            metavar='NAME',
            help=f'planners to compare; default {", ".join(USUAL)} and those of other '
            'packages',
        )
        which.add_argument('--all', action='store_true', help='compare all planners')
        arguments.add_time_budget(parser)
        arguments.add_problem(parser, 'host_limit')
        arguments.add_output(
            parser, 'picture to write: overhead against limit, for every planner'
        )
        arguments.add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.commands import figures

        if not args.profiles:
            known = ', '.join(shipped_profiles())
            self._parser.error(f'name a PROFILE: a file, or one of {known}')
        if args.memory_limit is None and args.sweep is None:
            self._parser.error(NO_LIMIT)
        outputs.check_outputs(args.output, args.json, inputs=args.profiles)
        if args.output is not None:
            canvas.check(args.output)
        planners = choose_planners(args.planner, args.all)
        options = budgets(planners, args.time_budget)
        problems = {
            path: arguments.problem_of(args, library.load_profile(path))
            for path in args.profiles
        }
        for problem in problems.values():
            figures.load_kernels(problem)
        cases = [
            Case(path, problem, limit)
            for path, problem in problems.items()
            for limit in choose_limits(problem, args.memory_limit, args.sweep)
        ]
        with Progress(len(cases) * len(planners), sys.stderr) as progress:
            found = [compare_all(case, planners, options, progress) for case in cases]
        rows = [row for rows in found for row in rows]
        told = [text(cases, found)] if args.sweep is None else []
        marked: dict[str, list[int]] = {}
        if args.sweep is not None:
            named = args.memory_limit or ()
            marked = {
                path: [limit.bytes_for(problem) for limit in named]
                for path, problem in problems.items()
            }
            told += [
                f'{printable(path)}\n\n'
                + sweep(
                    [r for r in rows if r['profile'] == path],
                    p.whole_bytes,
                    marked[path],
                )
                for path, p in problems.items()
            ]
        told += over_all(cases, rows)
        if args.planner is None and not args.all:
            left = len(choose_planners(None, everyone=True)) - len(planners)
            told.append(f'{left} other planners are not shown; --all adds them.')
        outputs.publish('\n\n'.join(told), published(rows), args.json)
        if args.output is not None:
            draw(rows, problems, args.output, marked)
        return 0 if any(row['fits'] for row in rows) else 1


class Case(NamedTuple):
    """A profile under a limit.

    Attributes:
        path (str): Of the profile.
        problem (Problem): Made of it.
        limit (Limit): For one iteration of it.
    """

    path: str
    problem: Problem
    limit: arguments.Limit

    def __str__(self) -> str:
        return printable(f'{self.path}: {self.limit.describe(self.problem)}')

    @property
    def head(self) -> str:
        """What stands above its table."""
        told = times_rows(self.problem.profile.device)
        return '\n'.join([str(self), *(': '.join(row) for row in told)])


def several(text: str) -> int:
    """Turns an argument into an integer above one."""
    number = arguments.positive(text)
    if number < FEWEST_LIMITS:
        raise argparse.ArgumentTypeError(
            f'{text} limit has no two ends; sweep {FEWEST_LIMITS} or more'
        )
    return number


def choose_planners(named: Sequence[str] | None, everyone: bool = False) -> list[str]:
    """The named planners, once each; else the usual ones, or all that need no options.

    Args:
        named: Planners that are asked for.
        everyone: Whether all are, if none is named.

    Raises:
        UnknownNameError: If there is no such planner.
    """
    from chainer_hybridmem.planning.planners import (
        PLANNERS,
        check_name,
        names,
        needs_options,
    )

    if named:
        return [check_name(name) for name in dict.fromkeys(named)]
    found = [name for name in names() if not needs_options(name)]
    return [n for n in found if everyone or n in USUAL or n not in PLANNERS]


def choose_limits(
    problem: Problem, named: Sequence[arguments.Limit] | None, sweep: int | None
) -> list[arguments.Limit]:
    """The limits that are named, and those of a sweep; none of them twice."""
    from chainer_hybridmem.planning.search.candidates import least_memory

    limits = list(named or ())
    if sweep is not None:
        least, most = least_memory(problem)[0], problem.whole_bytes
        span = max(most - least, 0)
        steps = (least + span * i // (sweep - 1) for i in range(sweep))
        limits += [arguments.Limit(str(step)) for step in steps]
    return list({limit.bytes_for(problem): limit for limit in limits}.values())


def budgets(
    planners: Sequence[str], seconds: float | None
) -> dict[str, dict[str, Any]]:
    """Options for ``--time-budget``, for the planners that have one.

    Those that by themselves search for some time get a short one.

    Raises:
        OptionError: If none of them has one, but ``--time-budget`` is given.
    """
    from chainer_hybridmem.planning.planners import check_options

    found = {name: _own_budget(name) for name in planners if _has_budget(name)}
    if seconds is not None and not found:
        check_options(planners[0], {'time_budget': seconds})
    wanted = {
        name: seconds or (own and min(own, SEARCH_SECONDS))
        for name, own in found.items()
    }
    return {name: {'time_budget': s} for name, s in wanted.items() if s is not None}


def _has_budget(planner: str) -> bool:
    from chainer_hybridmem.planning.planners import options_of

    try:
        return 'time_budget' in options_of(planner)
    except OptionError:  # it cannot be imported, which its rows will say
        return False


def _own_budget(planner: str) -> float | None:
    """Seconds that it searches for by itself; None if steps end its search."""
    from chainer_hybridmem.planning.planners import find_planner

    own = find_planner(planner).defaults['time_budget']
    return own if isinstance(own, int | float) else None


def compare_all(
    case: Case,
    planners: Sequence[str],
    options: dict[str, dict[str, Any]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Figures of several planners, with the profile and the limit they are for."""
    limit_bytes = case.limit.bytes_for(case.problem)
    rows = []
    for name in planners:
        progress.step(f'{name}, {case}')
        row = compare_one(case.problem, limit_bytes, name, options.get(name))
        rows.append({'profile': case.path, 'memory_limit_bytes': limit_bytes, **row})
    return rows


def compare_one(
    problem: Problem,
    limit_bytes: int,
    planner: str,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Figures of one planner, whether it fits or not."""
    from chainer_hybridmem.commands import figures
    from chainer_hybridmem.planning.planners import make_plan

    try:
        plan = make_plan(problem, limit_bytes, planner, **(options or {}))
    except InfeasibleError as error:
        return figures.misfit_figures(problem, planner, str(error))
    except HybridMemoryError as error:
        reason = str(error) if planner in str(error) else f'{planner}: {error}'
        return figures.misfit_figures(problem, planner, reason, failed=True)
    return figures.plan_figures(problem, plan)


def draw(
    rows: Sequence[dict[str, Any]],
    problems: dict[str, Problem],
    path: str,
    marked: dict[str, list[int]],
) -> None:
    """Draws the comparison to a file."""
    from chainer_hybridmem.planning.planners import DEFAULT, names

    peaks = {name: problem.whole_bytes for name, problem in problems.items()}
    draw_comparison(rows, path, peaks, names(), DEFAULT, marked)


def text(cases: Sequence[Case], found: Sequence[list[dict[str, Any]]]) -> str:
    """A table for each case."""
    return '\n\n'.join(
        f'{case.head}\n\n{comparison(rows)}'
        for case, rows in zip(cases, found, strict=True)
    )


def over_all(cases: Sequence[Case], rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table over all cases, if there are several."""
    if len(cases) < FEWEST_LIMITS:
        return []
    return [f'over all {len(cases)}, best first\n\n{summary(rows)}']


def published(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as JSON has them: only several profiles are named."""
    if len({row['profile'] for row in rows}) > 1:
        return list(rows)
    return [{k: v for k, v in row.items() if k != 'profile'} for row in rows]
