"""``hybridmem batch``: the largest batch that fits, and why the next one does not."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.commands import (
    arguments,
    base,
    estimating,
    outputs,
    programs,
)
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.reporting.rows import times_rows
from chainer_hybridmem.reporting.tables import Column, figures_table, named_values
from chainer_hybridmem.units import format_bytes

if TYPE_CHECKING:
    from chainer_hybridmem.forecasting.batches import Batch, LargestBatch, Refusal
    from chainer_hybridmem.planning.simulation import Problem

COLUMNS = (
    Column('', 'name'),
    Column('batch', 'batchsize'),
    Column('s / iteration', 'iteration_seconds', 'seconds'),
    Column('images / s', 'examples_per_second', '{:.1f}'.format),
    Column('speed', 'speed_share', 'share'),
    Column('peak', 'peak_bytes', 'bytes'),
)


class BatchCommand(base.Command):
    """Finds the largest batch that fits, without running out of memory on the way.

    Two tiny iterations are recorded and extrapolated, as for ``estimate``. Exit status
    1 if not even one example fits. See docs/guide/largest_batch.md.
    """

    name = 'batch'
    help = 'find the largest batch that fits'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = estimating.USAGE.format('')
        more = estimating.add_plan(parser)
        arguments.add_network(parser, batchsize=False, more=more)
        programs.add(parser, batch=True)
        estimating.add_device(parser, arguments.size)
        parser.add_argument(
            '--min-speed',
            type=arguments.share,
            metavar='SHARE',
            help='least speed, such as 80%%: images per second over those of the same '
            'batch without a limit; default: any',
        )
        arguments.add_output(parser, 'where to save the plan')
        parser.add_argument(
            '--profile', metavar='FILE', help='where to save what the plan is for'
        )
        arguments.add_json(parser)
        estimating.add_model(parser, in_parts=True)

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.forecasting.batches import find_largest_batch
        from chainer_hybridmem.forecasting.estimation import MOST_PICTURES
        from chainer_hybridmem.planning.simulation.problem import with_host_limit

        planner = arguments.planner_of(args)
        for other in (args.output, args.json):
            outputs.check_outputs(args.profile, other)
        outputs.check_outputs(args.profile, inputs=(args.samples,))
        asked = estimating.find_asked(args)
        if asked.batch_arg is None:
            raise OptionError(
                'Which argument of the program has its batch size? Name it with '
                '--batch-arg, such as --batch-arg=--batchsize.'
            )
        what = f'looking for the largest batch of {planner}'

        def problem_of(batchsize: int) -> Problem:
            progress.detail(f'{what}: batch size {batchsize}')
            problem = arguments.problem_of(args, sampled.step.profile(batchsize))
            return with_host_limit(problem, host_limit_bytes)

        with estimating.open_progress(args, 1) as progress:
            sampled = estimating.obtain(args, asked, progress)
            estimator = sampled.step.estimators[0]
            limit_bytes = args.memory_limit or estimating.device_bytes(estimator)
            host_limit_bytes = estimating.host_limit_beside(
                args.memory_limit, estimator
            )
            progress.step(what)
            found = find_largest_batch(
                problem_of, limit_bytes, MOST_PICTURES, planner, args.min_speed
            )
        if found.plan is not None and found.problem is not None:
            if args.output is not None:
                library.save(found.plan, args.output)
            if args.profile is not None:
                library.save(found.problem.profile, args.profile)
        device = estimator.profile(1).device
        figures = {
            **sampled.asked.named,
            'device': device['name'],
            **summarise(found),
        }
        title = asked.title
        if isinstance(asked, programs.Network):
            title = '{arch}, pictures of {insize}x{insize}'.format(**figures)
        title = f'{title} on {device["name"]}'
        text = f'{title}\n\n{describe(found, times_rows(device))}'
        if host_limit_bytes is not None:
            text += f'\n\n{estimating.ONE_RAM}'
        outputs.publish(text, figures, args.json)
        estimating.tell_note(sampled)
        return 0 if found.batchsize else 1


def summarise(found: LargestBatch) -> dict[str, Any]:
    """The answer and its certificate, as plain values."""
    return {
        'memory_limit_bytes': found.limit_bytes,
        'planner': found.planner,
        'min_speed': found.min_speed,
        'batchsize': found.batchsize,
        'in_core': _batch(found.in_core),
        'in_core_refusal': _refusal(found.in_core_refusal),
        'planned': _batch(found.planned),
        'refusal': _refusal(found.refusal),
    }


def _batch(batch: Batch | None) -> dict[str, Any] | None:
    if batch is None:
        return None
    speed = batch.examples_per_second
    return {
        'batchsize': batch.batchsize,
        'iteration_seconds': batch.seconds,
        'examples_per_second': speed if math.isfinite(speed) else None,
        'speed_share': batch.speed_share,
        'peak_bytes': batch.peak_bytes,
    }


def _refusal(refusal: Refusal | None) -> dict[str, Any] | None:
    return None if refusal is None else dataclasses.asdict(refusal)


def describe(found: LargestBatch, times: Sequence[tuple[str, str]] = ()) -> str:
    """The answer and its certificate, for people.

    Args:
        found: The answer.
        times: Rows that say where the times are from.
    """
    wanted = [('memory limit', format_bytes(found.limit_bytes))]
    if found.min_speed is not None:
        wanted.append(('least speed', f'{found.min_speed:.0%} of that without limit'))
    wanted += times
    rows = [
        _row('in-core', found.in_core, found.in_core_refusal),
        _row(found.planner, found.planned, found.refusal),
    ]
    return '\n\n'.join(
        [named_values('largest batch', wanted), figures_table(COLUMNS, rows)]
        + [
            f'Batch size {refusal.batchsize} does not fit {how}: {refusal.reason}.'
            for how, refusal in (
                ('in-core', found.in_core_refusal),
                (f'with {found.planner}', found.refusal),
            )
            if refusal is not None
        ]
    )


def _row(name: str, batch: Batch | None, refusal: Refusal | None) -> dict[str, Any]:
    if batch is None:
        return {'name': name, 'batchsize': 'none'}
    size = str(batch.batchsize) + ('' if refusal else ' or more')
    return {**(_batch(batch) or {}), 'name': name, 'batchsize': size}
