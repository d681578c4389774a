"""Trains a picture classifier in several processes, each past its memory limit.

ChainerMN's ImageNet example with two things more: the extension HybridMemory, and its
option ``communicator``, with which the processes of a machine plan for the link that
they share. On CPUs with two processes:

    mpiexec -n 2 python train_mn.py --demo

On GPUs, one process for each, with NCCL:

    mpiexec -n 4 python train_mn.py --communicator pure_nccl --device cuda \
        --arch resnet50 --batchsize 128 --memory-limit 6GiB --dataset train.txt
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import train  # prepares NumPy for chainer

# isort: split
import chainer
import chainermn
import datasets
import picture_files
from chainer.training import extensions

from chainer_hybridmem import architectures
from chainer_hybridmem.errors import HybridMemoryError

COMMUNICATORS = ('naive', 'flat', 'pure_nccl')


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says; every process runs this.

    Returns:
        The exit status: 0, or 1 if the training did not fit the memory limit.
    """
    parser = train.make_parser()
    parser.add_argument(
        '--communicator',
        choices=COMMUNICATORS,
        default='naive',
        help='of ChainerMN; pure_nccl where each process has a GPU',
    )
    args = train.parse_arguments(parser, argv)
    communicator = chainermn.create_communicator(args.communicator)
    try:
        trainer, extension = make_trainer(args, communicator)
    except (train.UsageError, picture_files.DatasetError, HybridMemoryError) as error:
        parser.error(str(error))
    if communicator.rank == 0:
        shared = f', {communicator.size} processes'
        print(train.describe(args, trainer) + shared)
    trainer.run(show_loop_exception_msg=False)  # an error ends all processes
    if extension is not None and communicator.rank == 0:
        print(extension.session.report())
    return 0


def make_trainer(
    args: argparse.Namespace, communicator: Any
) -> tuple[chainer.training.Trainer, Any | None]:
    """Builds what one process runs; see :func:`train.make_trainer`."""
    train.seed_everything(args.seed)
    device = choose_device(args, communicator)
    pictures, validation = scatter(args, communicator)
    model = architectures.make(args.arch, pictures.n_class)
    model.to_device(device)
    device.use()
    optimizer = chainermn.create_multi_node_optimizer(
        train.make_optimizer(args), communicator
    ).setup(model)
    updater = chainer.training.StandardUpdater(
        train.make_iterator(pictures, args), optimizer, device=device
    )
    trainer = chainer.training.Trainer(updater, train.stop_trigger(args), args.out)
    if validation is not None:
        iterator = train.make_iterator(validation, args, train=False)
        evaluator = extensions.Evaluator(iterator, model, device=device)
        trainer.extend(chainermn.create_multi_node_evaluator(evaluator, communicator))
    link = communicator.mpi_comm.bcast(f'imagenet-{os.getpid()}')
    extension = train.add_memory(trainer, args, communicator, link)
    if communicator.rank == 0:
        train.add_log(trainer, args)
    if args.snapshot_interval != 0 or args.resume:
        snapshots = chainermn.create_multi_node_checkpointer(
            'imagenet', communicator, path=args.out
        )
        trainer.extend(snapshots, trigger=train.snapshot_trigger(args))
        if args.resume:
            snapshots.maybe_load(trainer, optimizer, args.resume)
    return trainer, extension


def choose_device(args: argparse.Namespace, communicator: Any) -> Any:
    """The device of this process: on a machine with GPUs, one for each."""
    device = train.choose_device(args.device)
    if device.xp is chainer.backends.cuda.cupy:
        return chainer.get_device(f'@cupy:{communicator.intra_rank}')
    return device


class Part:
    """The pictures of one process.

    Args:
        pictures: All of them.
        part: Those of this process, as ChainerMN deals them out.
    """

    def __init__(self, pictures: datasets.Pictures, part: Any) -> None:
        self.n_class, self.insize = pictures.n_class, pictures.insize
        self._part = part

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: Any) -> Any:
        return self._part[index]


def scatter(args: argparse.Namespace, communicator: Any) -> tuple[Part, Part | None]:
    """Deals the pictures out, the same number to each process."""
    pictures, validation = train.make_datasets(args)

    def deal(whole: datasets.Pictures, shuffle: bool) -> Part:
        part = chainermn.scatter_dataset(
            whole if communicator.rank == 0 else None,
            communicator,
            shuffle=shuffle,
            seed=args.seed,
        )
        return Part(whole, part)

    checked = None if validation is None else deal(validation, False)
    return deal(pictures, True), checked


if __name__ == '__main__':
    sys.exit(main())
