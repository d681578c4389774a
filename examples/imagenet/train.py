"""Trains a picture classifier past the memory limit.

Chainer's ImageNet example with one line more: the extension HybridMemory.

    python train.py --arch resnet50 --memory-limit 2GiB --dataset train.txt
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before chainer, which current NumPy and Python versions import only with its help.
import chainer_hybridmem as hybridmem

# isort: split
import chainer
import datasets
import numpy as np
import picture_files
from chainer.training import extensions

from chainer_hybridmem import architectures
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.training.chainer_access import compat

# What --demo trains: the in-core peak is at least twice the limit, the loss falls, and
# demo.py, which trains it twice, takes less than three minutes on two cores.
DEMO = {
    'arch': 'resnet50',
    'dataset': 'demo',
    'log_interval': 1,
    'snapshot_interval': 0,
}
# The link is throttled to about the ratio of compute to copies of a V100 on PCIe 3,
# so that keeping, swapping and recomputing all have their price.
DEMO_CPU = {
    **DEMO,
    'insize': 112,
    'batchsize': 24,
    'optimizer': 'adam',
    'learning_rate': 0.0003,
    'memory_limit': '500MiB',
    'link_bandwidth': '120MB/s',
    'iterations': 11,
}
DEMO_CUDA = {
    **DEMO,
    'insize': 224,
    'batchsize': 128,
    'learning_rate': 0.0005,
    'memory_limit': '6GiB',
    'iterations': 100,
}

DEFAULT_EPOCHS = 10
DEVICES = {'cpu': '@numpy', 'cuda': '@cupy:0'}


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        The exit status: 0, or 1 if the training did not fit the memory limit.
    """
    parser = make_parser()
    args = parse_arguments(parser, argv)
    try:
        trainer, extension = make_trainer(args)
    except (UsageError, picture_files.DatasetError, HybridMemoryError) as error:
        parser.error(str(error))
    print(describe(args, trainer))
    try:
        # The exception is shown once: here, or by Python with its traceback.
        trainer.run(show_loop_exception_msg=False)
    except (picture_files.DatasetError, HybridMemoryError) as error:
        print(f'{parser.prog}: error: {error}', file=sys.stderr)
        return 1
    if extension is not None:
        print(extension.session.report())
    return 0


class UsageError(Exception):
    """An option cannot be used; the message is one sentence for the user."""


def make_parser() -> argparse.ArgumentParser:
    """Makes the command line's parser."""
    parser = argparse.ArgumentParser(
        description='Train a picture classifier past the memory limit.',
        allow_abbrev=False,
    )
    _add_training_arguments(parser.add_argument_group('training'))
    _add_data_arguments(parser.add_argument_group('pictures'))
    _add_memory_arguments(parser.add_argument_group('memory'))
    return parser


def _add_training_arguments(group: Any) -> None:
    known = ', '.join(architectures.names())
    group.add_argument(
        '--arch', default='resnet50', help=f'{known}, or module:Class of your own'
    )
    group.add_argument('--batchsize', type=positive, default=32)
    stop = group.add_mutually_exclusive_group()
    stop.add_argument(
        '--epoch', type=positive, help=f'default {DEFAULT_EPOCHS}, see --iterations'
    )
    stop.add_argument('--iterations', type=positive, help='stop after these many')
    group.add_argument(
        '--learning-rate',
        type=float,
        help="default the architecture's, mostly 0.01; for adam 0.001",
    )
    group.add_argument('--optimizer', choices=('momentum', 'adam'), default='momentum')
    group.add_argument('--seed', type=int, default=0)
    group.add_argument(
        '--device',
        default='auto',
        help='cpu, cuda, auto (cuda where there is a GPU), or as Chainer spells it',
    )
    group.add_argument('--out', default='result', help='folder for log and snapshots')
    group.add_argument('--resume', help='snapshot to go on from')
    group.add_argument(
        '--snapshot-interval',
        type=not_negative,
        help='iterations between snapshots, 0 for none; default one an epoch',
    )
    group.add_argument(
        '--log-interval',
        type=not_negative,
        default=10,
        help='iterations between lines of the log and the table, 0 for neither',
    )
    group.add_argument(
        '--demo',
        action='store_true',
        help='ResNet-50 on real pictures, with twice the memory that it may use; '
        'other options still count',
    )


def _add_data_arguments(group: Any) -> None:
    group.add_argument(
        '--dataset',
        default='demo',
        help="demo, fashion-mnist, synthetic, or a list file with lines 'path label'",
    )
    group.add_argument(
        '--root',
        help="folder of the list file's pictures (default .) or of Fashion-MNIST's "
        f'idx files (default {datasets.FASHION_MNIST_FOLDER})',
    )
    group.add_argument('--val', help='list file to validate on after each epoch')
    group.add_argument(
        '--insize', type=positive, help="picture size; default the architecture's"
    )
    group.add_argument(
        '--loaderjob',
        type=not_negative,
        default=0,
        help='loader processes; default none',
    )


