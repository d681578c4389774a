"""Arguments that several sub-commands have."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.reporting.rows import in_core_row
from chainer_hybridmem.units import (
    AUTO,
    FREE,
    format_apart,
    is_percentage,
    parse_bandwidth,
    parse_bytes,
    parse_limit,
)

if TYPE_CHECKING:
    from chainer_hybridmem.planning.simulation import Problem


# -- values: text of the command line, turned into what it means ----------------
# Every function raises argparse.ArgumentTypeError for text that it cannot read.
FEWEST_BYTES = 101  # a number without a unit below it is surely meant with one


def positive(text: str) -> int:
    """Turns an argument into an integer above zero."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number above zero')
    return number


def ranks(text: str) -> int:
    """Turns an argument into a number of processes on one link."""
    from chainer_hybridmem.planning.records.sharing import check_ranks

    try:
        return check_ranks(positive(text), 'it')
    except OptionError as error:
        raise argparse.ArgumentTypeError(f'{text!r}: {error}') from error


def size(text: str) -> int:
    """Turns an argument such as ``16GB`` into bytes."""
    number = _bytes_of(text)
    if text.strip().isdigit() and number < FEWEST_BYTES:
        raise argparse.ArgumentTypeError(
            f'{text!r} would be {number} bytes; name a unit: {text.strip()}GB'
        )
    return number


def _bytes_of(text: str, whole_bytes: int | None = None) -> int:
    try:
        return parse_bytes(text, whole_bytes=whole_bytes)
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


def share(text: str) -> float:
    """Turns an argument such as ``80%`` into a share in (0, 1]."""
    try:
        number = float(text[:-1]) / 100 if text.endswith('%') else float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a share such as 80% or 0.8')
    return number


def splitting(text: str) -> bool | str:
    """Turns an argument into what ``splitting`` is for :func:`make_problem`."""
    values: dict[str, bool | str] = {'exact': 'exact', 'true': True, 'false': False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f'{text!r} is not one of {", ".join(values)}')
    return values[text.lower()]


def rule(text: str) -> tuple[str, str]:
    """Splits an argument ``pattern=rule``."""
    from chainer_hybridmem.planning.records.rules import check_rules

    pattern, separator, says = text.rpartition('=')
    if not separator or not pattern.strip():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form PATTERN=RULE, such as '*/conv1/*=keep'"
        )
    try:
        (checked,) = check_rules([(pattern.strip(), says)])
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return checked.pair


def limit_of_run(text: str) -> str:
    """Checks the limit of a program: a size, a percentage, ``auto`` or ``free``."""
    words = AUTO, FREE
    if text in words:
        return text
    close = difflib.get_close_matches(text.strip().lower(), words, 1)
    if close:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a limit. Did you mean {close[0]}?'
        )
    limit = Limit(text)
    if not limit.is_share:
        try:
            parse_limit(limit.text, 'it')
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return limit.text


class Limit:
    """A memory limit: a number of bytes, or a share of the in-core peak.

    Args:
        text: Such as ``'16GB'`` or ``'50%'``.

    Raises:
        ArgumentTypeError: If it is neither.
    """

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        nbytes = self.bytes_of(1)
        if self.text.isdigit() and nbytes < FEWEST_BYTES:
            raise argparse.ArgumentTypeError(
                f'{self.text!r} would be {self.text} bytes; write {self.text}% for '
                f'a share of the in-core peak, or name a unit: {self.text}GB'
            )

    @property
    def is_share(self) -> bool:
        """Whether it is a share of the in-core peak."""
        return is_percentage(self.text)

    def bytes_of(self, peak_bytes: int) -> int:
        """The limit in bytes where plain Chainer needs so many."""
        return _bytes_of(self.text, peak_bytes)

    def bytes_for(self, problem: Problem) -> int:
        """What the limit is for one profile, of which a percentage is a share."""
        return self.bytes_of(problem.whole_bytes)

    def describe(self, problem: Problem) -> str:
        """The limit for people, next to the in-core peak it is to be seen with."""
        limit, peak = self.bytes_for(problem), problem.whole_bytes
        share = f'{limit / peak:.0%} of the ' if peak else ''
        limit_text, peak_text = format_apart(limit, peak)
        name, _ = in_core_row(problem.in_core.plain_peak_bytes, peak)
        return f'{limit_text}, {share}{name} of {peak_text}'


