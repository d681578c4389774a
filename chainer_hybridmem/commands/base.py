"""What every sub-command is.

A command imports what it works with when it runs. So ``--help`` is quick, planning
needs no Chainer, and ``doctor`` still answers where an import fails.
"""

from __future__ import annotations

import abc
import argparse

from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.training.chainer_access import compat


class Command(abc.ABC):
    """One sub-command.

    Attributes:
        name (str): How it is called.
        help (str): What it does, in one line.
    """

    name: str
    help: str

    @abc.abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds its arguments to its parser."""

    @abc.abstractmethod
    def run(self, args: argparse.Namespace) -> int:
        """Does the work and returns the exit status.

        Raises:
            HybridMemoryError: If it cannot be done.
        """


def import_chainer() -> None:
    """Imports Chainer, for the commands that train.

    Raises:
        HybridMemoryError: If it cannot be imported.
    """
    try:
        compat.import_chainer()
    except Exception as error:
        raise HybridMemoryError(
            f'Chainer cannot be imported ({type(error).__name__}: {error}); see what '
            f'is missing with: hybridmem doctor'
        ) from error
