"""``hybridmem`` on the command line: one class and file for each sub-command.

Only :func:`main` turns errors into exit codes:

====  =====================================================================
0     done
1     it cannot be done, as one line on standard error says; or it is done, and the
      answer is no: nothing fits, bits differ, something does not work
2     the command line cannot be understood
130   interrupted with Ctrl-C
141   nothing reads standard output: its reader has gone, or it was closed
====  =====================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from chainer_hybridmem import version
from chainer_hybridmem.commands import arguments
from chainer_hybridmem.commands.arena import ArenaCommand
from chainer_hybridmem.commands.base import Command
from chainer_hybridmem.commands.batch import BatchCommand
from chainer_hybridmem.commands.compare import CompareCommand
from chainer_hybridmem.commands.doctor import DoctorCommand
from chainer_hybridmem.commands.estimate import EstimateCommand
from chainer_hybridmem.commands.importing import ImportCommand
from chainer_hybridmem.commands.inference import InferenceCommand
from chainer_hybridmem.commands.layout import LayoutCommand
from chainer_hybridmem.commands.plan import PlanCommand
from chainer_hybridmem.commands.profile import ProfileCommand
from chainer_hybridmem.commands.progress import leave_all, print_line
from chainer_hybridmem.commands.repair import RepairCommand
from chainer_hybridmem.commands.report import ReportCommand
from chainer_hybridmem.commands.run import RunCommand
from chainer_hybridmem.commands.show import ShowCommand
from chainer_hybridmem.commands.trace import TraceCommand
from chainer_hybridmem.commands.verify import VerifyCommand
from chainer_hybridmem.compiling import told
from chainer_hybridmem.errors import HybridMemoryError, use_flags
from chainer_hybridmem.terminal import printable

__all__ = ['COMMANDS', 'main', 'make_parser']

PROGRAM = 'hybridmem'
OUTPUT_UNREAD = 141  # standard output
GROUPS: dict[str, tuple[type[Command], ...]] = {
    'to begin with': (
        RunCommand,
        EstimateCommand,
        BatchCommand,
        VerifyCommand,
        DoctorCommand,
        RepairCommand,
    ),
    'to plan': (ProfileCommand, PlanCommand, CompareCommand),
    'to look at plans': (ReportCommand, ShowCommand, TraceCommand),
    'for research': (LayoutCommand, InferenceCommand, ImportCommand, ArenaCommand),
}
COMMANDS = tuple(command for group in GROUPS.values() for command in group)
EXAMPLE = 'hybridmem run --memory-limit 60% train.py --epoch 20'


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        int: Exit status.

    Raises:
        SystemExit: With status 2 if the arguments cannot be understood, and with 0
            after ``--help`` and ``--version``.
    """
    unread, python = sys.stdout is None, use_flags({})
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = make_parser(argv).parse_args(argv)
        use_flags(args.flags)
        _prepare_streams()
        try:
            with told(_tell):
                status: int = args.command.run(args)
        finally:
            leave_all()
        sys.stdout.flush()
    except HybridMemoryError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail('interrupted', 130)
    except BrokenPipeError:
        _abandon_broken_stdout()
        return OUTPUT_UNREAD
    except MemoryError as error:
        return _fail(f'this machine is out of memory: {error or "no details"}')
    except OSError as error:
        _abandon_broken_stdout()
        return _fail(str(error))
    finally:
        use_flags(python)
    return status or (OUTPUT_UNREAD if unread else 0)