# -- arguments ----------------------------------------------------------------
OF_NETWORKS = 'n_class', 'insize'  # in messages, they are parameters of a user's class


def find_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What a command has for options of Python, as for ``errors.use_flags``."""
    found = {}
    for action in parser._actions:
        flag = next((s for s in action.option_strings if s.startswith('--')), None)
        if flag is not None and action.dest not in (*OF_NETWORKS, 'help'):
            found[action.dest] = found[flag[2:].replace('-', '_')] = flag
    return found


SAMPLE_BATCHSIZES = (2, 4)
PART_SAMPLE_BATCHSIZES = (8, 16)  # enough to see how memory in parts grows


def add_network(group: Any, batchsize: bool = True, more: Any = None) -> None:
    """Adds the options that say which network to record.

    Args:
        group: Group of the parser's arguments.
        batchsize: Whether the batch size is one of them.
        more: Group of those that are seldom needed, if it is another one.
    """
    from chainer_hybridmem import architectures

    known = ', '.join(architectures.names())
    group.add_argument(
        '--arch',
        metavar='NAME',
        help=f'{known}, or module:Class of your own',
    )
    if batchsize:
        group.add_argument(
            '--batchsize', type=positive, metavar='B', help='examples in a batch'
        )
    group = more or group
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
        kind: :class:`Limit`, or :func:`size` where no in-core peak
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
    add_copies(group)
    add_cross_iteration(group)
    add_splitting(group)


def add_copies(group: Any) -> None:
    """Adds the options that say where swapped feature maps go, and how fast."""
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


def check_copies(args: argparse.Namespace) -> None:
    """Refuses, before a program begins, what its session on a CPU would refuse.

    Raises:
        OptionError: If options of :func:`add_copies` contradict each other.
        SwapStoreError: If there can be no files in ``--swap-dir``.
    """
    names = 'link_bandwidth', 'shared_link', 'swap_dir', 'disk_bandwidth'
    told = {name: getattr(args, name) for name in names}
    if args.host_limit is None and not any(told.values()):
        return
    from chainer_hybridmem.training.devices import host_limit_bytes, open_device

    most_bytes = host_limit_bytes(args.host_limit, args.swap_dir)
    open_device('cpu', FEWEST_BYTES, host_limit_bytes=most_bytes, **told).close()


def add_sample_batches(
    group: Any,
    in_parts: bool = False,
    default: tuple[int, int] | None = SAMPLE_BATCHSIZES,
) -> None:
    """Adds the option that names the batch sizes to record.

    Args:
        group: Group of the parser's arguments.
        in_parts: Whether there are other batch sizes for networks whose functions may
            run in parts.
        default: If it is not given; None where the command finds out.
    """
    usual = '{} and {}'.format(*SAMPLE_BATCHSIZES)
    if in_parts:
        usual += ', without --gpu {} and {}'.format(*PART_SAMPLE_BATCHSIZES)
    group.add_argument(
        '--sample-batches',
        type=positive,
        nargs=2,
        default=default,
        metavar='B',
        help=f'batch sizes to record; default {usual}',
    )


def add_planner(parser: Any) -> None:
    """Adds the name of the planner."""
    parser.add_argument('--planner', metavar='NAME', help='default: that of optimize()')


def add_time_budget(parser: argparse.ArgumentParser) -> None:
    """Adds ``--time-budget`` of the commands that plan."""
    parser.add_argument(
        '--time-budget',
        type=above_zero,
        metavar='SECONDS',
        help='for planners that search on: take the best plan found in this time',
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
        help='most RAM for what is swapped, such as 8GiB; the rest goes to the disk '
        'of --swap-dir (of hybridmem profile), or is not swapped; default: no limit',
    )


def add_splitting(parser: Any) -> None:
    """Adds ``--splitting`` of the commands that plan."""
    parser.add_argument(
        '--splitting',
        type=splitting,
        default='exact',
        metavar='{exact,true,false}',
        help='which functions run in parts where they do not fit as a whole: those '
        'that keep every bit (exact, the default), also those equal up to rounding '
        '(true), or none (false)',
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
        'time; default: as the profile says',
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