def _add_memory_arguments(group: Any) -> None:
    group.add_argument('--memory-limit', help='such as 16GiB or 500MB')
    group.add_argument('--planner', default='hybrid', help='default hybrid')
    group.add_argument(
        '--time-budget',
        type=seconds,
        help='seconds to plan in, for planners that search on; default as it takes',
    )
    group.add_argument(
        '--link-bandwidth', help='slow swapping down, such as 2GB/s; default as it is'
    )
    group.add_argument('--swap-dir', help='swap to files in this folder, not to RAM')
    group.add_argument(
        '--no-hybridmem', action='store_true', help='plain Chainer, to compare with'
    )


def positive(text: str) -> int:
    """Turns an argument into an integer above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{number} is not above zero')
    return number


def not_negative(text: str) -> int:
    """Turns an argument into an integer from zero up."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f'{number} is below zero')
    return number


def seconds(text: str) -> float:
    """Turns an argument into seconds above zero."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f'{number} is not above zero')
    return number


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parses the command line; ``--demo`` changes what is not given on it."""
    args = parser.parse_args(argv)
    if args.demo:
        on_cuda = args.device == 'auto' and compat.cuda_available()
        on_cuda = on_cuda or args.device.startswith(('cuda', '@cupy'))
        parser.set_defaults(**(DEMO_CUDA if on_cuda else DEMO_CPU))
        args = parser.parse_args(argv)
    if args.memory_limit is None and not args.no_hybridmem:
        parser.error('give --memory-limit, or --no-hybridmem for plain Chainer')
    return args


def make_trainer(
    args: argparse.Namespace,
) -> tuple[chainer.training.Trainer, Any | None]:
    """Builds everything that the command line asks for.

    Returns:
        The trainer, and the HybridMemory extension or None without it.

    Raises:
        UsageError: An option cannot be used.
        DatasetError: The pictures cannot be read.
        HybridMemoryError: An option of the extension cannot be used.
    """
    seed_everything(args.seed)
    device = choose_device(args.device)
    train, validation = make_datasets(args)
    model = architectures.make(args.arch, class_count(train, validation))
    model.to_device(device)
    device.use()
    optimizer = make_optimizer(args).setup(model)
    # Repeating, so that every batch has the same size and one plan serves them all.
    updater = chainer.training.StandardUpdater(
        make_iterator(train, args), optimizer, device=device
    )
    trainer = chainer.training.Trainer(updater, stop_trigger(args), args.out)
    if validation is not None:
        iterator = make_iterator(validation, args, train=False)
        trainer.extend(extensions.Evaluator(iterator, model, device=device))
    extension = add_extensions(trainer, args)
    if args.resume:
        resume(args.resume, trainer)
    return trainer, extension


def make_optimizer(args: argparse.Namespace) -> chainer.GradientMethod:
    """Makes the optimizer of ``--optimizer`` with ``--learning-rate``."""
    rate = args.learning_rate
    if args.optimizer == 'adam':
        return chainer.optimizers.Adam(**({} if rate is None else {'alpha': rate}))
    if rate is None:
        rate = architectures.learning_rate(args.arch)
    return chainer.optimizers.MomentumSGD(lr=rate)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and, with a GPU, CuPy and Chainer's use of cuDNN."""
    random.seed(seed)
    np.random.seed(seed)
    if compat.cuda_available():
        chainer.backends.cuda.cupy.random.seed(seed)
        os.environ.setdefault('CHAINER_SEED', str(seed))


def choose_device(spec: str) -> chainer.backend.Device:
    """Returns Chainer's device for ``--device``."""
    if spec == 'auto':
        spec = 'cuda' if compat.cuda_available() else 'cpu'
    spec = DEVICES.get(spec, spec)
    if spec.startswith('@cupy') and not compat.cuda_available():
        raise UsageError(
            '--device: CuPy with a GPU is not available here; use --device cpu, or '
            'see what is missing with: hybridmem doctor'
        )
    try:
        return chainer.get_device(spec)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f'--device: {error}') from error


def make_datasets(
    args: argparse.Namespace,
) -> tuple[datasets.Pictures, datasets.Pictures | None]:
    """Opens the pictures to train on and, with ``--val``, those to validate on."""
    insize = args.insize or architectures.insize(args.arch)
    train = open_dataset(args.dataset, args.root, insize, args.seed)
    if args.val is None:
        return train, None
    root = args.root or '.'
    return train, datasets.LabeledImages(args.val, root, insize, train=False)


def open_dataset(
    name: str, root: str | None, insize: int, seed: int
) -> datasets.Pictures:
    """Opens a data set by name, or a list file."""
    if name == 'demo':
        return datasets.demo_pictures(insize, seed=seed)
    if name == 'fashion-mnist':
        return datasets.FashionMnist(insize, root or datasets.FASHION_MNIST_FOLDER)
    if name == 'synthetic':
        return datasets.SyntheticPictures(insize, seed=seed)
    if not Path(name).exists():
        raise UsageError(
            f'--dataset: there is no list file {name!r}, and it is none of demo, '
            f'fashion-mnist, synthetic'
        )
    return datasets.LabeledImages(name, root or '.', insize, seed=seed)


