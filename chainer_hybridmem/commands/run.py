"""``hybridmem run``: a program as it is, on a repaired Chainer and within a limit."""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import importlib.util
import os
import runpy
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.commands import arguments, base, outputs
from chainer_hybridmem.errors import (
    HybridMemoryError,
    OptionError,
    chain_of,
    leave_out_frames,
)
from chainer_hybridmem.running import starting
from chainer_hybridmem.training.chainer_access import compat

ACCESS = os.path.join(
    os.path.dirname(os.path.dirname(compat.__file__)), 'beginnings.py'
)
OWN_FILES = __file__, runpy.__file__, '<frozen runpy>', ACCESS
INTERRUPTED = 130


class RunCommand(base.Command):
    """Runs a program that does not know of this package.

    Chainer is repaired for today's Python and NumPy when the program imports it. With a
    limit, a session is around whatever the program trains. Three lines at the end tell
    peak, limit and time, or why there was no limit; one more tells what to run next
    where the limit was too small. See docs/guide/run.md.
    """

    name = 'run'
    help = 'run a program on a repaired Chainer, within a limit if one is given'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            '--memory-limit',
            type=arguments.limit_of_run,
            metavar='SIZE',
            help='such as 8GiB; 60%% of the in-core peak, which the first iterations '
            'show; auto: the least limit that is predicted to cost at most 10%% of the '
            'time; or free: what the device has left; without it, Chainer is repaired '
            'and nothing else',
        )
        arguments.add_planner(parser)
        group = parser.add_argument_group('what a session is told')
        told = *arguments.OF_COPIES, *arguments.OF_PLANS
        arguments.add_options(group, *told, 'cache_dir', 'verify', 'progress')
        parser.add_argument(
            '--report', metavar='FILE', help='write the page of the session here'
        )
        parser.add_argument(
            '--profile',
            metavar='FILE',
            help='record an iteration first, for hybridmem plan and others',
        )
        parser.add_argument(
            '--old-names',
            action='store_true',
            help='put back names that NumPy, collections and inspect have removed',
        )
        parser.add_argument(
            '--all-frames',
            action='store_true',
            help='show the frames of this package in tracebacks, too',
        )
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
        args = parser.add_argument(
            'args', nargs=argparse.REMAINDER, metavar='ARGS', help='of the program'
        )
        args.required = False

    def run(self, args: argparse.Namespace) -> int:
        options = read_options(args)
        outputs.check_output(args.report)
        outputs.check_output(args.profile)
        start = prepare(args.program, args.args, args.is_module)
        interrupted: list[bool] = []
        atexit.register(end_interrupted, interrupted)  # behind all that a program does
        settings = starting.Settings(
            args.memory_limit,
            options,
            absolute(args.report),
            absolute(args.profile),
            args.old_names,
            all_frames=args.all_frames,
        )
        if args.memory_limit is not None or args.profile is not None:
            settings.first = os.getpid()
            settings.folder = tempfile.mkdtemp(prefix='hybridmem-run-')
            settings.flags = args.flags
        os.environ[starting.VARIABLE] = settings.to_text()
        return self._run(starting.begin(settings), start, args, interrupted)

    def _run(
        self,
        process: starting.Process,
        start: Callable[[], Any],
        args: argparse.Namespace,
        interrupted: list[bool],
    ) -> int:
        importing = None
        try:
            try:
                start()
            except BaseException as error:
                process.end(type(error), error, error.__traceback__)
                raise
            process.end()
        except SystemExit:
            raise
        except KeyboardInterrupt as error:
            interrupted.append(True)
            importing = name_interrupted_import(error)
            return INTERRUPTED if importing else tell_error(error, process)
        except BaseException as error:
            return tell_error(error, process)
        finally:
            lines = [*process.tell(), *find_misplaced(args)]
            if importing is not None:
                lines = [f'interrupted while importing {importing}']
            for line in lines:
                print(f'hybridmem: {line}', file=sys.stderr)
        return 0


