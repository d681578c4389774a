"""What the commands share that estimate: their options, samples and limit."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.commands import arguments, outputs
from chainer_hybridmem.errors import OptionError

if TYPE_CHECKING:
    from chainer_hybridmem.commands.progress import Progress
    from chainer_hybridmem.commands.samples import Samples
    from chainer_hybridmem.estimation import Estimator

STUDIES = 'for research'  # heading of options that most users leave alone
NO_LIMIT = 'How much memory is there? Name a GPU with --gpu, or give --memory-limit.'


def add_device(group: Any, limit: Any = arguments.Limit) -> None:
    """Adds the options that say what the estimate is for.

    Args:
        group: Group of the parser's arguments.
        limit: As for :func:`arguments.add_limit`.
    """
    from chainer_hybridmem.estimation import model_names

    group.add_argument(
        '--gpu',
        metavar='MODEL',
        help=f'{", ".join(model_names())}, or a JSON file of your own; '
        f'default: the device of the recording',
    )
    arguments.add_limit(
        group, limit, default="the GPU's memory or, on a CPU, all the RAM"
    )
    arguments.add_sharing(group)


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
        '--recompute',
        choices=('whole', 'pass'),
        help='whether one kernel replays several functions (pass, the default), or '
        'only whole forwards are replayed (whole)',
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
    arguments.add_sample_batches(group, in_parts)
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

    return Progress(samples.count_steps(args.samples) + steps, sys.stderr)


def obtain(args: argparse.Namespace, progress: Progress) -> tuple[Samples, Estimator]:
    """The samples and the estimator that the command line asks for.

    Args:
        args: With the options of this module, ``output`` and ``json``.
        progress: Of :func:`open_progress`.

    Raises:
        OptionError: If options contradict each other or nothing tells the limit.
        HybridMemoryError: If the network cannot be recorded.
    """
    from chainer_hybridmem.commands import samples
    from chainer_hybridmem.estimation import Estimator, load_device_model, ways

    model = load_device_model(args.gpu) if args.gpu is not None else None
    device = args.record_on or ('auto' if model is None else 'cpu')
    if (args.images_per_second is None) != (args.calibrate_batch is None):
        raise OptionError(
            'Calibration needs both --images-per-second and --calibrate-batch: a '
            'measured speed and the batch size it was measured with.'
        )
    ways(model, args.convolution, args.recompute)
    if args.samples is None or not os.path.isfile(args.samples):
        outputs.check_output(args.samples)
    read = [path for path in (args.samples,) if path is not None]
    outputs.check_outputs(args.output, args.json, inputs=read)
    batchsizes = args.sample_batches
    if batchsizes is None:
        batchsizes = arguments.SAMPLE_BATCHSIZES
        if model is None and args.splitting:
            batchsizes = arguments.PART_SAMPLE_BATCHSIZES
    sampled = samples.obtain(
        args.arch,
        args.insize,
        args.n_class,
        samples.Sampling(tuple(batchsizes), device, model is None, model is None),
        args.samples,
        progress,
    )
    estimator = Estimator.make(sampled.pair, model, args.convolution, args.recompute)
    if args.images_per_second is not None:
        estimator = estimator.calibrated(args.images_per_second, args.calibrate_batch)
    return sampled, dataclasses.replace(estimator, ranks=args.shared_by)


def device_bytes(estimator: Estimator) -> int:
    """The memory of the device, where no limit is given.

    On a CPU it is the RAM of this machine or, in a container, what that may have.

    Raises:
        OptionError: If the device does not tell it.
    """
    if estimator.model is not None:
        return estimator.model.memory_bytes
    device = estimator.samples.large.device
    if device.get('kind') == 'host':
        from chainer_hybridmem.devices.ram import total_ram

        return total_ram()
    total = device.get('total_bytes')
    if not isinstance(total, int) or total < 1:
        raise OptionError(NO_LIMIT)
    return total
