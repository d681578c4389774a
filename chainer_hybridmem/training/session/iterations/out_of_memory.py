"""The error for an allocation that did not fit: its numbers, and what helps.

The hooks know operations alone. What else was under way stands in the traceback.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import chainer

from chainer_hybridmem.errors import HybridMemoryError, OutOfMemoryError
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.planning.records.profile import MINIMUM_MAP_BYTES
from chainer_hybridmem.training.chainer_access.graph import BACKWARD_LOOP
from chainer_hybridmem.training.chainer_access.owners import StateOwner, owners_of
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.session.iterations.iteration import Iteration
from chainer_hybridmem.training.session.iterations.observation import InstrumentSelector
from chainer_hybridmem.training.session.setting.model_arrays import ModelArrays
from chainer_hybridmem.training.session.setting.planning_time import outside_limit
from chainer_hybridmem.training.session.setting.runtime import Runtime
from chainer_hybridmem.units import format_apart, format_bytes

_FUNCTION = chainer.FunctionNode.apply.__code__
_UPDATES = (
    chainer.Optimizer.update.__code__,
    chainer.GradientMethod.update.__code__,
)
_LINK = chainer.Link.__call__.__code__
_RULE = chainer.UpdateRule.update.__code__


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far an iteration has come, as the hooks know it.

    Attributes:
        iteration (int): The one under way or, if none is, the next one; from 1.
        started (bool): Whether it is under way.
        position (int): Operations that have begun.
        label (str): Of the last one.
        depth (int): Backward functions under way.
        backward_seen (bool): Whether one has begun.
    """

    iteration: int
    started: bool
    position: int
    label: str
    depth: int
    backward_seen: bool


@dataclasses.dataclass(frozen=True)
class Moment:
    """When something happened.

    Attributes:
        text (str): In words.
        in_operation (bool): Whether an operation was under way, or one and the next.
        in_update (bool): Whether parameters were being updated.
    """

    text: str
    in_operation: bool
    in_update: bool = False


def moment_of(
    frames: list[types.FrameType], progress: Progress, model: chainer.Link
) -> Moment:
    """When something happened.

    Args:
        frames: That were under way, the outermost one first; see :func:`frames_of`.
        progress: Of the iteration.
        model: Whose parameters are updated.
    """
    n = progress.iteration
    codes = [frame.f_code for frame in frames]
    known = (BACKWARD_LOOP, _FUNCTION, *_UPDATES)
    inner = [i for i, code in enumerate(codes) if code in known]
    if inner and codes[inner[-1]] in _UPDATES and not _in_loss(frames[inner[-1] :]):
        return Moment(f'in the update of {_updated(frames, model)}', False, True)
    if not progress.started or not progress.position:
        return Moment(f'before the first operation of iteration {n}', False)
    if progress.backward_seen and not progress.depth and BACKWARD_LOOP not in codes:
        return Moment(
            f'after the backward pass of iteration {n}, before the first operation of '
            f'iteration {n + 1}',
            False,
        )
    return Moment(f'after operation {progress.position - 1} ({progress.label})', True)


def frames_of(error: BaseException) -> list[types.FrameType]:
    """The frames an error has passed, the outermost one first."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    return found


def _in_loss(frames: list[types.FrameType]) -> bool:
    """Whether ``update(lossfun, ...)`` has called that function."""
    if len(frames) < 2 or frames[0].f_locals.get('lossfun') is None:
        return False
    module = frames[1].f_globals.get('__name__', '')
    return frames[1].f_code is _LINK or not module.startswith('chainer.')


def _updated(frames: list[types.FrameType], model: chainer.Link) -> str:
    """What the update was about to change."""
    given: Any = None
    for frame in frames:
        if frame.f_code is _RULE:
            given = frame.f_locals.get('param')
    paths = (path for path, p in model.namedparams() if p is given)
    return next(paths, 'the parameters')


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What did not fit.

    Attributes:
        text (str): In words.
        hints (str): What helps beside a larger limit or a smaller batch.
        requested_bytes (int): Asked for.
        used_bytes (int): In use.
    """

    text: str
    hints: str
    requested_bytes: int
    used_bytes: int