def find_misplaced(args: argparse.Namespace) -> list[str]:
    """Lines about options of ours that stand behind the program, which has got them."""
    words = dict.fromkeys(word.partition('=')[0] for word in args.args)
    found = [word for word in words if word in args.flags.values()]
    if not found:
        return []
    program = f'-m {args.program}' if args.is_module else args.program
    return [
        f'{args.program} has got {" and ".join(found)}: what is for hybridmem stands '
        f'before the program: hybridmem run {" ... ".join(found)} ... {program}'
    ]


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    """What a command line tells a session beside its limit; defaults are left out.

    Raises:
        OptionError: If it says something without a limit that is about one.
        UnknownNameError: If there is no such planner.
        HybridMemoryError: If a folder or link cannot be used.
    """
    planner = {} if args.planner is None else {'planner': args.planner}
    given = {**planner, **arguments.session_options(args)}
    about = [*given, *(['report'] if args.report is not None else [])]
    if about and args.memory_limit is None and args.profile is None:
        raise OptionError(
            f'{args.flags[about[0]]} is about a memory limit: name one, such as '
            f'--memory-limit 8GiB.'
        )
    if args.memory_limit is not None or args.profile is not None:
        check_can_limit()
        arguments.check_copies(args)
    if args.cache_dir is not None:
        from chainer_hybridmem.training.session.setting.cache_folder import open_folder

        open_folder(args.cache_dir)
    if args.planner is not None:
        from chainer_hybridmem.planning.planners import check_name

        check_name(args.planner)
    return given


def check_can_limit() -> None:
    """Refuses a limit where the repair alone is installed.

    Raises:
        HybridMemoryError: With what is missing.
    """
    for name in ('numba', 'scipy', 'threadpoolctl'):
        if importlib.util.find_spec(name) is None:
            raise HybridMemoryError(
                f'A memory limit needs {name}, which is not installed: pip install '
                f'numba scipy. Without --memory-limit the program runs on a repaired '
                f'Chainer.'
            )


def absolute(path: str | None) -> str | None:
    """A path that stays right if the program changes its folder."""
    return None if path is None else os.path.abspath(path)


def prepare(program: str, args: list[str], is_module: bool) -> Callable[[], Any]:
    """Sets arguments and path of this process, and returns what runs the program in it.

    Raises:
        OptionError: If there is no such program.
    """
    path = None if is_module else find_program(program)
    names = {'__builtins__': builtins}  # the module, as in __main__; not its dictionary
    sys.argv = [program if path is None else path, *args]
    if not getattr(sys.flags, 'safe_path', False):  # as Python does
        script = None if path is None else os.path.realpath(path)
        sys.path[0] = os.getcwd() if script is None else os.path.dirname(script)
    if path is None:
        check_module(program)
        return lambda: runpy.run_module(program, names, '__main__', alter_sys=True)
    return lambda: runpy.run_path(path, names, '__main__')


def check_module(name: str) -> None:
    """Refuses what Python cannot find; packages that it is in are not imported yet.

    Raises:
        OptionError: If there is no such module.
    """
    first = name.partition('.')[0]
    if not first or importlib.util.find_spec(first) is None:
        raise OptionError(
            f'There is no module {name!r}: Python looks for it in the current folder '
            f'and among what is installed.'
        )


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


def tell_error(error: BaseException, process: starting.Process | None = None) -> int:
    """Prints the error that a program has ended with, as Python does.

    Args:
        error: Its frames that run the program are left out.
        process: Of a run, whose session may explain it.

    Returns:
        int: Exit status.
    """
    for part in chain_of(error):
        leave_out_frames(part, OWN_FILES.__contains__)
    shown = error if process is None else process.present(error)
    if process is None or not process.is_printed(shown):
        sys.excepthook(type(shown), shown, shown.__traceback__)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def name_interrupted_import(error: BaseException) -> str | None:
    """What a program was importing when Ctrl-C came; None if it was not."""
    trace = error.__traceback__
    while trace is not None:
        spec = trace.tb_frame.f_globals.get('__spec__')
        if spec is not None and spec.name not in sys.modules:  # it has been taken out
            return str(spec.name)
        trace = trace.tb_next
    return None


def end_interrupted(interrupted: list[bool]) -> None:
    """Ends the process by SIGINT, as Python does, so that a shell's loop ends too."""
    if interrupted and os.name == 'posix':
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
