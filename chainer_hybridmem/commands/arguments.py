"""Arguments that several sub-commands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.commands.argument_types import (
    Limit,
    above_zero,
    bandwidth,
    host_size,
    positive,
    ranks,
    rule,
    splitting,
)

SAMPLE_BATCHSIZES = (2, 4)
PART_SAMPLE_BATCHSIZES = (8, 16)  # enough to see how memory in parts grows


def add_network(group: Any, batchsize: bool = True) -> None:
    """Adds the options that say which network to record.

    Args:
        group: Group of the parser's arguments.
        batchsize: Whether the batch size is one of them.
    """
    from chainer_hybridmem import architectures

    known = ', '.join(architectures.names())
    group.add_argument(
        '--arch',
        required=True,
        metavar='NAME',
        help=f'{known}, or module:Class of your own',
    )
    if batchsize:
        group.add_argument('--batchsize', type=positive, required=True)
    group.add_argument(
        '--insize', type=positive, help="picture size; default the architecture's"
    )
    group.add_argument('--n-class', type=positive, default=1000, help='default 1000')


def add_limit(
    group: Any,
    kind: Callable[[str], Any] = Limit,
    default: str | None = None,
    nargs: str | None = None,
) -> None:
    """Adds ``--memory-limit``.

    Args:
        group: Parser, or group of its arguments.
        kind: :class:`Limit`, or :func:`argument_types.size` where no in-core peak
            is known, nor can be found out.
        default: What counts where it is not given; None if it must be.
        nargs: ``'+'`` for several limits, or other ways to name them in the group.
    """
    forms = 'such as 16GB (10^9), 16GiB (2^30)'
    if kind is Limit:
        forms += ', or 50%% of the in-core peak'
    group.add_argument(
        '--memory-limit',
        type=kind,
        nargs=nargs,
        required=default is None and nargs is None,
        metavar='SIZE',
        help=forms if default is None else f'{forms}; default {default}',
    )


def add_recording_device(
    group: Any, name: str, help: str, default: str | None = None
) -> None:
    """Adds the option that says where the iterations to record are trained."""
    choices = ('auto', 'cpu', 'cuda')
    group.add_argument(name, choices=choices, default=default, help=help)


def add_memory(group: Any) -> None:
    """Adds the options that say what a network is trained in."""
    add_limit(group)
    add_recording_device(
        group, '--device', 'default auto: cuda where there is a GPU', 'auto'
    )
    group.add_argument(
        '--link-bandwidth',
        type=bandwidth,
        metavar='RATE',
        help='slow swapping down, such as 2GB/s; default as it is',
    )
    group.add_argument(
        '--shared-link',
        metavar='NAME',
        help='share --link-bandwidth with all processes that give this name',
    )
    group.add_argument(
        '--swap-dir',
        metavar='FOLDER',
        help='swap to files in this folder, not to RAM; with --host-limit, what '
        'RAM has no room for',
    )
    add_host_limit(group)
    group.add_argument(
        '--disk-bandwidth',
        type=bandwidth,
        metavar='RATE',
        help='slow copies to and from --swap-dir down, such as 200MB/s',
    )


def add_sample_batches(group: Any, in_parts: bool = False) -> None:
    """Adds the option that names the batch sizes to record.

    Args:
        group: Group of the parser's arguments.
        in_parts: Whether there are other batch sizes for networks whose functions may
            run in parts; the option is None then, if it is not given.
    """
    usual = '{} and {}'.format(*SAMPLE_BATCHSIZES)
    if in_parts:
        usual += ', without --gpu {} and {}'.format(*PART_SAMPLE_BATCHSIZES)
    group.add_argument(
        '--sample-batches',
        type=positive,
        nargs=2,
        default=None if in_parts else SAMPLE_BATCHSIZES,
        metavar='B',
        help=f'batch sizes to record; default {usual}',
    )


def add_time_budget(parser: argparse.ArgumentParser) -> None:
    """Adds ``--time-budget`` of the commands that plan."""
    parser.add_argument(
        '--time-budget',
        type=above_zero,
        metavar='SECONDS',
        help='take the best plan found in this time, for planners that search on; '
        'default: as many steps as the planner takes',
    )


def add_cross_iteration(parser: Any) -> None:
    """Adds ``--cross-iteration`` of the commands that plan."""
    parser.add_argument(
        '--cross-iteration',
        choices=('states', 'all'),
        default=False,
        help='optimizer states, or these and parameters (all), may leave between '
        'their uses, too; default: they stay',
    )


def add_host_limit(parser: Any) -> None:
    """Adds ``--host-limit`` of the commands that plan or record."""
    parser.add_argument(
        '--host-limit',
        type=host_size,
        metavar='SIZE',
        help='most RAM for host copies of what is swapped, such as 8GiB; the rest goes '
        'to the disk where there is one (--swap-dir of hybridmem profile), else no '
        'more is swapped; default: no limit',
    )


def add_splitting(parser: Any) -> None:
    """Adds ``--splitting`` of the commands that plan."""
    parser.add_argument(
        '--splitting',
        type=splitting,
        default='exact',
        metavar='{exact,true,false}',
        help='which functions run in parts where they do not fit as a whole, as far as '
        'the profile tells: those that keep every bit (exact, the default), also those '
        'equal up to rounding (true), or none (false)',
    )


def add_rules(parser: Any) -> None:
    """Adds ``--rule`` of the commands that plan."""
    parser.add_argument(
        '--rule',
        action='append',
        default=[],
        type=rule,
        dest='rules',
        metavar='PATTERN=RULE',
        help='what plans may do with the feature maps of layers or functions: keep, '
        "swap, recompute, no keep, no swap, no recompute, 'at most SIZE'; may be given "
        'several times',
    )


def add_sharing(parser: Any) -> None:
    """Adds ``--shared-by`` of the commands that plan."""
    parser.add_argument(
        '--shared-by',
        type=ranks,
        metavar='N',
        help='plan for N equal processes that copy over the same link at the same '
        'time; default: as many as the profile says',
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json`` of the commands that print a table."""
    parser.add_argument(
        '--json',
        metavar='FILE',
        help="write the figures as JSON too; '-' prints them instead of the table",
    )


def add_planned(parser: argparse.ArgumentParser) -> None:
    """Adds the files of the commands that draw a planned iteration."""
    parser.add_argument('profile', metavar='PROFILE', help='recorded iteration')
    parser.add_argument('plan', metavar='PLAN', help='a plan made for it')


def add_measured(parser: argparse.ArgumentParser) -> None:
    """Adds the file of an iteration that has followed the plan."""
    parser.add_argument(
        '--measured',
        metavar='FILE',
        help='measured timeline of an iteration that followed the plan',
    )
