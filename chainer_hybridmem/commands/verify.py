"""``hybridmem verify``: trains twice from one seed and compares every bit."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.commands import arguments, base, outputs, programs
from chainer_hybridmem.errors import HybridMemoryError, OptionError
from chainer_hybridmem.reporting.tables import table
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import format_apart, format_bytes, format_count

if TYPE_CHECKING:
    from chainer_hybridmem.running.watchers import VerifiedRun

ITERATIONS = 10
IN_CORE = 'in-core'


class VerifyCommand(base.Command):
    """Trains an architecture twice from the same seed and compares every bit.

    Once in a memory limit, and once as plain Chainer (in-core) or, where that does
    not fit, with a second planner. A program behind -- is run twice as it is, with the
    seeds it sets. Exit status 1 if anything differs. See docs/guide/checking.md.
    """

    name = 'verify'
    help = 'train twice, limited and in-core, and compare every bit'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        arguments.add_network(parser.add_argument_group('network'))
        arguments.add_memory(parser.add_argument_group('memory'))
        arguments.add_planner(parser)
        parser.add_argument(
            '--against',
            default=IN_CORE,
            metavar='NAME',
            help=f'{IN_CORE} (the default: plain Chainer, no limit), or another '
            'planner in the same limit',
        )
        parser.add_argument(
            '--iterations',
            type=arguments.positive,
            default=ITERATIONS,
            help='how many; the first ones only record, the others follow the plan; '
            f'default {ITERATIONS}',
        )
        arguments.add_options(parser, 'rules')
        arguments.add_json(parser)
        programs.add(parser)

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.planning.planners import check_name

        planner = arguments.planner_of(args)
        against = check_name(args.against)
        if planner == against:
            raise OptionError(
                f'{planner} would be compared with itself; name another planner with '
                f'--planner or --against.'
            )
        outputs.check_output(args.json)
        other = None if against == IN_CORE else against
        asked = programs.find(args, args.device, device='auto').completed()
        figures = _verify(args, asked, planner, other)
        figures = {**figures, 'planner': planner, 'against': against}
        outputs.publish(text(asked.title, figures), figures, args.json)
        return 0 if figures['same'] else 1


def _verify(
    args: argparse.Namespace, asked: programs.Asked, planner: str, against: str | None
) -> dict[str, Any]:
    """Trains within the limit, and with another planner or, with None, without.

    If bits differ, twice more without a limit.
    """
    options, _ = programs.memory_options(args, asked)

    def run(name: str | None) -> VerifiedRun:
        what = f'with {name}' if name else IN_CORE
        print(printable(f'hybridmem: training {asked.title}, {what}'), file=sys.stderr)
        return train(asked, {**options, 'progress': True}, args.iterations, name)

    limited, other = run(planner), run(against)
    figures = compare(limited, other)
    if not figures['same']:
        plain = other if against is None else run(None)
        figures['deterministic'] = compare(plain, run(None))['same']
    return {
        'batchsize': None,
        **asked.named,
        'memory_limit_bytes': options['memory_limit'],
        **figures,
    }


def train(
    asked: programs.Asked, options: dict[str, Any], iterations: int, planner: str | None
) -> VerifiedRun:
    """Runs from the same seeds every time.

    Args:
        asked: What trains.
        options: Of its session, by name.
        iterations: How many; those that follow a plan are verified.
        planner: Plans; None is plain Chainer without a limit.

    Raises:
        VerificationError: If backward does not read what forward has made.
        HybridMemoryError: If it cannot be trained, or nothing was guided.
    """
    told = {**options, 'planner': planner, 'verify': iterations}
    run: VerifiedRun = asked.ask(
        'ProgramVerifier',
        options=None if planner is None else told,
        iterations=iterations,
    )
    if planner is not None and not any(run.guided):
        raise HybridMemoryError(
            f'None of {format_count(len(run.guided), "iteration")} has followed a plan '
            f'of {planner}; allow more with --iterations.'
        )
    return run


def compare(run: VerifiedRun, other: VerifiedRun) -> dict[str, Any]:
    """What is the same after every iteration, as plain values."""
    from chainer_hybridmem.training.chainer_access.snapshots import (
        KINDS,
        first_difference,
    )

    rows = []
    for number, (left, right) in enumerate(
        zip(run.snapshots, other.snapshots, strict=False)  # a program may end
    ):
        difference = first_difference(left, right)
        rows.append(
            {
                'iteration': number + 1,
                'guided': run.guided[number],
                'same': {kind: left[kind] == right[kind] for kind in KINDS},
                'first_difference': None if difference is None else list(difference),
            }
        )
    return {
        'same': all(row['first_difference'] is None for row in rows),
        'peak_bytes': run.peak_bytes,
        'swapped_maps': run.swapped_maps,
        'recomputed_maps': run.recomputed_maps,
        'verdict': run.verdict and dataclasses.asdict(run.verdict),
        'iterations': rows,
    }


def text(trained: str, figures: dict[str, Any]) -> str:
    """The figures for people: a table, and below it the verdict."""
    rows = figures['iterations']
    kinds = list(rows[0]['same'])
    cells = [
        [
            str(row['iteration']),
            'guided' if row['guided'] else 'recording',
            *['same' if row['same'][kind] else 'DIFFERS' for kind in kinds],
        ]
        for row in rows
    ]
    limit, peak = format_apart(figures['memory_limit_bytes'], figures['peak_bytes'])
    title = (
        f'{trained}: {figures["planner"]} in '
        f'{limit} (peak {peak}) against {figures["against"]}'
    )
    parts = [title, table(['iteration', 'state', *kinds], cells, left=len(kinds) + 2)]
    verdict = figures['verdict']
    if verdict is not None:
        parts.append(
            f'{format_count(verdict["maps"], "feature map")} as forward made them, '
            f'{format_count(verdict["replays"], "replay")} without any other effect'
        )
    parts.append(conclusion(rows, figures.get('deterministic', True)))
    if not figures['swapped_maps'] + figures['recomputed_maps']:
        parts.append(
            f'Warning: the plan keeps every feature map, so nothing was put to the '
            f'test. Training took {format_bytes(figures["peak_bytes"])}: give a lower '
            f'--memory-limit.'
        )
    return '\n\n'.join(parts)


def conclusion(rows: list[dict[str, Any]], deterministic: bool) -> str:
    """One line: all the same, or where the first difference is.

    Args:
        rows: Of iterations.
        deterministic: Whether two runs of plain Chainer are the same.
    """
    for row in rows:
        if row['first_difference'] is not None:
            kind, name = row['first_difference']
            found = f'DIFFERENT from iteration {row["iteration"]} on: {kind}, {name}. '
            if deterministic:
                return f'{found}Two runs of plain Chainer are the same.'
            return (
                f'{found}So are two runs of plain Chainer: the program has to set '
                f'its seeds before this says anything.'
            )
    guided = sum(row['guided'] for row in rows)
    return (
        f'{format_count(len(rows), "iteration")}, {guided} of them guided: every bit '
        f'the same'
    )
