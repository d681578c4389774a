"""What every sub-command shares: its shape, its arguments, its output.

A command imports what it works with when it runs. So ``--help`` is quick, planning
needs no Chainer, and ``doctor`` still answers where an import fails.
"""

from __future__ import annotations

import abc
import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.chainer_access import compat
from chainer_hybridmem.errors import (
    FormatError,
    HybridMemoryError,
    OptionError,
    PlanError,
)
from chainer_hybridmem.records import library
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import format_bytes, parse_bandwidth, parse_bytes

if TYPE_CHECKING:
    from chainer_hybridmem.records.measured_timeline import Measured
    from chainer_hybridmem.records.plan import Plan
    from chainer_hybridmem.records.profile import Profile
    from chainer_hybridmem.records.timeline import Timeline
    from chainer_hybridmem.simulation import Problem

STDOUT = '-'
SAMPLE_BATCHSIZES = (2, 4)


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


# -- arguments ---------------------------------------------------------------------


def positive(text: str) -> int:
    """Turns an argument into an integer above zero."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number above zero')
    return number


def size(text: str) -> int:
    """Turns an argument such as ``16GB`` into bytes."""
    try:
        return parse_bytes(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def host_size(text: str) -> int:
    """Turns an argument such as ``8GiB``, or 0, into bytes."""
    try:
        return parse_bytes(text, least=0)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def bandwidth(text: str) -> float:
    """Turns an argument such as ``2GB/s`` into bytes per second."""
    try:
        return parse_bandwidth(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def above_zero(text: str) -> float:
    """Turns an argument into a number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f'{text!r} is not a number above zero')
    return number


def splitting(text: str) -> bool | str:
    """Turns an argument into what ``splitting`` is for :func:`make_problem`."""
    values: dict[str, bool | str] = {'exact': 'exact', 'true': True, 'false': False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f'{text!r} is not one of {", ".join(values)}')
    return values[text.lower()]


class Limit:
    """A memory limit: a number of bytes, or a share of the in-core peak.

    Args:
        text: Such as ``'16GB'`` or ``'50%'``.

    Raises:
        ArgumentTypeError: If it is neither.
    """

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self._share: float | None = None
        if self.text.endswith('%'):
            self._share = _percentage(self.text)
        else:
            self._bytes = size(self.text)
            if self.text.isdigit() and self._bytes <= 100:
                raise argparse.ArgumentTypeError(
                    f'{self.text!r} would be {self.text} bytes; write {self.text}% for '
                    f'a share of the in-core peak, or name a unit: {self.text}GB'
                )

    def bytes_for(self, problem: Problem) -> int:
        """The limit in bytes for one profile."""
        if self._share is None:
            return self._bytes
        return max(1, int(problem.in_core_peak_bytes * self._share))

    def describe(self, problem: Problem) -> str:
        """The limit for people, next to the in-core peak it is to be seen with."""
        limit, peak = self.bytes_for(problem), problem.in_core_peak_bytes
        share = f'{limit / peak:.0%} of the ' if peak else ''
        return f'{format_bytes(limit)}, {share}in-core peak of {format_bytes(peak)}'


def _percentage(text: str) -> float:
    try:
        percentage = float(text[:-1])
    except ValueError:
        percentage = 0.0
    if not 0 < percentage <= 1e6:
        raise argparse.ArgumentTypeError(f'{text!r} is not a percentage above zero')
    return percentage / 100


def add_network(group: Any) -> None:
    """Adds the options that say which network to record."""
    from chainer_hybridmem import architectures

    known = ', '.join(architectures.names())
    group.add_argument(
        '--arch',
        required=True,
        metavar='NAME',
        help=f'{known}, or module:Class of your own',
    )
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
        kind: :class:`Limit`, or :func:`size` where there is no in-core peak yet.
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
    add_limit(group, size)
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


def add_sample_batches(group: Any) -> None:
    """Adds the option that names the batch sizes to record."""
    group.add_argument(
        '--sample-batches',
        type=positive,
        nargs=2,
        default=SAMPLE_BATCHSIZES,
        metavar='B',
        help='batch sizes to record; default {} and {}'.format(*SAMPLE_BATCHSIZES),
    )


