"""Programs that commands ask about: each runs in a process of its own.

The child runs the program as ``hybridmem run`` does, with a watcher
(``running/watchers.py``) that ends it once it knows enough. What the program prints
goes to standard error: standard output has the answer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pickle
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from chainer_hybridmem.commands import arguments, run
from chainer_hybridmem.commands.networks import Network
from chainer_hybridmem.errors import HybridMemoryError, OptionError
from chainer_hybridmem.running import starting
from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.units import format_bytes, format_count

if TYPE_CHECKING:
    from chainer_hybridmem.commands.progress import Progress
    from chainer_hybridmem.forecasting.estimation import Kind, SamplePair
    from chainer_hybridmem.running.step_recorder import RecordedProgram
    from chainer_hybridmem.running.watchers import RecordedPass, Watcher

MODULE = '-m'
Recorded = TypeVar('Recorded')
ITERATIONS = 50  # a recording gives up after these
LONGEST_TITLE = 60  # characters
QUESTION, ANSWER = 'question', 'answer'  # files
END_SECONDS = 30.0  # in which a program has to end once its answer is there
KILL_SECONDS = 5.0
POLL_SECONDS = 0.2
CHILD = (
    'import sys; from chainer_hybridmem.commands import programs; '
    'sys.exit(programs.run_watched(*sys.argv[1:]))'
)


@dataclasses.dataclass(frozen=True)
class Program:
    """The command line of a program.

    Attributes:
        words (tuple of str): A script, a console script or ``-m MODULE``, and what
            stands behind it.
        batch_arg (str or None): The argument that has its batch size, such as
            ``--batchsize``; one that ends with ``=`` has it in the same word.
    """

    words: tuple[str, ...]
    batch_arg: str | None = None
    options: ClassVar[dict[str, Any]] = {}  # of sessions that record

    @property
    def named(self) -> dict[str, Any]:
        """The command line as plain values."""
        return {'program': self.words, 'batch_arg': self.batch_arg}

    def completed(self) -> Program:
        """It says all there is to know."""
        return self

    @property
    def title(self) -> str:
        """The command line for people, perhaps with its end cut off."""
        text = shlex.join(self.words)
        short = text[: LONGEST_TITLE - 1]
        return text if len(text) <= LONGEST_TITLE else f'{short}…'

    @property
    def batchsize(self) -> int | None:
        """The batch size on its command line; None if there is none."""
        sizes = [self.words[i][begin:] for i, begin in self._find_batchsizes()]
        return int(sizes[-1]) if sizes and sizes[-1].isdigit() else None

    def with_batchsize(self, batchsize: int) -> Program:
        """The program with another batch size; as it is if nothing names that."""
        if self.batch_arg is None:
            return self
        words, places = list(self.words), self._find_batchsizes()
        for i, begin in places:
            words[i] = words[i][:begin] + str(batchsize)
        if not places and self.batch_arg.endswith('='):
            words.append(f'{self.batch_arg}{batchsize}')
        elif not places:
            words += [self.batch_arg, str(batchsize)]
        return dataclasses.replace(self, words=tuple(words))

    def ask(self, watcher: str, **arguments: Any) -> Any:
        """Runs the program until a watcher has its answer.

        Args:
            watcher: Name of a class of ``running/watchers.py``.
            arguments: Of that class.

        Raises:
            HybridMemoryError: If the program ends before, or in place of an answer.
        """
        with tempfile.TemporaryDirectory() as folder:
            _write(folder, QUESTION, (watcher, arguments, self.words))
            status = _run_child(folder)
            if not os.path.exists(os.path.join(folder, ANSWER)):
                raise HybridMemoryError(
                    f'{self.title} has ended with status {status} before enough of it '
                    f'was seen. Does it run by itself?'
                )
            answer = _read(folder, ANSWER)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _find_batchsizes(self) -> list[tuple[int, int]]:
        """Words that have a batch size, and where it begins in them."""
        name = self.batch_arg
        if name is None:
            return []
        prefix = name if name.endswith('=') else f'{name}='
        places = [
            (i, len(prefix))
            for i, w in enumerate(self.words)
            if w[: len(prefix)] == prefix
        ]
        behind = [(i + 1, 0) for i, w in enumerate(self.words[:-1]) if w == name]
        return sorted(places + behind)


Asked = Program | Network


# -- the command line --------------------------------------------------------------
def add(parser: argparse.ArgumentParser, batch: bool = False) -> None:
    """Adds the program that is asked about in place of an architecture.

    Args:
        parser: Of the command.
        batch: Whether it may be run with several batch sizes.
    """
    parser.add_argument(
        'program',
        nargs='*',
        metavar='PROGRAM',
        help='in place of --arch, behind --: a program and its arguments, as for '
        'hybridmem run',
    )
    if batch:
        parser.add_argument(
            '--batch-arg',
            metavar='ARG',
            help='the argument of PROGRAM that has its batch size, such as '
            '--batch-arg=--batchsize: it is recorded at two, and any is estimated',
        )


def find(args: argparse.Namespace, on: str, **unused: Any) -> Asked:
    """The network or program of a command line.

    Args:
        args: With the options of :func:`add` and of ``arguments.add_network``.
        on: Where a network is run: device of :class:`.Network`.
        unused: Options that say nothing about a program, with their default values.

    Raises:
        OptionError: If it names both, or there is no such program.
        SystemExit: With status 2 if it names neither.
    """
    if not args.program:
        if args.arch is None:
            args.refuse(
                f'what is asked about? Name a network with --arch, or a program: '
                f'hybridmem {args.command.name} ... -- train.py ARGS'
            )
        if vars(args).get('batch_arg') is not None:
            raise OptionError('--batch-arg is for a program; use --batchsize.')
        size = vars(args).get('batchsize', 1)
        if size is None:
            args.refuse(f'how many pictures of {args.arch}? Give --batchsize')
        return Network(args.arch, size, args.insize, args.n_class, on)
    if vars(args).get('batch_arg') is None:
        unused['batchsize'] = None
    for name, default in {'arch': None, 'insize': None, **unused}.items():
        if vars(args).get(name, default) != default:
            raise OptionError(
                f'--{name.replace("_", "-")} is for a network of --arch; the program '
                f'{args.program[0]!r} says that itself'
                + (
                    '; name its argument with --batch-arg.'
                    if name == 'batchsize' and 'batch_arg' in args
                    else '.'
                )
            )
    is_module = args.program[0] == MODULE
    if is_module and len(args.program) == 1:
        raise OptionError('-m names no module; write: -- -m MODULE ARGS')
    if not is_module:
        run.find_program(args.program[0])
    return Program(tuple(args.program), vars(args).get('batch_arg'))


def find_batchsize(args: argparse.Namespace, program: Asked) -> int:
    """The batch size that is asked about; 1 for a program recorded as it is.

    Raises:
        OptionError: If a program is recorded at others, and none is named.
    """
    if program.batch_arg is None:
        return args.batchsize or 1
    size = args.batchsize or program.batchsize
    if size is None:
        raise OptionError(
            f'The program has no {program.batch_arg} with a number; name the batch '
            f'size that is asked about with --batchsize.'
        )
    return int(size)


# -- the parent ----------------------------------------------------------------
def _run_child(folder: str) -> int:
    """Runs the program that a folder has the question about; returns its status."""
    command = [sys.executable, '-c', CHILD, folder]
    with subprocess.Popen(command, stdout=sys.__stderr__) as child:
        try:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_SECONDS)
                if os.path.exists(os.path.join(folder, ANSWER)):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(END_SECONDS)
                    break
        finally:
            for end in (child.terminate, child.kill):
                if child.poll() is None:
                    end()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(KILL_SECONDS)
        return child.returncode


def _write(folder: str, name: str, value: Any) -> None:
    path = os.path.join(folder, name)
    with open(f'{path}.part', 'wb') as file:
        pickle.dump(value, file)
    os.replace(f'{path}.part', path)


def _read(folder: str, name: str) -> Any:
    with open(os.path.join(folder, name), 'rb') as file:
        return pickle.load(file)


# -- recordings ----------------------------------------------------------------
def record(
    program: Asked,
    options: dict[str, Any] | None = None,
    iterations: int = ITERATIONS,
    parts: bool = False,
    timed: bool = False,
) -> RecordedProgram:
    """Records every kind of iteration in the step that a program repeats.

    Args:
        program: What to run.
        options: Of the session, by name; None for ample memory.
        iterations: Give up after so many.
        parts: As for :class:`.RecordingSession`.
        timed: Likewise.

    Raises:
        HybridMemoryError: If nothing could be recorded.
    """
    told: RecordedProgram = program.ask(
        'ProgramRecorder',
        options={**program.options, **(options or {})},
        iterations=iterations,
        parts=parts,
        timed=timed,
    )
    return told


def memory_options(
    args: argparse.Namespace, program: Asked
) -> tuple[dict[str, Any], int | None]:
    """Options of a session from those of ``arguments.add_memory``.

    Where the limit is a share, the program's in-core peak is recorded first.

    Returns:
        tuple: The options, and the in-core peak of the program, that of which shares
        are; None where it was not recorded.

    Raises:
        HybridMemoryError: If it cannot be recorded.
    """
    arguments.check_copies(args)
    limit_bytes, plain_bytes = args.memory_limit.find_bytes(
        lambda: record(program).find_peak()
    )
    options = {'memory_limit': limit_bytes, **arguments.session_options(args)}
    return options, plain_bytes


def describe_kinds(recorded: RecordedProgram) -> str | None:
    """What the largest kind of iteration alone does not tell; None if it tells all."""
    notes = []
    if not recorded.complete:
        notes.append(
            f'In {format_count(recorded.iterations, "iteration")} the program has not '
            f'repeated a step with all its optimizers; what was recorded may not be '
            f'all that it does.'
        )
    if len(recorded.kinds) > 1:
        peaks = sorted(
            (
                (problem.in_core_peak_bytes, kind.repeats)
                for problem, kind in zip(recorded.problems, recorded.kinds, strict=True)
            ),
            reverse=True,
        )
        (_, first), *others = peaks
        listed = ', '.join(f'{count} x {format_bytes(peak)}' for peak, count in others)
        notes.append(
            f'A step has {sum(count for _, count in peaks)} iterations; the figures '
            f'are those of the kind that needs most (it comes {first} x). In-core '
            f'peaks of the others: {listed}.'
        )
    return ' '.join(notes) or None


def record_samples(
    program: Asked,
    batchsizes: Sequence[int],
    here: bool,
    progress: Progress,
) -> tuple[list[tuple[SamplePair, int]], str | None]:
    """Records a program at two batch sizes or, where it names none, once as it is.

    Args:
        program: What to run.
        batchsizes: To record.
        here: Whether the estimate is for the device of the recording.
        progress: Has a step for each recording.

    Returns:
        Samples of each kind of iteration, and what to tell beside them.

    Raises:
        OptionError: If the iterations do not depend on the batch size.
        ProfileMismatchError: If the iterations of both differ in more than sizes.
        HybridMemoryError: If nothing could be recorded.
    """
    recorded = _record_each(
        program,
        batchsizes,
        progress,
        lambda sized: record(sized, parts=here, timed=here),
    )
    pairs = _match(program, batchsizes, [one.kinds for one in recorded])
    return pairs, describe_kinds(recorded[-1])


def record_passes(
    program: Asked, batchsizes: Sequence[int], progress: Progress
) -> tuple[RecordedPass, SamplePair]:
    """Records forward passes of a program that infers, as :func:`record_samples` does.

    Returns:
        What was recorded at the largest batch size, and the samples.

    Raises:
        OptionError: If the passes do not depend on the batch size.
        ProfileMismatchError: If the passes of both differ in more than sizes.
        HybridMemoryError: If nothing could be recorded.
    """
    from chainer_hybridmem.forecasting.estimation import Kind

    recorded: list[RecordedPass] = _record_each(
        program,
        batchsizes,
        progress,
        lambda sized: sized.ask('PassRecorder', kinds=ITERATIONS),
    )
    kinds = [[Kind(one.profile)] for one in recorded]
    [(pair, _)] = _match(program, batchsizes, kinds)
    return recorded[-1], pair


def _match(
    program: Asked, batchsizes: Sequence[int], recorded: Sequence[Sequence[Kind]]
) -> list[tuple[SamplePair, int]]:
    """Samples of each kind that was recorded at both batch sizes, or once as it is."""
    from chainer_hybridmem.forecasting.estimation import (
        SamplePair,
        match_kinds,
        same_sizes,
    )

    if len(recorded) == 1:
        return [(SamplePair.of_one(one), one.repeats) for one in recorded[0]]
    (small, large), (first, second) = recorded, batchsizes
    if same_sizes(small, large):
        raise OptionError(
            f'{program.title} needs the same memory with {program.batch_arg} {first} '
            f'and {second}; name the argument that has its batch size with --batch-arg.'
        )
    return match_kinds(small, large, (first, second))


def _record_each(
    program: Asked,
    batchsizes: Sequence[int],
    progress: Progress,
    record_one: Callable[[Asked], Recorded],
) -> list[Recorded]:
    """Records a program at each batch size or, where it names none, once as it is."""
    from chainer_hybridmem.forecasting.estimation import check_ascending

    asked: list[Asked] = [program]
    if program.batch_arg is not None:
        sizes = check_ascending(batchsizes, '--sample-batches')
        asked = [program.with_batchsize(size) for size in sizes]
    recorded = []
    for sized in asked:
        progress.step(f'recording {sized.title}', at_once=True)
        recorded.append(record_one(sized))
    return recorded


# -- the child -----------------------------------------------------------------
def run_watched(folder: str) -> int:
    """Runs the program that a folder has the question about, until it is answered.

    Returns:
        int: Exit status.
    """
    name, arguments, words = _read(folder, QUESTION)
    answered: list[bool] = []

    def finish(answer: Any) -> None:
        _write(folder, ANSWER, answer)
        answered.append(True)

    is_module = words[0] == MODULE
    program, *args = words[is_module:]
    os.environ.setdefault(starting.VARIABLE, starting.REPAIR_ONLY)  # for its children
    watchers: list[Watcher] = []
    try:
        start = run.prepare(program, args, is_module)
        with contextlib.ExitStack() as stack:

            def follow() -> None:
                from chainer_hybridmem.running import watchers as classes

                watcher = getattr(classes, name)(finish, **arguments)
                watchers.append(stack.enter_context(watcher))

            compat.after_import(follow)
            start()
        if not watchers:
            finish(HybridMemoryError(f'{program} has not imported Chainer.'))
    except BaseException as error:
        if answered:
            return 0
        if isinstance(error, SystemExit):
            raise
        if isinstance(error, HybridMemoryError):
            finish(error)
            return 1
        trace = error.__traceback__
        return run.tell_error(error.with_traceback(trace and trace.tb_next))
    return 0
