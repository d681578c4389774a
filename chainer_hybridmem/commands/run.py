"""``hybridmem run``: a program as it is, on a repaired Chainer and within a limit."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import runpy
import shutil
import signal
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.chainer_access import compat
from chainer_hybridmem.commands import arguments, base
from chainer_hybridmem.errors import OptionError

if TYPE_CHECKING:
    from chainer_hybridmem.session.follower import Follower

OWN_FILES = __file__, runpy.__file__, '<frozen runpy>'
INTERRUPTED = 130


class RunCommand(base.Command):
    """Runs a program that does not know of this package.

    Chainer is repaired for today's Python and NumPy when the program imports it. With a
    limit, a session is around whatever the program trains: it begins with the first
    function after an optimizer has got its model.
    """

    name = 'run'
    help = 'run a program on a repaired Chainer, within a limit if one is given'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            '--memory-limit',
            type=arguments.size,
            metavar='SIZE',
            help='such as 8GiB; without it, Chainer is repaired and nothing else',
        )
        arguments.add_planner(parser)
        parser.add_argument(
            '-m',
            dest='is_module',
            action='store_true',
            help='PROGRAM is the name of a module, as for python -m',
        )
        parser.add_argument(
            'program',
            metavar='PROGRAM',
            help='a script, or the name of an installed console script',
        )
        parser.add_argument(
            'args', nargs=argparse.REMAINDER, metavar='ARGS', help='of the program'
        )

    def run(self, args: argparse.Namespace) -> int:
        if args.planner is not None:
            from chainer_hybridmem.planners import check_name

            check_name(args.planner)
        start = prepare(args.program, args.args, args.is_module)
        followers: list[Follower] = []
        interrupted: list[bool] = []
        atexit.register(end_interrupted, interrupted)  # behind all that a program does
        try:
            with contextlib.ExitStack() as stack:
                if args.memory_limit is not None:
                    options = {} if args.planner is None else {'planner': args.planner}

                    def follow() -> None:
                        from chainer_hybridmem.session.follower import Follower

                        follower = Follower(args.memory_limit, options)
                        followers.append(stack.enter_context(follower))

                    compat.after_import(follow)
                start()
        except SystemExit:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                interrupted.append(True)
            return tell_error(error)
        finally:
            if args.memory_limit is not None:
                tell_limit(followers)
        return 0


def prepare(program: str, args: list[str], is_module: bool) -> Callable[[], Any]:
    """Sets arguments and path of this process, and returns what runs the program in it.

    Raises:
        OptionError: If there is no such program.
    """
    path = None if is_module else find_program(program)
    sys.argv = [program if path is None else path, *args]
    if not getattr(sys.flags, 'safe_path', False):  # as Python does
        script = None if path is None else os.path.realpath(path)
        sys.path[0] = os.getcwd() if script is None else os.path.dirname(script)
    if path is None:
        return lambda: runpy.run_module(program, run_name='__main__', alter_sys=True)
    return lambda: runpy.run_path(path, run_name='__main__')


def find_program(name: str) -> str:
    """The file of a script or console script.

    Raises:
        OptionError: If there is none, or it is no Python.
    """
    beside = os.path.join(sysconfig.get_path('scripts'), name)
    found = next(filter(os.path.isfile, (name, beside)), None) or shutil.which(name)
    if found is None:
        raise OptionError(
            f'There is no program {name!r}: name a script, a console script that is '
            f'installed, or a module with -m.'
        )
    if not is_python(found):
        raise OptionError(f'{found!r} is no Python program; name a script of Python.')
    return found


def is_python(path: str) -> bool:
    """Whether a file is a program in Python, by its name or its first line."""
    if path.endswith(('.py', '.pyw')):
        return True
    with open(path, 'rb') as file:
        first = file.readline(256)
    return first.startswith(b'#!') and b'python' in first


def tell_error(error: BaseException) -> int:
    """Prints the error that a program has ended with, as Python does.

    Returns:
        int: Exit status.
    """
    trace = error.__traceback__
    while trace is not None and _is_own(trace.tb_frame):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def end_interrupted(interrupted: list[bool]) -> None:
    """Ends the process by SIGINT, as Python does, so that a shell's loop ends too."""
    if interrupted and os.name == 'posix':
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


def _is_own(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename in OWN_FILES


def tell_limit(followers: list[Follower]) -> None:
    """Says what has become of the limit, on standard error."""
    told = 'the limit was not applied: the program has not imported Chainer'
    if followers:
        told = followers[0].describe()
    print(f'hybridmem: {told}', file=sys.stderr)
