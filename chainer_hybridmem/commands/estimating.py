"""What the commands share that estimate: their options, samples and limit."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from chainer_hybridmem.commands import arguments, outputs, programs
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.terminal import printable

if TYPE_CHECKING:
    from chainer_hybridmem.commands.programs import Asked
    from chainer_hybridmem.commands.progress import Progress
    from chainer_hybridmem.forecasting.estimation import (
        Estimator,
        SamplePair,
        StepEstimator,
    )

STUDIES = 'for research'  # heading of options that most users leave alone
PLANS = 'another network or plan'
USAGE = '%(prog)s [options] (--arch NAME{} | -- PROGRAM ...)'
ONE_RAM = (
    'The limit is all RAM, in which host copies lie, too: none are planned. Train with '
    'host_limit=0, or name a --memory-limit that leaves room for them.'
)
NO_LIMIT = 'How much memory is there? Name a GPU with --gpu, or give --memory-limit.'


def add_device(group: Any, limit: Any = arguments.Limit) -> None:
    """Adds the options that say what the estimate is for.

    Args:
        group: Group of the parser's arguments.
        limit: As for :func:`arguments.add_limit`.
    """
    from chainer_hybridmem.forecasting.estimation import model_names

    group.add_argument(
        '--gpu',
        metavar='MODEL',
        help=f'{", ".join(model_names())}, or a JSON file of your own; '
        f'default: the device of the recording',
    )
    arguments.add_limit(
        group, limit, default="the GPU's memory or, on a CPU, all the RAM"
    )


def add_plan(parser: argparse.ArgumentParser) -> Any:
    """Adds the options for plans that are not as usual, below a heading.

    Returns:
        Their group.
    """
    group = parser.add_argument_group(PLANS)
    arguments.add_planner(group)
    arguments.add_problem(group)
    return group


def add_model(parser: argparse.ArgumentParser, in_parts: bool = False) -> None:
    """Adds the options that change how the estimate is made, below a heading.

    Args:
        parser: Parser of the command.
        in_parts: As for :func:`arguments.add_sample_batches`.
    """
    group = parser.add_argument_group(
        STUDIES, 'what the model assumes, and what is recorded for it'
    )
    group.add_argument(
        '--convolution',
        choices=('cudnn', 'im2col'),
        help="how the GPU convolves; default the model's",
    )
    group.add_argument(
        '--images-per-second',
        type=arguments.above_zero,
        metavar='X',
        help='calibrate: this speed was measured in-core ...',
    )
    group.add_argument(
        '--calibrate-batch',
        type=arguments.positive,
        metavar='B',
        help='... with this batch size',
    )
    arguments.add_recording_device(
        group,
        '--record-on',
        'default cpu; without --gpu auto: cuda where there is a GPU',
    )
    arguments.add_sample_batches(group, in_parts, default=None)
    parser.set_defaults(in_parts=in_parts)
    group.add_argument(
        '--samples',
        metavar='FILE',
        help='read the recordings from this file; if it is not there, record '
        'and write it',
    )


def open_progress(args: argparse.Namespace, steps: int) -> Progress:
    """Progress of a command that obtains samples and has so many steps behind them."""
    from chainer_hybridmem.commands import samples
    from chainer_hybridmem.commands.progress import Progress

    recorded = 0 if samples.is_kept(args.samples) else 2
    return Progress(recorded + steps, sys.stderr)


class Sampled(NamedTuple):
    """What is estimated from.

    Attributes:
        asked (Network or Program): What was recorded.
        step (StepEstimator): Its iterations.
        note (str or None): What to tell beside it.
    """

    asked: Asked
    step: StepEstimator
    note: str | None = None


def tell_note(sampled: Sampled) -> None:
    """Tells on standard error what belongs to the answer."""
    if sampled.note is not None:
        print(printable(f'hybridmem: note: {sampled.note}'), file=sys.stderr)


def find_asked(args: argparse.Namespace) -> Asked:
    """The network or program of a command line.

    Raises:
        OptionError: As :func:`programs.find` does.
    """
    on = args.record_on or ('auto' if args.gpu is None else 'cpu')
    return programs.find(args, on, samples=None, record_on=None)


def obtain(args: argparse.Namespace, asked: Asked, progress: Progress) -> Sampled:
    """What the command line asks to estimate from.

    Args:
        args: With the options of this module, ``output`` and ``json``.
        asked: Of :func:`find_asked`.
        progress: Of :func:`open_progress`.

    Raises:
        OptionError: If options contradict each other or nothing tells the limit.
        HybridMemoryError: If the network cannot be recorded.
    """
    from chainer_hybridmem.commands import samples
    from chainer_hybridmem.forecasting.estimation import (
        StepEstimator,
        choose_convolution,
        load_device_model,
    )

    model = load_device_model(args.gpu) if args.gpu is not None else None
    if (args.images_per_second is None) != (args.calibrate_batch is None):
        raise OptionError(
            'Calibration needs both --images-per-second and --calibrate-batch: a '
            'measured speed and the batch size it was measured with.'
        )
    choose_convolution(model, args.convolution)
    if not samples.is_kept(args.samples):
        outputs.check_output(args.samples)
    outputs.check_outputs(args.output, args.json, (args.samples,))
    here, note = model is None, None
    batchsizes = args.sample_batches
    if batchsizes is None:
        batchsizes = _choose_batchsizes(args, asked, here)
    here = here or args.samples is not None  # what is kept tells it, too

    def record(one: Asked) -> list[tuple[SamplePair, int]]:
        nonlocal note
        pairs, note = programs.record_samples(one, batchsizes, here, progress)
        return pairs

    if isinstance(asked, programs.Network):
        asked, pair = samples.obtain(
            asked, args.samples, lambda network: record(network)[0][0]
        )
        pairs = [(pair, 1)]
    else:
        pairs = record(asked)
    step = StepEstimator.make(pairs, model, args.convolution)
    if args.images_per_second is not None:
        first = step.largest(args.calibrate_batch)
        factor = first.calibrated(args.images_per_second, args.calibrate_batch)
        step = step.changed(lambda one: one.with_factor_of(factor))
    ranks = args.shared_by
    step = step.changed(lambda one: dataclasses.replace(one, ranks=ranks))
    return Sampled(asked, step, note)


def _choose_batchsizes(
    args: argparse.Namespace, asked: Asked, here: bool
) -> tuple[int, int]:
    """Batch sizes to record, where none are named."""
    batchsizes = arguments.SAMPLE_BATCHSIZES
    if here and args.in_parts and args.splitting:
        batchsizes = arguments.PART_SAMPLE_BATCHSIZES
    own = asked.batchsize if isinstance(asked, programs.Program) else None
    if here and own is not None and own // 4 > batchsizes[0]:
        return own // 4, own // 2  # times of tiny ones tell little of larger ones
    return batchsizes


def host_limit_beside(limit: object, estimator: Estimator) -> int | None:
    """Most bytes of host copies beside a memory limit; None is without a limit.

    On a CPU host copies lie in the same RAM. Where the limit is all of that, there is
    no room for any.

    Args:
        limit: That was named; None for all there is.
        estimator: Of a device.
    """
    return 0 if limit is None and _is_of_cpu(estimator) else None


def _is_of_cpu(estimator: Estimator) -> bool:
    if estimator.model is not None:
        return False
    return bool(estimator.samples.large.device.get('kind') == 'host')


def device_bytes(estimator: Estimator) -> int:
    """The memory of the device, where no limit is given.

    On a CPU it is the RAM of this machine or, in a container, what that may have.

    Raises:
        OptionError: If the device does not tell it.
    """
    if estimator.model is not None:
        return estimator.model.memory_bytes
    device = estimator.samples.large.device
    if _is_of_cpu(estimator):
        from chainer_hybridmem.training.devices.ram import total_ram

        return total_ram()
    total = device.get('total_bytes')
    if not isinstance(total, int) or total < 1:
        raise OptionError(NO_LIMIT)
    return total