def make_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Makes the parser of the whole command line.

    Args:
        argv: Arguments that it is for; commands that are not among them get none of
            their own, which takes long for some. None for all of them.
    """
    parser = _Parser(
        prog=PROGRAM,
        description='Train Chainer models whose feature maps do not fit the memory.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='\n'.join(_list_commands()),
        allow_abbrev=False,
    )
    parser.add_argument(
        '--version', action=_Version, nargs=0, help='show version and commit'
    )
    commands = parser.add_subparsers(
        metavar='COMMAND', required=True, help='one of these; COMMAND --help says more'
    )
    for make_command in COMMANDS:
        command = make_command()
        subparser = commands.add_parser(
            command.name,
            description=inspect.getdoc(type(command)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if argv is None or command.name in argv:
            command.add_arguments(subparser)
        flags = arguments.find_flags(subparser)
        subparser.set_defaults(command=command, refuse=subparser.error, flags=flags)
    return parser


def _list_commands() -> Iterator[str]:
    for title, group in GROUPS.items():
        yield f'{title}:'
        yield from (f'  {command.name:<9}  {command.help}' for command in group)
        yield ''
    yield f'for example:\n  {EXAMPLE}'


class _Version(argparse.Action):
    """Looks for the commit only when asked: in a checkout, git has to be run."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f'{PROGRAM} {version.describe()}')
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Says in one line what cannot be understood, and what was probably meant.

    Arguments, which may be names of files, are quoted as they can be printed. What
    begins with a minus and a digit is a value, such as -1GB: its option says what is
    wrong with it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r'-\.?\d')

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = iter(sys.argv[1:] if args is None else args)
        for word in words:
            if word == '--' or not word.startswith('-'):
                self._check_positional(word)
                if self._takes_rest or word == '--':
                    break
            elif word.startswith('--'):
                flag, is_whole, _ = word.partition('=')
                action = self._option_string_actions.get(flag)
                if action is None:
                    self.error(f'there is no option {flag}{self._suggest(flag)}')
                if not is_whole and action.nargs is None:
                    next(words, None)  # its value
        return super().parse_known_args(args, namespace)

    @property
    def _takes_rest(self) -> bool:
        """Whether what follows the first argument is another program's."""
        rest = argparse.REMAINDER, argparse.PARSER
        return any(action.nargs in rest for action in self._actions)

    def _check_positional(self, word: str) -> None:
        if self._subparsers is None or word == '--':
            return
        (commands,) = (a for a in self._actions if a.nargs == argparse.PARSER)
        names = list(commands.choices or ())
        if word in names:
            return
        if os.path.isfile(word) or word.endswith('.py'):
            self.error(f'{word} is no command. Did you mean: {self.prog} run {word}')
        close = difflib.get_close_matches(word, names, 1)
        hint = f'There are {", ".join(names)}.'
        if close:
            hint = f'Did you mean {close[0]}?'
        self.error(f'there is no command {word!r}. {hint}')

    def _suggest(self, flag: str) -> str:
        flags = {name.replace('-', ''): name for name in self._option_string_actions}
        close = difflib.get_close_matches(flag.replace('-', ''), flags, 1)
        if close:
            return f'. Did you mean {flags[close[0]]}?'
        if any(a.dest == 'program' and a.nargs == '*' for a in self._actions):
            return f'; for a program, write: {self.prog} ... -- PROGRAM {flag}'
        return f'; {self.prog} --help names them'

    def error(self, message: str) -> NoReturn:
        lacking = re.match(r'argument .*?(--?[\w-]+): expected one argument', message)
        if lacking:
            flag = lacking[1]
            message += f'; one that begins with - has = before it: {flag}=-VALUE'
        if message.startswith('the following arguments are required'):
            message += f'; {self.prog} --help says more'
        self.exit(2, f'{self.prog}: error: {printable(message)}\n')


def _tell(message: str) -> None:
    print_line(f'{PROGRAM}: {message}', sys.stderr)


def _fail(message: str, status: int = 1) -> int:
    line = printable(' '.join(message.split()))
    print(f'{PROGRAM}: error: {line}', file=sys.stderr)
    return status


def _prepare_streams() -> None:
    """Python has None for a stream that was closed before it began.

    What the encoding of standard output does not have is escaped, as on standard error.
    """
    for name in ('stdout', 'stderr'):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, 'w', encoding='utf-8'))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='backslashreplace')


def _abandon_broken_stdout() -> None:
    """Keeps Python from complaining about standard output once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
