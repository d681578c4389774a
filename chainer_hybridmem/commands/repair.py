"""``hybridmem repair``: Chainer works in every program of this environment."""

from __future__ import annotations

import argparse

from chainer_hybridmem.commands import base
from chainer_hybridmem.training.chainer_access.compat import switch


class RepairCommand(base.Command):
    """Has Chainer repaired in every program of this environment, or no longer.

    Programs that do not know of this package can then be started as ever. Without a
    flag, it says which it is.
    """

    name = 'repair'
    help = 'have Chainer repaired in every program of this environment'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        group.add_argument(
            '--enable', action='store_true', help='from now on, in every program'
        )
        group.add_argument(
            '--disable', action='store_true', help='only where it is asked for again'
        )

    def run(self, args: argparse.Namespace) -> int:
        if args.enable:
            print(f'wrote {switch.enable()}')
        elif args.disable:
            print(f'removed {switch.disable()}')
        print(f'Chainer is repaired {describe()}')
        return 0


def describe() -> str:
    """In which programs Chainer is repaired."""
    if switch.is_enabled():
        return 'in every program'
    where = 'in programs that import chainer_hybridmem and under hybridmem run'
    if not switch.children_are_reached():
        where += f', not in its children: {switch.CHILDREN} is not in site-packages'
    return where