class OutOfMemoryExplainer:
    """Explains errors of NumPy and CuPy, which know neither limit nor operation.

    Args:
        model (Link): Is trained.
        runtime (Runtime): Has run out of memory.
        arrays (ModelArrays): Are in memory.
        observation (InstrumentSelector): Tells when iterations are recorded.
    """

    def __init__(
        self,
        model: chainer.Link,
        runtime: Runtime,
        arrays: ModelArrays,
        observation: InstrumentSelector,
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._options = runtime.options
        self._arrays = arrays
        self._observation = observation

    def explain(
        self,
        error: MemoryError,
        iteration: Iteration,
        progress: Progress,
        needs: object = None,
    ) -> BaseException | None:
        """The error to raise instead of one that a program could not allocate for.

        Args:
            error: That has ended the session.
            iteration: Under way, or the last one.
            progress: How far it has come.
            needs: What is known of a limit that does, as a sentence.

        Returns:
            OutOfMemoryError or what has interrupted swapping; None where the error
            itself says enough.
        """
        device = self._runtime.device
        raw = (
            isinstance(error, OutOfMemoryError)
            and type(error) is not OutOfMemoryError  # CuPy's error as well: of a pool
            and (error.requested_bytes, error.used_bytes) == device.memory.last_failure
        )
        if isinstance(error, HybridMemoryError) and not raw:
            return None
        stopped = device.memory.reclaim_error
        if stopped is not None and not isinstance(stopped, OutOfMemoryError):
            return stopped  # Ctrl-C, or a swap file that is full
        if device.memory.last_failure is None:
            return None
        moment = self.find_moment(frames_of(error), progress)
        requested, used = device.memory.last_failure
        return outside_limit(
            self._make_error, requested, used, iteration, moment, needs
        )

    def find_moment(self, frames: list[types.FrameType], progress: Progress) -> Moment:
        """When something did not fit.

        Args:
            frames: That were under way.
            progress: Of the iteration.
        """
        return moment_of(frames, progress, self._model)

    def describe(
        self, requested: int, used: int, iteration: Iteration, moment: Moment
    ) -> Refusal:
        """What did not fit, and what is there instead.

        Args:
            requested: Bytes asked for.
            used: Bytes in use.
            iteration: Under way, or the last one.
            moment: When it was.
        """
        options, device = self._options, self._runtime.device
        limit_bytes, refusal = options.limit_bytes, device.copies.host_refusal
        why = '' if refusal is None else f' ({refusal.rstrip(".")})'
        crossing = pieces = ''
        missing = used + requested - limit_bytes
        if missing <= 0:
            pieces = ' What is free lies in pieces.'
        elif moment.in_operation and not options.cross_iteration:
            crossing = crossing_hint(self._model, device, missing)
        return Refusal(
            f'{format_bytes(requested)} asked for {moment.text} do not fit: '
            f'{" of ".join(format_apart(used, limit_bytes))} are in use, and nothing '
            f'more can be swapped{why}.{pieces}{self._describe_resident()}',
            f'{self._runtime.splitter.hint}{crossing}',
            requested,
            used,
        )

    def _make_error(
        self,
        requested: int,
        used: int,
        iteration: Iteration,
        moment: Moment,
        needs: object,
    ) -> OutOfMemoryError:
        refusal = self.describe(requested, used, iteration, moment)
        guide = iteration.following.guide
        forecast = None if guide is None else guide.forecast
        least, limit_bytes = used + requested, self._options.limit_bytes
        if least <= limit_bytes:  # but what is free lies in pieces
            least = limit_bytes + requested
        later, recording = ', and later ones may need more', ''
        if forecast is not None and self._options.host_limit_bytes is None:
            later = f'; one known to do is {max(forecast.named_bytes, least)} bytes'
        elif needs is not None:
            later = f'; before, {needs}'
        else:
            recording = self.hint_at_recording(iteration)
        return OutOfMemoryError(
            f'{refusal.text} This allocation needs a limit of at least {least} '
            f'bytes{later}. Raise memory_limit or lower the batch '
            f'size{refusal.hints}{recording}.',
            requested,
            limit_bytes,
            used,
        )

    def hint_at_recording(self, iteration: Iteration | None = None) -> str:
        """How to learn a limit that does for all iterations.

        Args:
            iteration: Under way; None if it is over.
        """
        recorder = self._runtime.instruments.recorder
        guided = iteration is not None and iteration.following.guide is not None
        if guided or recorder or not self._observation.waits_for_shortage:
            return ''
        return (
            f'; with planner={self._options.planner!r} the first iteration is '
            f'recorded, which tells a limit for all later ones'
        )

    def _describe_resident(self) -> str:
        """What was in memory at the last shortage, and why it could not go."""
        shortage = self._runtime.executor.evictor.shortage
        if shortage is None:
            return ''
        permanent_bytes = self._arrays.distinct_bytes
        small, small_bytes = self._runtime.executor.maps.count_small()
        other_bytes = self._runtime.device.memory.other_bytes
        known_bytes = (
            permanent_bytes
            + other_bytes
            + small_bytes
            + shortage.busy_bytes
            + shortage.held_bytes
            + shortage.stuck_bytes
        )
        parts = (
            (permanent_bytes, 'of parameters, gradients and optimizer states'),
            (other_bytes, 'in other pools, for arrays from before the session'),
            (shortage.busy_bytes, 'of feature maps that this operation reads'),
            (
                shortage.held_bytes,
                'of feature maps that the program holds in variables',
            ),
            (shortage.stuck_bytes, 'of feature maps that could not be copied out'),
            (
                small_bytes,
                f'of {small} feature maps below {format_bytes(MINIMUM_MAP_BYTES)}, '
                f'which never leave',
            ),
            (
                shortage.used_bytes - known_bytes,
                'of inputs, gradients on their way, temporary arrays and what else '
                'the program holds',
            ),
        )
        told = [f'{format_bytes(n)} {what}' for n, what in parts if n > 0]
        return f' In use are {", ".join(told)}.' if told else ''


def crossing_hint(model: chainer.Link, device: Device, missing_bytes: int) -> str:
    """What ``cross_iteration`` can do for an operation that does not fit.

    Optimizer states leave for an operation, also where no plan is followed yet.

    Args:
        model: Whose states may leave.
        device: Must have room for the copies.
        missing_bytes: What is to leave.
    """
    states = [owner for owner in owners_of(model) if isinstance(owner, StateOwner)]
    sizes = [owner.nbytes for owner in states if owner.nbytes >= MINIMUM_MAP_BYTES]
    room_bytes = sum(device.copies.host_room(tier) for tier in Tier)
    if not 0 < missing_bytes <= min(sum(sizes), room_bytes):
        return ''
    return (
        f', or let optimizer states ({format_bytes(sum(sizes))}) leave with '
        f"cross_iteration='all'"
    )
