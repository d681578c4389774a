"""``hybridmem compare``: all planners on recorded iterations."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chainer_hybridmem import library
from chainer_hybridmem.commands import base
from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.reporting.tables import UNKNOWN, table
from chainer_hybridmem.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from chainer_hybridmem.simulation import Problem

HEADERS = (
    'planner',
    's / iteration',
    'overhead',
    'bound',
    'gap',
    'peak',
    'host',
    'keep',
    'swap',
    'recompute',
    'planning',
    'simulations',
)


class CompareCommand(base.Command):
    """Runs planners on recorded iterations and shows their predictions."""

    name = 'compare'
    help = 'compare all planners on recorded iterations'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See :class:`base.Command`."""
        parser.add_argument(
            'profiles', nargs='+', metavar='PROFILE', help='recorded iteration'
        )
        base.add_limit(parser)
        parser.add_argument(
            '--planner',
            nargs='+',
            action='extend',
            metavar='NAME',
            help='planners to compare; default all',
        )
        base.add_time_budget(parser)
        base.add_cross_iteration(parser)
        base.add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        """See :class:`base.Command`."""
        from chainer_hybridmem.commands import figures
        from chainer_hybridmem.planners import PLANNERS, check_name
        from chainer_hybridmem.simulation import make_problem

        base.check_outputs(None, args.json, inputs=args.profiles)
        planners = [
            check_name(name) for name in dict.fromkeys(args.planner or PLANNERS)
        ]
        options = budgets(planners, args.time_budget)
        problems = {
            path: make_problem(library.load_profile(path), args.cross_iteration)
            for path in args.profiles
        }
        rows: list[dict[str, Any]] = []
        parts: list[str] = []
        for path, problem in problems.items():
            figures.load_kernels(problem)
            limit_bytes = args.memory_limit.bytes_for(problem)
            found = [
                compare_one(problem, limit_bytes, name, options.get(name))
                for name in planners
            ]
            title = f'{path}: {args.memory_limit.describe(problem)}'
            parts.append(f'{title}\n\n{comparison(found)}')
            several = {'profile': path} if len(problems) > 1 else {}
            rows.extend({**several, **row} for row in found)
        base.publish('\n\n'.join(parts), rows, args.json)
        return 0


def budgets(
    planners: Sequence[str], seconds: float | None
) -> dict[str, dict[str, Any]]:
    """Options for ``--time-budget``, for the planners that have one.

    Raises:
        OptionError: If none of them has.
    """
    from chainer_hybridmem.planners import check_options, options_of

    if seconds is None:
        return {}
    options: dict[str, Any] = {'time_budget': seconds}
    having = [name for name in planners if 'time_budget' in options_of(name)]
    if not having:
        check_options(planners[0], options)
    return dict.fromkeys(having, options)


def compare_one(
    problem: Problem,
    limit_bytes: int,
    planner: str,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Figures of one planner, whether it fits or not."""
    from chainer_hybridmem.commands import figures
    from chainer_hybridmem.planners import make_plan

    try:
        plan = make_plan(problem, limit_bytes, planner, **(options or {}))
    except InfeasibleError as error:
        return figures.misfit_figures(problem, planner, str(error))
    return figures.plan_figures(problem, plan)


def comparison(rows: Sequence[dict[str, Any]]) -> str:
    """A table of planners, and below it why some do not fit."""
    reasons = dict.fromkeys(row['reason'] for row in rows if not row['fits'])
    return '\n'.join([table(HEADERS, [_cells(row) for row in rows]), *reasons])


def _cells(row: dict[str, Any]) -> list[str]:
    if not row['fits']:
        return [row['planner'], 'does not fit', *[UNKNOWN] * (len(HEADERS) - 2)]
    return [
        row['planner'],
        format_seconds(row['iteration_seconds']),
        f'{row["overhead"]:+.1%}',
        format_seconds(row['lower_bound_seconds']),
        f'{row["gap"]:.1%}',
        format_bytes(row['peak_bytes']),
        format_bytes(row['host_bytes']),
        str(row['keep']),
        str(row['swap']),
        str(row['recompute']),
        format_seconds(row['planning_seconds']),
        str(row['simulations']),
    ]