def check_ascending(batchsizes: Sequence[int]) -> None:
    """Checks what ``--sample-batches`` says.

    Raises:
        OptionError: If the second batch size is not above the first.
    """
    first, second = batchsizes
    if not first < second:
        raise OptionError(
            f'The batch sizes to record with are {first} and {second}; name two '
            f'ascending ones.'
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


def planned_inputs(args: argparse.Namespace) -> list[str]:
    """The files that :func:`load_iteration` reads."""
    paths = (args.profile, args.plan, args.measured)
    return [path for path in paths if path is not None]


@contextmanager
def belonging(plan: str, profile: str) -> Iterator[None]:
    """Where the plan of one file is applied to the profile of another.

    Raises:
        FormatError: If it is not a plan for it, naming both files.
    """
    try:
        yield
    except PlanError as error:
        raise FormatError(
            f'{plan} is not a plan for {profile}, make it again: {error}'
        ) from error


def load_iteration(
    args: argparse.Namespace,
) -> tuple[Profile, Plan, Timeline, Measured | None]:
    """Reads profile, plan and measured timeline, and simulates the plan.

    Raises:
        FormatError: If one cannot be read, or they do not belong together.
    """
    from chainer_hybridmem.simulation import simulate

    profile, plan = library.load_profile(args.profile), library.load_plan(args.plan)
    with belonging(args.plan, args.profile):
        timeline = simulate(profile, plan)
    measured = None
    if args.measured is not None:
        measured = library.load_timeline(args.measured)
        theirs, ours = measured.profile_fingerprint, plan.profile_fingerprint
        if theirs != ours:
            raise FormatError(
                f'{args.measured} was measured with a plan for profile {theirs}, '
                f'{args.plan} is for profile {ours}; trace an iteration of this one.'
            )
    return profile, plan, timeline, measured


# -- Chainer -----------------------------------------------------------------------


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


# -- output ------------------------------------------------------------------------


def check_output(path: str | None) -> None:
    """Refuses a file that could not be written, before any work is done.

    Raises:
        FormatError: If its folder is missing or not writable, or if something that
            is not a file has its name.
    """
    if path is None or path == STDOUT:
        return
    if not path:
        raise FormatError('A file without a name cannot be written; name one.')
    folder = os.path.dirname(path) or '.'
    if not os.path.isdir(folder):
        reason = f'there is no folder {folder}'
    elif os.path.lexists(path) and not os.path.isfile(path):
        reason = 'something that is not a file has this name'
    elif not os.access(folder, os.W_OK):
        reason = f'folder {folder} is not writable'
    else:
        return
    raise FormatError(f'{path} cannot be written: {reason}.')


def check_outputs(
    output: str | None, json_path: str | None = None, inputs: Sequence[str] = ()
) -> None:
    """Refuses the files of a command that would overwrite what it reads or writes.

    Args:
        output: ``--output``.
        json_path: ``--json``.
        inputs: Files that the command reads.

    Raises:
        FormatError: If one could not be written or is one of the others.
    """
    if output == STDOUT:
        raise FormatError(
            "'-' is standard output, where the figures are printed; name a file."
        )
    taken = {os.path.realpath(path): 'it is what the command reads' for path in inputs}
    for path in (output, json_path):
        check_output(path)
        if path is None or path == STDOUT:
            continue
        real = os.path.realpath(path)
        if real in taken:
            raise FormatError(
                f'{path} cannot be written: {taken[real]}. Name another file.'
            )
        taken[real] = 'another output has this name'


def publish(table: str, figures: Any, json_path: str | None) -> None:
    """Prints a table, and writes its figures where ``--json`` says.

    Args:
        table: For people.
        figures: Plain values for programs.
        json_path: ``--json``; ``'-'`` prints the figures instead of the table.
    """
    if json_path == STDOUT:
        print(as_json(figures), end='')
        return
    print(printable(table, lines=True))
    if json_path is not None:
        library.write_text(json_path, as_json(figures))


def as_json(value: Any) -> str:
    """JSON text that people can read too."""
    return json.dumps(value, indent=2) + '\n'
