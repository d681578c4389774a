"""``hybridmem verify``: trains twice from one seed and compares every bit."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.commands import arguments, base, outputs
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.errors import HybridMemoryError, OptionError
from chainer_hybridmem.records.plan import Action
from chainer_hybridmem.reporting.tables import table
from chainer_hybridmem.units import format_apart, format_bytes, format_count

if TYPE_CHECKING:
    from chainer_hybridmem.chainer_access.snapshots import Snapshot
    from chainer_hybridmem.commands.recording import Memory, Network, Training
    from chainer_hybridmem.session.session import Session

ITERATIONS = 10
IN_CORE = 'in-core'


class VerifyCommand(base.Command):
    """Trains an architecture twice from the same seed and compares every bit.

    Once in a memory limit, and once as plain Chainer (in-core) or, where that does
    not fit, with a second planner. Losses, gradients, parameters, optimizer states,
    persistent arrays and the random state are compared after every iteration;
    what backward reads is checked, too. Exit status 1 if anything differs. A limit in
    percent is a share of the in-core peak, which is then recorded first.
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
        arguments.add_rules(parser)
        arguments.add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.planners import DEFAULT, check_name

        planner = check_name(DEFAULT if args.planner is None else args.planner)
        against = check_name(args.against)
        if planner == against:
            raise OptionError(
                f'{planner} would be compared with itself; name another planner with '
                f'--planner or --against.'
            )
        outputs.check_output(args.json)
        base.import_chainer()
        from chainer_hybridmem.commands import recording

        network = recording.Network(
            args.arch, args.batchsize, args.insize, args.n_class
        )
        steps = 2 * args.iterations + args.memory_limit.is_share
        with Progress(steps, sys.stderr) as progress:
            if args.memory_limit.is_share:
                progress.step('recording the in-core peak')
            memory = recording.Memory.of(args, network)
            limited, other = (
                train(network, memory, args.iterations, name, args.rules, progress)
                for name in (planner, None if against == IN_CORE else against)
            )
        figures = compare(limited, other)
        figures = {
            **dataclasses.asdict(network),
            'planner': planner,
            'against': against,
            'memory_limit_bytes': memory.limit_bytes,
            **figures,
        }
        outputs.publish(text(figures), figures, args.json)
        return 0 if figures['same'] else 1


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        snapshots (list of Snapshot): After every iteration.
        guided (list of bool): Whether it has followed a plan.
        session (Session or None): It ran in; None for plain Chainer.
    """

    snapshots: list[Snapshot]
    guided: list[bool]
    session: Session | None


def train(
    network: Network,
    memory: Memory,
    iterations: int,
    planner: str | None,
    rules: Any,
    progress: Progress,
) -> Run:
    """Trains from the same seed every time.

    Args:
        network: What to train.
        memory: What to train it in.
        iterations: How many.
        planner: Plans; None for plain Chainer without a limit.
        rules: What its plans obey.
        progress: Has a step for each iteration.

    Raises:
        VerificationError: If backward does not read what forward has made.
        HybridMemoryError: If it cannot be trained, or nothing was guided.
    """
    import numpy as np

    from chainer_hybridmem.commands import recording
    from chainer_hybridmem.recompute import drawing

    device = recording.choose_device(memory.device)
    try:
        training = recording.prepare(network, device)
        if device.xp is not np:
            drawing.seed_gpu(0)
        if planner is None:
            return train_plain(training, iterations, progress)
        return train_limited(training, memory, iterations, planner, rules, progress)
    except (HybridMemoryError, MemoryError):
        raise
    except Exception as error:
        raise recording.explained(network, error) from error


def train_plain(training: Training, iterations: int, progress: Progress) -> Run:
    """Trains as plain Chainer, without a limit."""
    from chainer_hybridmem.chainer_access.snapshots import snapshot

    snapshots = []
    for _ in range(iterations):
        progress.step(f'training {IN_CORE}')
        snapshots.append(snapshot(training.model, training.step()))
    return Run(snapshots, [False] * iterations, None)


def train_limited(
    training: Training,
    memory: Memory,
    iterations: int,
    planner: str,
    rules: Any,
    progress: Progress,
) -> Run:
    """Trains in a session that verifies every iteration that follows a plan.

    Raises:
        HybridMemoryError: If none has.
    """
    from chainer_hybridmem.chainer_access.snapshots import snapshot
    from chainer_hybridmem.session.optimizing import optimize

    snapshots, guided = [], []
    with optimize(
        training.model,
        memory.limit_bytes,
        planner,
        progress=progress.lines,
        verify=iterations,
        rules=rules,
        **memory.device_options(),
    ) as session:
        for _ in range(iterations):
            progress.step(f'training with {planner}')
            snapshots.append(snapshot(training.model, training.step()))
            session.finish_iteration()
            guided.append(bool(session.last_iteration()['guided']))
    if not any(guided):
        raise HybridMemoryError(
            f'None of {format_count(iterations, "iteration")} has followed a plan of '
            f'{planner}; allow more with --iterations.'
        )
    return Run(snapshots, guided, session)


def compare(run: Run, other: Run) -> dict[str, Any]:
    """What is the same after every iteration, as plain values."""
    from chainer_hybridmem.chainer_access.snapshots import KINDS, first_difference

    rows = []
    for number, (left, right) in enumerate(
        zip(run.snapshots, other.snapshots, strict=True)
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
    assert run.session is not None
    verdict = run.session.verdict
    plan = run.session.plan
    assert plan is not None
    return {
        'same': all(row['first_difference'] is None for row in rows),
        'peak_bytes': run.session.statistics()['peak_bytes'],
        'swapped_maps': plan.count(Action.SWAP),
        'recomputed_maps': plan.count(Action.RECOMPUTE),
        'verdict': None if verdict is None else dataclasses.asdict(verdict),
        'iterations': rows,
    }


def text(figures: dict[str, Any]) -> str:
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
        f'{figures["arch"]}, {format_count(figures["batchsize"], "picture")}: '
        f'{figures["planner"]} in '
        f'{limit} (peak {peak}) against {figures["against"]}'
    )
    parts = [title, table(['iteration', 'state', *kinds], cells, left=len(kinds) + 2)]
    verdict = figures['verdict']
    if verdict is not None:
        parts.append(
            f'{format_count(verdict["maps"], "feature map")} as forward made them, '
            f'{format_count(verdict["replays"], "replay")} without any other effect'
        )
    parts.append(conclusion(rows))
    if not figures['swapped_maps'] + figures['recomputed_maps']:
        parts.append(
            f'Warning: the plan keeps every feature map, so nothing was put to the '
            f'test. Training takes {format_bytes(figures["peak_bytes"])}; give less '
            f'with --memory-limit, such as 80%.'
        )
    return '\n\n'.join(parts)


def conclusion(rows: list[dict[str, Any]]) -> str:
    """One line: all the same, or where the first difference is."""
    for row in rows:
        if row['first_difference'] is not None:
            kind, name = row['first_difference']
            return (
                f'DIFFERENT from iteration {row["iteration"]} on: {kind}, {name}. '
                f'Where the program itself gives other bits in every run (atomic '
                f'additions on a GPU), so does this.'
            )
    guided = sum(row['guided'] for row in rows)
    return (
        f'{format_count(len(rows), "iteration")}, {guided} of them guided: every bit '
        f'the same'
    )
