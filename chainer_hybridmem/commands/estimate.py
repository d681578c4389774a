"""``hybridmem estimate``: a plan without the GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.commands import (
    arguments,
    base,
    estimating,
    node_table,
    outputs,
    programs,
)
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.rules import RuleCost
from chainer_hybridmem.reporting.comparison import PREDICTED, with_reason
from chainer_hybridmem.reporting.rows import (
    in_core_row,
    rule_rows,
    sharing_rows,
    times_rows,
)
from chainer_hybridmem.reporting.tables import (
    UNKNOWN,
    Column,
    figures_table,
    named_values,
)
from chainer_hybridmem.units import format_bytes

if TYPE_CHECKING:
    from chainer_hybridmem.commands.programs import Asked
    from chainer_hybridmem.commands.progress import Progress
    from chainer_hybridmem.forecasting.estimation import Estimator
    from chainer_hybridmem.planning.simulation import Problem


COLUMNS = (
    Column('method', 'planner'),
    Column('s / iteration', 'iteration_seconds', 'seconds'),
    Column('images / s', 'images_per_second', '{:.1f}'.format),
    *PREDICTED,
)


class EstimateCommand(base.Command):
    """Predicts memory, time and plan of a batch size before any training with it.

    Two tiny iterations are recorded, on the CPU by default, and extrapolated. A program
    behind -- is recorded as it is or, with --batch-arg, with two small batches.
    Exit status 1 if nothing fits. See docs/guide/estimate.md.
    """

    name = 'estimate'
    help = 'predict any batch size on any GPU from two tiny iterations'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = estimating.USAGE.format(' --batchsize B')
        more = estimating.add_plan(parser)
        arguments.add_network(parser, more=more)
        programs.add(parser, batch=True)
        estimating.add_device(parser)
        arguments.add_output(parser, 'where to save the profile')
        arguments.add_json(parser)
        node_table.add(parser.add_argument_group('several GPUs'))
        estimating.add_model(parser)

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.forecasting.estimation import check_batchsize
        from chainer_hybridmem.planning.simulation.problem import with_host_limit

        planner = arguments.planner_of(args)
        args = node_table.resolve(args)
        asked = estimating.find_asked(args)
        batchsize = programs.find_batchsize(args, asked)
        check_batchsize(batchsize)
        methods = list(dict.fromkeys(['in-core', 'swap-all', planner]))

        steps = len(methods) + (args.ranks is not None)
        with estimating.open_progress(args, steps) as progress:
            sampled = estimating.obtain(args, asked, progress)
            estimator = sampled.step.largest(batchsize)
            host_limit = estimating.host_limit_beside(args.memory_limit, estimator)
            problem = with_host_limit(
                arguments.problem_of(args, estimator.profile(batchsize)), host_limit
            )
            limit_bytes = choose_limit(args.memory_limit, problem, estimator)
            if args.output is not None:
                library.save(problem.profile, args.output)
            figures = {
                **sampled.asked.named,
                **summarise(estimator, problem, limit_bytes, methods, progress),
            }
            if args.ranks is not None:
                progress.step('planning for several GPUs')
                figures['ranks'] = node_table.summarise(
                    problem, limit_bytes, planner, args, progress
                )
        tell_step(figures, asked, sampled, limit_bytes)
        title = sampled.asked.with_batchsize(batchsize).title
        text = _text(f'{title} on {figures["device"]["name"]}', figures)
        if host_limit is not None:
            text += f'\n\n{estimating.ONE_RAM}'
        outputs.publish(text, figures, args.json)
        estimating.tell_note(sampled)
        return 0 if any(row['fits'] for row in figures['methods']) else 1


def tell_step(
    figures: dict[str, Any],
    asked: Asked,
    sampled: estimating.Sampled,
    limit_bytes: int,
) -> None:
    """Adds graphs of earlier iterations, and leaves out what is not known."""
    figures['iterations_per_step'] = sum(sampled.step.counts)
    figures['older_bytes'] = older = sampled.step.older_bytes(figures['batchsize'])
    if older and figures['in_core_peak_bytes'] is not None:
        figures['in_core_peak_bytes'] += older
    peak, in_core = figures['in_core_peak_bytes'], figures['methods'][0]
    if older and in_core['fits']:
        in_core['peak_bytes'] += older
        in_core['fits'] = in_core['peak_bytes'] <= limit_bytes
        if not in_core['fits']:
            in_core['iteration_seconds'] = None
            in_core['reason'] = (
                f'in-core: plain Chainer needs {format_bytes(peak)}, of which '
                f'{format_bytes(older)} are beside one iteration, and the limit '
                f'is {format_bytes(limit_bytes)}'
            )
    if asked.batch_arg is None:
        figures['batchsize'] = figures['device']['batchsize'] = None
        figures['device']['sample_batchsizes'] = None
    if asked.batch_arg is None or figures['iterations_per_step'] > 1:
        figures['in_core_images_per_second'] = None
        for row in figures['methods']:
            row['images_per_second'] = None


def choose_limit(
    limit: arguments.Limit | None, problem: Problem, estimator: Estimator
) -> int:
    """The memory limit in bytes, by default that of the device."""
    if limit is not None:
        return limit.bytes_for(problem)
    return estimating.device_bytes(estimator)


def summarise(
    estimator: Estimator,
    problem: Problem,
    limit_bytes: int,
    methods: Sequence[str],
    progress: Progress,
) -> dict[str, Any]:
    """What ``hybridmem estimate`` tells of one batch size, as plain values."""
    from chainer_hybridmem.commands import figures
    from chainer_hybridmem.commands.compare import compare_one

    figures.load_kernels(problem)
    batchsize = problem.profile.device['batchsize']
    rows = []
    for name in methods:
        progress.step(f'planning with {name}')
        row = compare_one(problem, limit_bytes, name)
        seconds = row['iteration_seconds']
        row['images_per_second'] = batchsize / seconds if seconds else None
        rows.append(row)
    summary = figures.profile_figures(problem)
    if problem.rules and rows[-1]['fits']:
        summary['rules'] = figures.rule_costs(problem, limit_bytes, rows[-1])
    in_core_seconds = summary['in_core_seconds']
    return {
        'batchsize': batchsize,
        'gpu': estimator.model.name if estimator.model else None,
        'memory_limit_bytes': limit_bytes,
        **summary,
        'in_core_images_per_second': (
            batchsize / in_core_seconds if in_core_seconds else None
        ),
        'methods': rows,
    }


# -- text --------------------------------------------------------------------------


def _text(title: str, figures: dict[str, Any]) -> str:
    rows = [with_reason(row) for row in figures['methods']]
    parts = [
        named_values(title, _values(figures)),
        figures_table(COLUMNS, rows),
    ]
    if 'ranks' in figures:
        parts.append(node_table.describe(figures['ranks']))
    reasons = dict.fromkeys(r['reason'] for r in figures['methods'] if not r['fits'])
    return '\n\n'.join([*parts, '\n'.join(reasons)]).rstrip()


def _values(figures: dict[str, Any]) -> list[tuple[str, str]]:

    f, device = figures, figures['device']
    least = format_bytes(f['least_memory_bytes'])
    sizes = device['sample_batchsizes']
    recorded = 'as it is' if sizes is None else 'batch sizes {} and {}'.format(*sizes)
    speed = f['in_core_images_per_second']
    return [
        ('memory limit', format_bytes(f['memory_limit_bytes'])),
        in_core_row(f['in_core_peak_bytes'], f['in_core_peak_in_parts_bytes']),
        ('least memory', f'{least}, for {f["least_memory_operation"]}'),
        ('feature maps', format_bytes(f['feature_map_bytes'])),
        ('in-core speed', UNKNOWN if speed is None else f'{speed:.1f} images/s'),
        *(times_rows(device) or [('times', 'the recording, extrapolated')]),
        *sharing_rows(f['link']['ranks'], 'link shared by'),
        ('recorded', recorded),
        *rule_rows(RuleCost(**cost) for cost in f.get('rules', ())),
    ]
