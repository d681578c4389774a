"""What the processes of ``hybridmem run`` begin and end with, its own and children.

Every Python process of a run imports this file: what it needs later, it imports then.

Children find what they need in the variable ``HYBRIDMEM_RUN``. A file in site-packages
(``chainer_hybridmem.pth``) imports this module where it is set: ``1`` has Chainer
repaired, and nothing else; ``run`` itself sets more.

Note: [children]
    A child that trains has a session of its own. A limit that is a size is shared: a
    child gets as much as each of the Python processes that its parent has when it
    begins to train. It waits until none has come for a while, for most are started
    together. The process that ``run`` starts has all of the limit, and so has each
    child that is alone. A percentage is each process's own, and on GPUs, of which
    processes mostly have one each, so is a size.

    A child tells what it has done to the first process, by a file. It may end by
    ``os._exit``, as those of multiprocessing do, so that is told of, too.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainer_hybridmem import timing
from chainer_hybridmem.errors import OptionError, fold, use_flags
from chainer_hybridmem.training.chainer_access import compat

if TYPE_CHECKING:
    from chainer_hybridmem.running.follower import Follower

VARIABLE = 'HYBRIDMEM_RUN'
REPAIR_ONLY = '1'
HELPERS = 'multiprocessing.resource_tracker', 'multiprocessing.forkserver'
QUIET_SECONDS = 0.3  # without another sibling, after which no more are awaited
MOST_SECONDS = 3.0  # that siblings are awaited


@dataclasses.dataclass
class Settings:
    """What ``run`` has been told, for its children, too.

    Attributes:
        memory_limit (str or None): As for :class:`.Follower`.
        options (dict): Likewise.
        report (str or None): Likewise; children put their number before the suffix.
        profile (str or None): Likewise; not for children.
        old_names (bool): Whether names that NumPy and Python have removed come back.
        folder (str or None): Where processes tell of themselves.
        first (int): The process that ``run`` is in.
        flags (dict): As for ``errors.use_flags``.
        all_frames (bool): Whether tracebacks keep the frames of this package.
    """

    memory_limit: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    report: str | None = None
    profile: str | None = None
    old_names: bool = False
    folder: str | None = None
    first: int = 0
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    all_frames: bool = False

    def to_text(self) -> str:
        """The value of the variable."""
        import json

        return REPAIR_ONLY if self == Settings() else json.dumps(vars(self))

    @classmethod
    def of(cls, text: str) -> Settings:
        """Reads the value of the variable."""
        import json

        return cls(**json.loads(text))


class Process:
    """This process of a run; children that are forked find it as they were.

    Args:
        settings (Settings): What ``run`` has been told.
        alone (bool): Whether the command itself is elsewhere, or is gone: a program may
            start itself anew in its process.
    """

    def __init__(self, settings: Settings, alone: bool) -> None:
        self.settings = settings
        self._alone = alone
        self.follower: Follower | None = None
        self._pid = os.getpid()
        self._name: str | None = None  # of the file that says that it trains
        self._ended = False
        self._error = ''
        self._printed = 0  # identity of the error that a Trainer has printed
        self._exit = os._exit

    @property
    def is_first(self) -> bool:
        """Whether ``run`` has begun in this process."""
        return os.getpid() == self.settings.first

    def begin(self) -> None:
        """Has Chainer repaired and what trains followed, once it is imported."""
        use_flags(self.settings.flags)
        if self.settings.old_names:
            from chainer_hybridmem.training.chainer_access.compat import old_names

            old_names.put_back()
        if self.settings.memory_limit is not None or self.settings.profile is not None:
            if not any(name in ' '.join(sys.orig_argv) for name in HELPERS):
                self._register()
            vars(os)['_exit'] = self._end_and_exit
            os.register_at_fork(after_in_child=self._begin_forked)
            if self._alone:
                atexit.register(self._end_and_tell)
            compat.after_import(self._follow)
            compat.after_import(self._watch_children, 'multiprocessing.process')

    def _watch_children(self) -> None:
        """Errors of multiprocessing's children are printed, and swallowed."""
        process: Any = importlib.import_module('multiprocessing.process').BaseProcess
        bootstrap = process._bootstrap

        def begin(child: Any, *args: Any, **kwargs: Any) -> Any:
            child.run = self._watch(child.run)
            return bootstrap(child, *args, **kwargs)

        process._bootstrap = begin

    def _follow(self) -> None:
        from chainer_hybridmem.running.follower import Follower

        told = self.settings
        profile = told.profile if self.is_first else None
        if told.memory_limit is None and profile is None:
            return
        self.follower = Follower(
            told.memory_limit,
            told.options,
            self._find_report(),
            profile,
            self._count_sharers,
        )
        # What is imported by now stays: collections need not look at it each time.
        gc.freeze()
        threading.excepthook = _Explaining(self, threading.excepthook)
        trainer: Any = importlib.import_module('chainer.training.trainer')
        trainer.traceback = _Printing(self.print_folded)
        if self._alone:
            sys.excepthook = _Explaining(self, sys.excepthook)

    def _find_report(self) -> str | None:
        path = self.settings.report
        if path is None or self.is_first:
            return path
        stem, suffix = os.path.splitext(path)
        return f'{stem}.{os.getpid()}{suffix}'

    # -- children -------------------------------------------------------------
    def _begin_forked(self) -> None:
        """This is a child now."""
        if self._ended:
            return
        self._pid, self._error = os.getpid(), ''
        self._register()
        if self.follower is not None:
            self.follower.begin_in_child(self._find_report())

    def _watch(self, run: Callable[[], None]) -> Callable[[], None]:
        def run_and_end() -> None:
            try:
                run()
            except BaseException as error:
                shown = self.present(self.explain(error))
                if shown is error:
                    raise
                raise shown from shown.__cause__
            finally:
                self.end()

        return run_and_end

    def _register(self) -> None:
        folder = self.settings.folder
        if folder is None or not os.path.isdir(folder) or self.is_first:
            return
        self._name = os.path.join(folder, f'{os.getppid()}.{os.getpid()}')
        with contextlib.suppress(OSError), open(self._name, 'x', encoding='utf-8'):
            pass

    def _count_sharers(self) -> int:
        """See [children]."""
        if self._name is None:
            return 1
        count, since = 0, timing.now()
        last = since
        while timing.now() < min(last + QUIET_SECONDS, since + MOST_SECONDS):
            found = len(self._find_siblings())
            if found > count:
                count, last = found, timing.now()
            timing.sleep(QUIET_SECONDS / 10)
        return max(1, count)

    def _find_siblings(self) -> list[str]:
        """Files of this process and of others that its parent has and that live."""
        assert self._name is not None
        folder, name = os.path.split(self._name)
        parent = name.partition('.')[0]
        return [
            name
            for name in os.listdir(folder)
            if name.partition('.')[0] == parent and _lives(name.partition('.')[2])
        ]

    # -- ends -----------------------------------------------------------------
    def explain(self, error: BaseException) -> BaseException:
        """What to show of an error that ends a thread, the session having ended."""
        shown = error
        if self.follower is not None:
            shown = self.follower.explain(error)
        if not isinstance(error, SystemExit):
            line = ' '.join(str(shown).split())
            self._error = f'{type(shown).__name__}: {line}' if line else repr(shown)
        return shown

    def present(self, error: BaseException) -> BaseException:
        """An error as it is printed: with one traceback; see :func:`.errors.fold`."""
        if self.settings.all_frames:
            return error
        is_cause = self._printed == id(error.__cause__)
        fold(error)
        refused = self.follower is not None and self.follower.refused
        if is_cause or (refused and isinstance(error, OptionError)):
            error.__traceback__ = None  # it is printed, or says nothing about it
        return error

    def is_printed(self, error: BaseException) -> bool:
        """Whether a Trainer has printed all of it."""
        return self._printed == id(error)

    def print_folded(self, trace: Any) -> None:
        """Prints the traceback of an error that is being handled, as a Trainer does."""
        import traceback

        error = sys.exc_info()[1]
        if error is not None and not self.settings.all_frames:
            trace = fold(error).__traceback__
            if isinstance(error, MemoryError):
                self._printed = id(error)
        traceback.print_tb(trace)

    def _end_and_exit(self, status: int) -> None:
        """In place of ``os._exit``."""
        try:
            self._end_and_tell()
        finally:
            self._exit(status)

    def _end_and_tell(self) -> None:
        self.end()
        for line in self.tell():
            print(f'hybridmem: {line}', file=sys.stderr, flush=True)

    def end(self, *error: Any) -> None:
        """Ends the session; a child tells the first process of it.

        Args:
            error: Kind, error and traceback of what has ended the program.

        Raises:
            OutOfMemoryError: In place of a MemoryError, with a limit that would do.
        """
        if self._ended and self._pid == os.getpid():
            return
        if not error or isinstance(error[1], SystemExit):
            self._wait_for_threads()
        self._ended, self._pid = True, os.getpid()
        follower = self.follower
        try:
            if follower is not None:
                follower.__exit__(*error)
        finally:
            if not self.is_first:
                self._tell_first(follower)

    def _wait_for_threads(self) -> None:
        """As Python does at the end of a program."""
        here = threading.current_thread()
        if here is not threading.main_thread():
            return
        limited = self.settings.memory_limit is not None
        for thread in threading.enumerate() if limited else ():
            if thread is not here and not thread.daemon:
                thread.join()

    def _tell_first(self, follower: Follower | None) -> None:
        lines = []
        if follower is not None and follower.has_trained:
            lines = follower.describe()
        if self._name is None or not os.path.isdir(os.path.dirname(self._name)):
            for line in lines:
                print(f'hybridmem: process {os.getpid()}: {line}', file=sys.stderr)
            return
        if lines or (follower is not None and self._error):
            import json

            text = json.dumps([os.getpid(), lines, self._error])
            with (
                contextlib.suppress(OSError),  # a full disk
                open(f'{self._name}.told', 'w', encoding='utf-8') as file,
            ):
                file.write(text)
        with contextlib.suppress(OSError):
            os.remove(self._name)

    def tell(self) -> list[str]:
        """Peak, limit and time, here and in children.

        Returns:
            list of str: Lines, for the first process; called once.
        """
        if not self.is_first:
            return []
        children = self._read_children()
        found: list[str] = []
        elsewhere = any(lines for _, lines, _ in children)
        if self.follower is not None:
            if self.follower.has_trained or not elsewhere:
                found = self.follower.describe()
        elif not elsewhere:
            found = ['the limit was not applied: the program has not imported Chainer']
        for pid, lines, error in children:
            if error:
                found.append(f'process {pid} has ended with {error}')
            if lines:
                found.append(f'process {pid}: {"; ".join(lines)}')
        return found

    def _read_children(self) -> list[tuple[int, list[str], str]]:
        import json
        import shutil

        folder, found = self.settings.folder, []
        if folder is not None and os.path.isdir(folder):
            for name in sorted(os.listdir(folder)):
                if name.endswith('.told'):
                    path = os.path.join(folder, name)
                    with (
                        contextlib.suppress(ValueError),  # the disk was full
                        open(path, encoding='utf-8') as file,
                    ):
                        found.append(tuple(json.load(file)))
            shutil.rmtree(folder, ignore_errors=True)
        return found


