"""Arguments that several sub-commands have."""

from __future__ import annotations

import argparse
import difflib
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.reporting.rows import in_core_row
from chainer_hybridmem.training.session.setting.options import FOLDER, OPTIONS
from chainer_hybridmem.units import (
    AUTO,
    FREE,
    format_apart,
    is_percentage,
    parse_bytes,
    parse_limit,
)

if TYPE_CHECKING:
    from chainer_hybridmem.planning.records.profile import Profile
    from chainer_hybridmem.planning.simulation import Problem


PROFILE = (
    'recorded iteration: a file, or one that comes with the package, such as '
    'shipped:resnet50-b8-host (hybridmem compare --help names all)'
)


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


def reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that turns an argument into a value, as argparse wants it.

    Args:
        read: Raises OptionError.
    """

    def read_argument(text: str) -> Any:
        try:
            return read(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_argument


@reader
def ranks(text: str) -> int:
    """Turns an argument into a number of processes on one link."""
    from chainer_hybridmem.planning.records.sharing import check_ranks

    return check_ranks(positive(text), 'it')


@reader
def size(text: str) -> int:
    """Turns an argument such as ``16GB`` into bytes."""
    number = parse_bytes(text)
    if text.strip().isdigit() and number < FEWEST_BYTES:
        raise OptionError(
            f'{text!r} would be {number} bytes; name a unit: {text.strip()}GB'
        )
    return number


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


@reader
def limit_of_run(text: str) -> str:
    """Checks the limit of a program: a size, a percentage, ``auto`` or ``free``."""
    words = AUTO, FREE
    if text in words:
        return text
    close = difflib.get_close_matches(text.strip().lower(), words, 1)
    if close:
        raise OptionError(f'{text!r} is not a limit. Did you mean {close[0]}?')
    limit = Limit(text)
    if not limit.is_share:
        parse_limit(limit.text, 'it')
    return limit.text


class Limit:
    """A memory limit: a number of bytes, or a share of the in-core peak.

    Args:
        text: Such as ``'16GB'`` or ``'50%'``.

    Raises:
        OptionError: If it is neither.
    """

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        nbytes = self.bytes_of(1)
        if self.text.isdigit() and nbytes < FEWEST_BYTES:
            raise OptionError(
                f'{self.text!r} would be {self.text} bytes; write {self.text}% for '
                f'a share of the in-core peak, or name a unit: {self.text}GB'
            )

    @property
    def is_share(self) -> bool:
        """Whether it is a share of the in-core peak."""
        return is_percentage(self.text)

    def bytes_of(self, peak_bytes: int) -> int:
        """The limit in bytes where plain Chainer needs so many."""
        return parse_bytes(self.text, whole_bytes=peak_bytes)

    def bytes_for(self, problem: Problem) -> int:
        """What the limit is for one profile, of which a percentage is a share."""
        return self.bytes_of(problem.whole_bytes)

    def find_bytes(self, record_peak: Callable[[], int]) -> tuple[int, int | None]:
        """The limit in bytes, and the in-core peak if the limit is a share of it.

        Args:
            record_peak: Records the peak, in bytes.
        """
        if not self.is_share:
            return self.bytes_of(1), None
        peak_bytes = record_peak()
        return self.bytes_of(peak_bytes), peak_bytes

    def describe(self, problem: Problem) -> str:
        """The limit for people, next to the in-core peak it is to be seen with."""
        limit, peak = self.bytes_for(problem), problem.whole_bytes
        share = f'{limit / peak:.0%} of the ' if peak else ''
        limit_text, peak_text = format_apart(limit, peak)
        name, _ = in_core_row(problem.in_core.plain_peak_bytes, peak)
        return f'{limit_text}, {share}{name} of {peak_text}'


# -- arguments ----------------------------------------------------------------
OF_NETWORKS = 'n_class', 'insize'  # in messages, they are parameters of a user's class
OF_COPIES = 'link_bandwidth', 'shared_link', 'swap_dir', 'host_limit', 'disk_bandwidth'
OF_PLANS = 'cross_iteration', 'splitting', 'rules'


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
        type=reader(kind),
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
    add_options(group, *OF_COPIES, 'cross_iteration', 'splitting')


def add_options(group: Any, *names: str) -> None:
    """Adds the flags of options of a session, as ``Options`` declares them."""
    for name in names:
        option = OPTIONS[name]
        flag = option.metadata['flag']
        kind = {'type': reader(flag.read), 'metavar': flag.metavar}
        if flag.metavar is None:
            kind = {'action': 'store_true'}
        elif flag.repeated:
            kind['action'] = 'append'
        group.add_argument(
            flag.spelling or f'--{name.replace("_", "-")}',
            dest=name,
            default=option.default,
            help=flag.help,
            **kind,
        )


def session_options(args: argparse.Namespace) -> dict[str, Any]:
    """What flags of :func:`add_options` say, by name; defaults are left out.

    Paths stay right if a program changes its folder.
    """
    found = {}
    for name, option in OPTIONS.items():
        flag, value = option.metadata['flag'], vars(args).get(name, option.default)
        if flag is not None and value != option.default:
            is_path = flag.metavar == FOLDER and value
            found[name] = os.path.abspath(value) if is_path else value
    return found


def check_copies(args: argparse.Namespace) -> None:
    """Refuses, before a program begins, what its session on a CPU would refuse.

    Raises:
        OptionError: If ``OF_COPIES`` contradict each other.
        SwapStoreError: If there can be no files in ``--swap-dir``.
    """
    told = {name: getattr(args, name) for name in OF_COPIES}
    host_limit = told.pop('host_limit')
    if host_limit is None and not any(told.values()):
        return
    from chainer_hybridmem.training.devices import host_limit_bytes, open_device

    most_bytes = host_limit_bytes(host_limit, args.swap_dir)
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


def add_problem(group: Any, *more: str) -> None:
    """Adds the flags that say what is planned of a profile.

    Args:
        group: Parser, or group of its arguments.
        more: Options of a session beside ``OF_PLANS``.
    """
    add_options(group, *more, *OF_PLANS)
    group.add_argument(
        '--shared-by',
        type=ranks,
        metavar='N',
        help='plan for N equal processes that copy over the same link at the same '
        'time; default: as the profile says',
    )


def problem_of(args: argparse.Namespace, profile: Profile) -> Problem:
    """What is planned of a profile, with the flags of :func:`add_problem`.

    Raises:
        OptionError: If a rule names nothing.
    """
    from chainer_hybridmem.planning.records.sharing import share_links
    from chainer_hybridmem.planning.simulation import make_problem

    return make_problem(
        share_links(profile, args.shared_by),
        args.cross_iteration,
        vars(args).get('host_limit'),
        args.splitting,
        rules=args.rules,
    )


def planner_of(args: argparse.Namespace, usual: str | None = None) -> str:
    """The planner of a command line.

    Args:
        args: With the flag of :func:`add_planner`.
        usual: What counts where none is named; None for the default planner.

    Raises:
        UnknownNameError: If there is none with this name.
    """
    from chainer_hybridmem.planning.planners import DEFAULT, check_name

    named = args.planner
    return check_name((usual or DEFAULT) if named is None else named)


def add_output(parser: Any, help: str, required: bool = False) -> None:
    """Adds ``--output``, the file that a command writes."""
    parser.add_argument('-o', '--output', metavar='FILE', help=help, required=required)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json`` of the commands that print a table."""
    parser.add_argument(
        '--json',
        metavar='FILE',
        help="write the figures as JSON too; '-' prints them instead of the table",
    )


def add_planned(parser: argparse.ArgumentParser) -> None:
    """Adds the files of the commands that draw a planned iteration."""
    parser.add_argument('profile', metavar='PROFILE', help=PROFILE)
    parser.add_argument('plan', metavar='PLAN', help='a plan made for it')
