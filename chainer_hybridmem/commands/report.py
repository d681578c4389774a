"""``hybridmem report``: a planned iteration as a page to look at."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.commands import arguments, base, outputs, planned_iteration
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.reporting.tables import (
    Column,
    figures_table,
)

if TYPE_CHECKING:
    from chainer_hybridmem.planning.records.plan import Plan
    from chainer_hybridmem.planning.records.profile import Profile
    from chainer_hybridmem.reporting.page import Run

IN_CORE = 'in-core'
KEPT_IN_PARTS = 'everything kept, functions in parts'
COLUMNS = (
    Column('run', 'run'),
    Column('predicted', 'predicted_seconds', 'seconds'),
    Column('measured', 'measured_seconds', 'seconds'),
    Column('over in-core', 'overhead', 'difference'),
    Column('gap', 'gap', 'share'),
    Column('peak', 'peak_bytes', 'bytes'),
    Column('limit', 'memory_limit_bytes', 'bytes'),
)


class ReportCommand(base.Command):
    """Writes one HTML file that needs no network: memory over time, what it is made of,
    what it costs, and plans or runs side by side.
    """

    name = 'report'
    help = 'write a page about planned iterations, for a browser'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument('profile', metavar='PROFILE', help=arguments.PROFILE)
        parser.add_argument(
            'plans',
            nargs='*',
            default=[],
            metavar='PLAN',
            help='plans made for it; without one, plain Chainer is shown',
        )
        parser.add_argument(
            '--measured',
            action='append',
            default=[],
            metavar='FILE',
            help='measured timeline of an iteration that followed the plan; may be '
            'given several times: in the order of the plans, or all for one plan',
        )
        arguments.add_output(parser, 'page to write', required=True)
        arguments.add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.reporting.page import make_data, make_page

        inputs = [args.profile, *args.plans, *args.measured]
        outputs.check_outputs(args.output, args.json, inputs=inputs)
        profile = library.load_profile(args.profile)
        runs = read_runs(profile, args.profile, args.plans, args.measured)
        data = make_data(profile, runs, args.profile)
        library.write_text(args.output, make_page(data))
        outputs.publish(f'{summary(data)}\n\n{args.output}', data, args.json)
        return 0


def read_runs(
    profile: Profile, path: str, plans: list[str], measured: list[str]
) -> list[Run]:
    """Plans and measured timelines as runs.

    Raises:
        FormatError: If a file cannot be read, or does not belong to the profile.
        OptionError: If it is not clear which plan a measured timeline followed.
    """
    from chainer_hybridmem.reporting.page import Run

    if not plans and not measured:
        plan = make_in_core(profile)
        return [Run(plan.planner, plan)]
    if len(measured) > len(plans) != 1:
        raise OptionError(
            f'Of measured timelines there are {len(measured)}, of plans {len(plans)}; '
            f'name the plan that each timeline followed, in the same order.'
        )
    named = measured if len(measured) > len(plans) else plans
    names = [os.path.basename(name) for name in named]
    if len(set(names)) < len(names):
        names = named
    found = []
    for number in range(max(len(plans), len(measured))):
        plan_path = plans[min(number, len(plans) - 1)]
        plan, _ = planned_iteration.load_plan(plan_path, profile, path)
        timeline = None
        if number < len(measured):
            path_of = measured[number]
            timeline = planned_iteration.load_measured(path_of, plan, plan_path)
        found.append(Run(names[number], plan, timeline))
    return found


def make_in_core(profile: Profile) -> Plan:
    """Plain Chainer as a plan: everything stays.

    Where the profile was recorded with functions in parts, what plain Chainer needs is
    not known: everything stays there, too, and the plan's name tells the parts.
    """
    from chainer_hybridmem.planning.search.candidates import Search
    from chainer_hybridmem.planning.simulation import make_problem

    problem = make_problem(profile)
    name = KEPT_IN_PARTS if profile.functions_in_parts else IN_CORE
    return Search(problem, problem.in_core_peak_bytes).finish_in_core(name)


def summary(data: dict[str, Any]) -> str:
    """The runs of a page as a table for a terminal."""
    rows = [{**run['figures'], 'run': run['name']} for run in data['runs']]
    return figures_table(COLUMNS, rows)
