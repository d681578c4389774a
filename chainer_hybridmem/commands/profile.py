"""``hybridmem profile``: trains a few iterations and records one."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.commands import arguments, base, outputs, programs
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.reporting.rows import ALL_REDUCE, in_core_row, sharing_rows
from chainer_hybridmem.reporting.tables import named_values, told
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from chainer_hybridmem.planning.simulation import Problem


class ProfileCommand(base.Command):
    """Trains an architecture on random pictures until one iteration is recorded.

    All feature maps are swapped meanwhile, so that this works where training
    in-core does not. A program behind -- is run as it is, and ended once it has
    repeated an iteration, or the iterations of a step, often enough.
    """

    name = 'profile'
    help = 'train a few iterations and record one'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        arguments.add_network(parser.add_argument_group('network'))
        arguments.add_memory(parser.add_argument_group('memory'))
        parser.add_argument(
            '--iterations',
            type=arguments.positive,
            default=programs.ITERATIONS,
            help=f'give up after these many; default {programs.ITERATIONS}',
        )
        arguments.add_output(parser, 'where to save it', required=True)
        arguments.add_json(parser)
        programs.add(parser)

    def run(self, args: argparse.Namespace) -> int:
        outputs.check_outputs(args.output, args.json)
        asked = programs.find(args, args.device, device='auto').completed()
        options, plain_bytes = programs.memory_options(args, asked)
        options['progress'] = True
        recorded = programs.record(asked, options, args.iterations, True, timed=True)
        problem, note = recorded.find_largest(), programs.describe_kinds(recorded)
        if plain_bytes is not None:
            problem, note = _know_peak(problem, plain_bytes, note)
        library.save(problem.profile, args.output)
        from chainer_hybridmem.commands import figures

        summary = figures.profile_figures(problem)
        outputs.publish(
            named_values(asked.title, values(summary)),
            {**asked.named, **summary},
            args.json,
        )
        if note is not None:
            print(printable(f'hybridmem: note: {note}'), file=sys.stderr)
        return 0


def _know_peak(
    problem: Problem, plain_bytes: int, note: str | None
) -> tuple[Problem, str | None]:
    """The problem with what plain Chainer needs, and what to tell beside it."""
    from chainer_hybridmem.planning.simulation.problem import with_plain_peak

    older_bytes = plain_bytes - problem.in_core_peak_bytes
    if older_bytes > plain_bytes // 100:
        older = (
            f'{format_bytes(older_bytes)} of the in-core peak are of an older '
            f'iteration that the program still holds, for example by its loss; a '
            f'plan covers one iteration.'
        )
        note = ' '.join(filter(None, (note, older)))
    return with_plain_peak(problem, plain_bytes), note


def values(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures as named values for people."""
    f, link = figures, figures['link']
    least = format_bytes(f['least_memory_bytes'])
    maps = format_bytes(f['feature_map_bytes'])
    counts = f['operations'].items()
    operations = ', '.join(f'{count} {phase}' for phase, count in counts if count)
    return [
        ('device', f'{f["device"].get("kind")}, {f["device"].get("name")}'),
        ('operations', operations),
        ('feature maps', f'{f["feature_maps"]} ({f["recomputable"]} recomputable)'),
        ('  their bytes', maps),
        ('before the iteration', format_bytes(f['initial_bytes'])),
        ('allocations', 'by category, not all at the same time'),
        *(
            (f'  {category}', format_bytes(nbytes))
            for category, nbytes in f['bytes_by_category'].items()
            if nbytes
        ),
        in_core_row(f['in_core_peak_bytes'], f['in_core_peak_in_parts_bytes']),
        ('least memory', f'{least}, for {f["least_memory_operation"]}'),
        ('swap-out', _rate(link['d2h_bytes_per_second'])),
        ('swap-in', _rate(link['h2d_bytes_per_second'])),
        *sharing_rows(link['ranks']),
        ('copy latency', format_seconds(link['latency_seconds'])),
        *told([ALL_REDUCE], {**f, 'all_reduce_seconds': f['seconds']['all-reduce']}),
        ('s / iteration, in-core', format_seconds(f['in_core_seconds'])),
        *(
            (f'  {phase}', format_seconds(seconds))
            for phase, seconds in f['seconds'].items()
            if f['operations'][phase]
        ),
    ]


def _rate(bytes_per_second: float) -> str:
    return f'{format_bytes(bytes_per_second)}/s'
