"""``optimize_inference()``: forward passes without backward, in an arena.

Memory multiloading (Xiong's Caffe, 2016) gives arrays that are never needed together
the same memory. Under ``no_backprop_mode`` plain Chainer drops each array as soon as
the program holds it no more; what is left to gain is what the pool loses between
blocks. So two passes are logged, their allocations are laid out once
(:func:`.layouts.exact`), and every further pass of that kind finds each of its
allocations at its offset.

Note: [passes]
    A pass is one call of the model under ``no_backprop_mode``. Passes whose arguments
    have the same types, shapes and plain values are of one kind. What a pass does not
    allocate as expected, and what outlives it, lies beside the arena.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import chainer

from chainer_hybridmem.errors import OptionError, SessionError
from chainer_hybridmem.interrupts import begin_whole, held_back
from chainer_hybridmem.planning.layouts.arena import Arena, IterationLog, lay_out
from chainer_hybridmem.training.chainer_access.owners import bring_home, model_arrays
from chainer_hybridmem.training.recording.allocation_log import AllocationLog
from chainer_hybridmem.training.session.setting.options import Options
from chainer_hybridmem.training.session.setting.planning_time import outside_limit
from chainer_hybridmem.training.session.setting.runtime import open_device_of
from chainer_hybridmem.units import format_bytes

MOST_KINDS = 64  # of which the logs and arenas are kept
LOGGED = 2


def optimize_inference(
    model: chainer.Link, memory_limit: int | str
) -> InferenceSession:
    """Lets forward passes of a model share memory as well as can be.

    >>> with hybridmem.optimize_inference(model, '2GiB') as session:
    ...     with chainer.using_config('train', False), chainer.no_backprop_mode():
    ...         y = model(x)
    >>> session.statistics()['arena_bytes']

    The fourth pass of each kind and all later ones run in an arena. Every bit is that
    of plain Chainer.

    Args:
        model: On the CPU or a GPU; called as ``model(...)``.
        memory_limit: Most bytes of NumPy's or CuPy's memory, such as ``'2GiB'``,
            parameters included.

    Raises:
        OptionError: If the model is no link or the limit is no number of bytes.
    """
    if not isinstance(model, chainer.Link):
        raise OptionError(
            f'model is a {type(model).__name__}; a chainer.Link is needed.'
        )
    return InferenceSession(model, Options.of(memory_limit, None, {}))


@dataclasses.dataclass
class _PassKind:
    """What is known about passes of one kind; see [passes].

    Attributes:
        passes: How many there have been.
        logs: Of the first ones.
        arena: Where the later ones lie.
        too_large: Whether the arena would not fit; passes go on without one.
    """

    passes: int = 0
    logs: list[IterationLog] = dataclasses.field(default_factory=list)
    arena: Arena | None = None
    too_large: bool = False


class InferenceSession:
    """Runs forward passes in arenas; see :func:`optimize_inference`.

    Args:
        model: Is called.
        options: Have the limit.

    Attributes:
        device (Device): Counts and limits memory.
    """

    def __init__(self, model: chainer.Link, options: Options) -> None:
        self.device = open_device_of(model, options)
        self._model = model
        self._limit_bytes = options.limit_bytes
        self._kinds: dict[Any, _PassKind] = {}
        self._passes = _PassHook(self)
        self._functions = _FunctionHook(self)
        self._kind: _PassKind | None = None  # of the running pass
        self._log: AllocationLog | None = None
        self._operations = 0  # of the running pass so far
        self._placing = False
        self._finished_passes = self._placed_passes = 0
        self._peak_bytes = self._footprint_bytes = 0
        self._ended = False
        self._begun: contextlib.ExitStack | None = None  # what ends it

    def __repr__(self) -> str:
        return (
            f'<InferenceSession: memory limit {format_bytes(self._limit_bytes)}; peak '
            f'{format_bytes(self._peak_bytes)}>'
        )

    def __enter__(self) -> InferenceSession:
        if self._ended:
            raise SessionError('An inference session cannot be entered again.')
        if self._begun is not None:
            raise SessionError('This inference session is entered already.')
        return begin_whole(self, self._begin)

    def _begin(self) -> InferenceSession:
        memory = self.device.memory
        bring_home(self._model)
        memory.adopt(model_arrays(self._model, self.device))
        with contextlib.ExitStack() as begun:
            begun.enter_context(memory.counting())
            memory.watch_pool(True)
            begun.callback(memory.watch_pool, False)
            self._model.add_hook(self._passes)
            begun.callback(self._model.delete_hook, self._passes.name)
            begun.enter_context(self._functions)
            self._begun = begun.pop_all()
        return self

    @held_back
    def __exit__(self, *error: object) -> None:
        if self._begun is None:
            return
        self._ended = True
        self._stop()
        self._begun.close()
        self.device.close()

    def statistics(self) -> dict[str, Any]:
        """What has happened so far.

        Returns:
            dict: ``passes`` and ``placed_passes`` in numbers, ``kinds`` of passes that
            are kept, those of them whose layout exceeds the limit (``too_large``),
            ``arena_bytes`` and ``side_bytes`` of the largest other layout, what one
            pass in an arena has needed at most (``peak_bytes``) and taken from the
            system or driver (``footprint_bytes``), and ``placed`` and ``missed``
            allocations.
        """
        arenas = [kind.arena for kind in self._kinds.values() if kind.arena]
        largest = max(arenas, key=lambda arena: arena.footprint_bytes, default=None)
        figures = self.device.offsets.figures()
        return {
            'passes': self._finished_passes,
            'placed_passes': self._placed_passes,
            'kinds': len(self._kinds),
            'too_large': sum(kind.too_large for kind in self._kinds.values()),
            'arena_bytes': largest.slab_bytes if largest else 0,
            'side_bytes': largest.side_bytes if largest else 0,
            'peak_bytes': self._peak_bytes,
            'footprint_bytes': self._footprint_bytes,
            'placed': figures.placed,
            'missed': figures.unexpected + figures.taken,
        }

    # -- what the hooks call --------------------------------------------------
    def begin_pass(self, arguments: Any) -> None:
        """The model is called."""
        self._stop()  # of a pass that has ended with an error
        if chainer.config.enable_backprop:
            return
        key = chainer.config.train, describe(arguments)
        if key not in self._kinds and len(self._kinds) == MOST_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        kind = self._kind = self._kinds.setdefault(key, _PassKind())
        if kind.arena is not None:
            self._placing = self.device.offsets.follow(kind.arena)
            self.device.memory.reset_peak()
        elif kind.passes and not kind.too_large:  # the first one may make parameters
            self._log = AllocationLog(self.device)
        self.start_operation()

    def start_operation(self) -> None:
        """What is allocated from here on belongs to the pass's next operation."""
        if self._log is not None:
            self._log.start_operation()
        elif self._placing:
            assert self._kind is not None and self._kind.arena is not None
            known = self._operations + 1 < len(self._kind.arena.segments)
            self.device.offsets.seek(self._operations if known else -1)
        self._operations += 1

    def end_pass(self) -> None:
        """The model has returned."""
        kind, log, self._log = self._kind, self._log, None
        if kind is None:
            return
        kind.passes += 1
        self._finished_passes += 1
        if log is not None:
            kind.logs = [*kind.logs, log.finish()][-LOGGED:]
            if len(kind.logs) == LOGGED:
                self._lay_out(kind)
        elif self._placing:
            memory, pool = self.device.memory, self.device.memory.pool_figures()
            held_bytes = pool.occupied_bytes + pool.free_bytes
            self._placed_passes += 1
            self._peak_bytes = max(self._peak_bytes, memory.peak_bytes)
            self._footprint_bytes = max(
                self._footprint_bytes, memory.peak_bytes, held_bytes
            )
        self._stop()

    def _lay_out(self, kind: _PassKind) -> None:
        offsets = self.device.offsets
        arena = outside_limit(
            lay_out,
            (kind.logs[0], kind.logs[1]),
            offsets.block_bytes,
            offsets.alignment_bytes,
            offsets.moves_in,
        )
        kind.logs = []
        kind.too_large = arena.footprint_bytes > self._limit_bytes
        kind.arena = None if kind.too_large else arena

    def _stop(self) -> None:
        """No pass runs."""
        if self._log is not None:
            self._log.finish()
        if self._placing:
            self.device.offsets.seek(-1)
        self._kind = self._log = None
        self._placing = False
        self._operations = 0


class _PassHook(chainer.LinkHook):
    """Sees when the model is called."""

    name = 'hybridmem-passes'

    def __init__(self, session: InferenceSession) -> None:
        self._session = session

    def forward_preprocess(self, args: Any) -> None:
        """A pass begins."""
        self._session.begin_pass((args.args, args.kwargs))

    def forward_postprocess(self, args: Any) -> None:
        """It ends."""
        self._session.end_pass()


class _FunctionHook(chainer.FunctionHook):
    """Sees when a function runs."""

    name = 'hybridmem-passes'

    def __init__(self, session: InferenceSession) -> None:
        self._session = session

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        """An operation begins."""
        self._session.start_operation()


def describe(argument: Any) -> Any:
    """Types, shapes and plain values of what a model is called with."""
    if isinstance(argument, chainer.Variable):
        argument = argument.array
    if isinstance(argument, dict):
        return tuple((key, describe(value)) for key, value in argument.items())
    if isinstance(argument, list | tuple):
        return tuple(map(describe, argument))
    if hasattr(argument, 'shape') and hasattr(argument, 'dtype'):
        return argument.shape, argument.dtype.str, argument.strides
    if isinstance(argument, bool | int | float | str | bytes | type(None)):
        return argument
    return type(argument)
