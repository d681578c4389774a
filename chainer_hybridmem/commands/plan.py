"""``hybridmem plan``: one planner on one profile."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.commands import arguments, base, outputs
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.compiling import LEAST_SECONDS
from chainer_hybridmem.errors import FormatError, OptionError
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.rules import RuleCost
from chainer_hybridmem.reporting.rows import (
    ACTIONS,
    IN_PARTS,
    SOURCES,
    as_table,
    rule_rows,
    times_rows,
)
from chainer_hybridmem.reporting.tables import named_values, told
from chainer_hybridmem.units import (
    format_bound,
    format_bytes,
    format_count,
    format_seconds,
)


class PlanCommand(base.Command):
    """Decides what happens to each feature map of a recorded iteration."""

    name = 'plan'
    help = 'plan a recorded iteration for a memory limit'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument('profile', metavar='PROFILE', help=arguments.PROFILE)
        arguments.add_limit(parser)
        arguments.add_planner(parser)
        parser.add_argument(
            '--option',
            action='append',
            default=[],
            type=option,
            metavar='KEY=VALUE',
            help='option of the planner; may be given several times',
        )
        parser.add_argument(
            '--manual',
            metavar='FILE',
            help='planner manual, with the actions of this file: JSON, an object with '
            'keep, swap or recompute for each pattern of names',
        )
        parser.add_argument(
            '--maps', action='store_true', help='list every feature map, too'
        )
        arguments.add_time_budget(parser)
        arguments.add_problem(parser, 'host_limit')
        arguments.add_output(parser, 'where to save it')
        arguments.add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.commands import figures
        from chainer_hybridmem.jit import compiling_seconds
        from chainer_hybridmem.planning.planners import (
            check_options,
            make_plan,
            needs_options,
        )

        usual = None if args.manual is None else 'manual'
        planner = arguments.planner_of(args, usual)
        options = read_options(args.option)
        if args.manual is not None:
            if planner != 'manual':
                raise OptionError(
                    f'--manual is for planner manual, not {planner}; leave one out.'
                )
            options['actions'] = read_actions(args.manual)
        if args.time_budget is not None:
            options['time_budget'] = args.time_budget
        check_options(planner, options)
        if needs_options(planner) and not options:
            raise OptionError(
                f'Planner {planner} does nothing without options; give it some with '
                f'--option or, to planner manual, a file with --manual.'
            )
        outputs.check_outputs(args.output, args.json, (args.profile, args.manual))
        problem = arguments.problem_of(args, library.load_profile(args.profile))
        figures.load_kernels(problem)
        limit_bytes = args.memory_limit.bytes_for(problem)
        with Progress(1 + bool(args.rules), sys.stderr) as progress:
            progress.step(f'planning with {planner}')
            plan = make_plan(problem, limit_bytes, planner, **options)
            if args.output is not None:
                library.save(plan, args.output)
            summary = summarise(problem, plan)
            summary['compiling_seconds'] = compiling_seconds()
            if args.rules:
                progress.step('planning without each of the rules')
            costs = figures.rule_costs(problem, limit_bytes, summary, **options)
        if costs:
            summary['rules'] = costs
        title = f'{planner}: {args.memory_limit.describe(problem)}'
        rows = [*values(summary), *times_rows(problem.profile.device)]
        parts = [named_values(title, rows)]
        if args.maps:
            parts.append(as_table(problem.profile, plan).rstrip())
        outputs.publish('\n\n'.join(parts), summary, args.json)
        return 0


def option(text: str) -> tuple[str, str]:
    """Splits an argument ``key=value``."""
    key, separator, value = text.partition('=')
    if not separator or not key:
        raise argparse.ArgumentTypeError(f'{text!r} is not of the form key=value')
    return key.strip().replace('-', '_'), value.strip()


def read_options(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Options as the numbers that they look like; the planner checks the rest."""
    from chainer_hybridmem.planning.search.planner_options import read_value

    return {key: read_value(text) for key, text in pairs}


def summarise(problem: Any, plan: Any) -> dict[str, Any]:
    """Everything that ``hybridmem plan`` tells, as plain values."""
    from chainer_hybridmem.commands import figures
    from chainer_hybridmem.planning.records.plan import Action
    from chainer_hybridmem.planning.simulation import simulate

    storages = problem.profile.storages
    crossing = sum(
        storages[entry.storage].nbytes
        for entry in plan.maps
        if entry.action is Action.SWAP and storages[entry.storage].persistent
    )
    return {
        **figures.plan_figures(problem, plan),
        **({'crossing_bytes': crossing} if problem.cross_iteration else {}),
        **figures.timeline_figures(simulate(problem, plan)),
        **({'parts': _parts(problem, plan)} if plan.parts else {}),
        'options': plan.options,
        'memory_limit_bytes': plan.memory_limit_bytes,
        'in_core_peak_bytes': problem.in_core.plain_peak_bytes,
        'in_core_peak_in_parts_bytes': problem.in_core_peak_bytes,
    }


def _parts(problem: Any, plan: Any) -> list[dict[str, Any]]:
    operations = problem.profile.operations
    return [
        {'label': operations[part.operation].label, **dataclasses.asdict(part)}
        for part in plan.parts
    ]


def values(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures as named values for people."""
    f = figures
    bound = format_bound(f['lower_bound_seconds'], f['gap'])
    seconds = format_seconds(f['iteration_seconds'])
    rows = [
        ('s / iteration, predicted', f'{seconds} ({f["overhead"]:+.1%})'),
        ('s / iteration, in-core', format_seconds(f['in_core_seconds'])),
        ('lower bound of any plan', f'{bound} for the recorded times'),
        ('peak, predicted', format_bytes(f['peak_bytes'])),
        ('host memory', format_bytes(f['host_bytes'])),
        *([('disk', format_bytes(f['disk_bytes']))] if f['disk_bytes'] else []),
        *told((*ACTIONS, SOURCES), f),
        ('recomputing', format_seconds(f['recompute_seconds'])),
        (
            'stalled',
            f'{format_seconds(f["stall_seconds"])}, '
            f'{format_count(f["stalls"], "stall")}',
        ),
        (
            'planning',
            f'{format_seconds(f["planning_seconds"])}, '
            f'{format_count(f["simulations"], "simulation")}',
        ),
    ]
    if f['compiling_seconds'] >= LEAST_SECONDS:
        seconds = format_seconds(f['compiling_seconds'])
        rows.append(('compiling', f'{seconds} beside that, once per installation'))
    if 'crossing_bytes' in f:
        nbytes = format_bytes(f['crossing_bytes'])
        rows.append(('parameters and states', f'{nbytes} of what is swapped'))
    if 'parts' in f:
        inexact = sum(not part['exact'] for part in f['parts'])
        count = f'{format_count(len(f["parts"]), "function")} / {inexact}'
        rows.append((IN_PARTS, count))
    rows += rule_rows(RuleCost(**cost) for cost in f.get('rules', ()))
    if f['options']:
        options = ', '.join(f'{key}={value}' for key, value in f['options'].items())
        rows.append(('options', options))
    return rows


EXPECTED = (
    'an object with an action for each pattern was expected, such as '
    '{"*Convolution2DFunction": "swap"}'
)


def read_actions(path: str) -> dict[str, str]:
    """A JSON file with an action for each pattern, for planner ``manual``.

    Raises:
        FormatError: If the file is missing or holds something else.
    """
    text = files.read_text(path)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f'{path} is not JSON ({error}); {EXPECTED}.') from error
    if not isinstance(body, dict):
        raise FormatError(f'{path} holds {type(body).__name__}; {EXPECTED}.')
    return body