def class_count(train: datasets.Pictures, validation: datasets.Pictures | None) -> int:
    """Returns the number of classes that the network must tell apart."""
    return max(
        pictures.n_class for pictures in (train, validation) if pictures is not None
    )


def make_iterator(
    dataset: datasets.Pictures, args: argparse.Namespace, train: bool = True
) -> chainer.dataset.Iterator:
    """Makes the iterator over batches: endless and shuffled in training."""
    order = {'repeat': train, 'shuffle': train}
    if args.loaderjob < 1:
        return chainer.iterators.SerialIterator(dataset, args.batchsize, **order)
    if multiprocessing.get_start_method(allow_none=True) is None:
        # A process that uses threads or CUDA must not be forked.
        multiprocessing.set_start_method('forkserver')
    return chainer.iterators.MultiprocessIterator(
        dataset, args.batchsize, n_processes=args.loaderjob, **order
    )


def add_extensions(
    trainer: chainer.training.Trainer, args: argparse.Namespace
) -> Any | None:
    """Adds Chainer's usual extensions and, unless told not to, HybridMemory."""
    add_log(trainer, args)
    if args.snapshot_interval != 0:
        trainer.extend(extensions.snapshot(), trigger=snapshot_trigger(args))
    return add_memory(trainer, args)


def add_log(trainer: chainer.training.Trainer, args: argparse.Namespace) -> None:
    """Adds the log and the table, unless told not to."""
    if args.log_interval == 0:
        return
    log = (args.log_interval, 'iteration')
    trainer.extend(extensions.LogReport(trigger=log))
    trainer.extend(extensions.PrintReport(columns(args), out=sys.stdout), trigger=log)


def add_memory(
    trainer: chainer.training.Trainer,
    args: argparse.Namespace,
    communicator: Any = None,
    link: str | None = None,
) -> Any | None:
    """Adds HybridMemory, unless told not to; ``link`` names what processes share."""
    if args.no_hybridmem:
        return None
    options = {} if args.time_budget is None else {'time_budget': args.time_budget}
    extension = hybridmem.HybridMemory(
        memory_limit=args.memory_limit,
        planner=args.planner,
        link_bandwidth=args.link_bandwidth,
        swap_dir=args.swap_dir,
        shared_link=link if args.link_bandwidth else None,
        communicator=communicator,
        progress=communicator is None or communicator.rank == 0,
        **options,
    )
    trainer.extend(extension)
    return extension


def columns(args: argparse.Namespace) -> list[str]:
    """Returns the observations to print."""
    chosen = ['epoch', 'iteration', 'main/loss', 'main/accuracy']
    if args.val is not None:
        chosen += ['validation/main/loss', 'validation/main/accuracy']
    if not args.no_hybridmem:
        chosen += ['hybridmem/peak_bytes', 'hybridmem/iteration_seconds']
    return [*chosen, 'elapsed_time']


def stop_trigger(args: argparse.Namespace) -> tuple[int, str]:
    """Returns when to stop, as Chainer's Trainer takes it."""
    if args.epoch is None and args.iterations is not None:
        return args.iterations, 'iteration'
    return args.epoch or DEFAULT_EPOCHS, 'epoch'


def snapshot_trigger(args: argparse.Namespace) -> tuple[int, str]:
    """Returns when to take snapshots, as Chainer's Trainer takes it."""
    if args.snapshot_interval is None:
        return 1, 'epoch'
    return args.snapshot_interval, 'iteration'


def resume(snapshot: str, trainer: chainer.training.Trainer) -> None:
    """Loads a snapshot of such a training."""
    if not zipfile.is_zipfile(snapshot):
        raise UsageError(f'--resume: there is no snapshot {snapshot!r}')
    try:
        chainer.serializers.load_npz(snapshot, trainer)
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(
            f'--resume: {snapshot!r} is not a snapshot of such a training ({error})'
        ) from error


def describe(args: argparse.Namespace, trainer: chainer.training.Trainer) -> str:
    """Returns what is about to be trained, in one line."""
    updater = trainer.updater
    pictures = updater.get_iterator('main').dataset
    limit = 'no limit' if args.no_hybridmem else f'limit {args.memory_limit}'
    if args.link_bandwidth and not args.no_hybridmem:
        limit += f', copies throttled to {args.link_bandwidth} each way'
    return (
        f'{args.arch} on {len(pictures)} pictures ({type(pictures).__name__}) of '
        f'{pictures.n_class} classes, {pictures.insize}x{pictures.insize}, '
        f'{args.batchsize} a batch, device {updater.device}, {limit}'
    )


if __name__ == '__main__':
    sys.exit(main())