def _lives(number: str) -> bool:
    try:
        os.kill(int(number), 0)
    except (ValueError, OSError):
        return False
    return True


class _Printing:
    """In place of the module ``traceback`` in that of Trainer.

    Args:
        print_tb (callable): Gets a traceback.
    """

    def __init__(self, print_tb: Callable[[Any], None]) -> None:
        self.print_tb = print_tb


class _Explaining:
    """In place of ``sys.excepthook`` or that of threads.

    Args:
        process (Process): Whose errors are explained.
        hook (callable): What shows them.
    """

    def __init__(self, process: Process, hook: Any) -> None:
        self._process = process
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        if len(args) == 3:
            shown = self._process.present(self._process.explain(args[1]))
            self._hook(type(shown), shown, shown.__traceback__)
            return
        (of_thread,) = args
        if of_thread.exc_value is None:
            self._hook(of_thread)
            return
        shown = self._process.present(self._process.explain(of_thread.exc_value))
        told = type(shown), shown, shown.__traceback__, of_thread.thread
        self._hook(threading.ExceptHookArgs(told))


_process: Process | None = None


def begin(settings: Settings, alone: bool = False) -> Process:
    """Makes this a process of a run, and of no other one.

    Args:
        settings: What ``run`` has been told.
        alone: See :class:`Process`.
    """
    global _process
    if _process is not None:
        _process.settings = Settings(all_frames=True)  # it leaves errors alone, too
    _process = Process(settings, alone)
    _process.begin()
    return _process


def begin_child() -> None:
    """What the file in site-packages does, as Python starts."""
    text = os.environ.get(VARIABLE, REPAIR_ONLY)
    if text != REPAIR_ONLY:  # the package is imported: that has Chainer repaired
        with contextlib.suppress(ValueError, TypeError):  # of another version
            begin(Settings.of(text), alone=True)
