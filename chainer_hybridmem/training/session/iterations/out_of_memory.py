"""The error for an allocation that did not fit: its numbers, and what helps.

The hooks know operations alone. What else was under way stands in the traceback.
"""

from __future__ import annotations

import dataclasses
import traceback
import types
from collections.abc import Callable, Collection

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
from chainer_hybridmem.units import format_apart, format_bytes, format_enough

_UPDATE = chainer.UpdateRule.update.__code__


@dataclasses.dataclass(frozen=True)
class Moment:
    """When something happened.

    Attributes:
        text (str): In words.
        in_operation (bool): Whether an operation was under way, or one and the next.
    """

    text: str
    in_operation: bool


Codes = Collection[types.CodeType]  # of the functions that were under way


def moment_of(codes: Codes, iteration: Iteration, n: int, label: str) -> Moment:
    """When something happened.

    Args:
        codes: Of the functions that were under way.
        iteration: Under way, or the last one.
        n: Number of the one under way or, if none is, of the next one; from 1.
        label: Of the operation that has begun last.
    """
    if _UPDATE in codes:
        return Moment('in the update of a parameter', False)
    if not iteration.started or not iteration.position:
        return Moment(f'before the first operation of iteration {n}', False)
    if iteration.is_complete and BACKWARD_LOOP not in codes:
        return Moment(
            f'after the backward pass of iteration {n}, before the first operation of '
            f'iteration {n + 1}',
            False,
        )
    where = 'in' if iteration.depth else 'in or right after'
    operation = f'operation {iteration.position - 1} ({label})'
    return Moment(f'{where} {operation}', True)


def enough(nbytes: int) -> str:
    """A limit for people and, exactly, for the next run."""
    return f'{format_enough(nbytes)} ({nbytes} bytes)'


@dataclasses.dataclass(frozen=True)
class FailedAllocation:
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
        find_moment: Callable[[Codes], Moment],
        needs: object = None,
    ) -> BaseException | None:
        """The error to raise instead of one that a program could not allocate for.

        Args:
            error: That has ended the session.
            iteration: Under way, or the last one.
            find_moment: Tells when something happened.
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
        passed = traceback.walk_tb(error.__traceback__)
        moment = find_moment({frame.f_code for frame, _ in passed})
        requested, used = device.memory.last_failure
        return outside_limit(
            self._make_error, requested, used, iteration, moment, needs
        )

    def describe(self, requested: int, used: int, moment: Moment) -> FailedAllocation:
        """What did not fit, and what is there instead.

        Args:
            requested: Bytes asked for.
            used: Bytes in use.
            moment: When it was.
        """
        options, device = self._options, self._runtime.device
        limit_bytes, refusal = options.limit_bytes, device.copies.host_refusal
        why = '' if refusal is None else f' ({refusal.rstrip(".")})'
        crossing = pieces = splitting = ''
        missing = used + requested - limit_bytes
        if moment.in_operation and self._arrays.distinct_bytes < limit_bytes:
            splitting = self._runtime.splitter.hint  # else no parts are small enough
        if missing <= 0:
            pieces = ' What is free lies in pieces.'
        elif moment.in_operation and not options.cross_iteration:
            crossing = crossing_hint(self._model, device, missing, limit_bytes)
        return FailedAllocation(
            f'{format_bytes(requested)} asked for {moment.text} do not fit: '
            f'{" of ".join(format_apart(used, limit_bytes))} are in use, and nothing '
            f'more can be swapped{why}.{pieces}{self._describe_resident()}',
            f'{splitting}{crossing}',
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
        failed = self.describe(requested, used, moment)
        guide = iteration.following.guide
        forecast = None if guide is None else guide.forecast
        least, limit_bytes = used + requested, self._options.limit_bytes
        if least <= limit_bytes:  # but what is free lies in pieces
            least = limit_bytes + requested
        later, recording = ', and later ones may need more', ''
        if forecast is not None and self._options.host_limit_bytes is None:
            later = f'; one known to do is {enough(max(forecast.named_bytes, least))}'
        elif needs is not None:
            later = f'; before, {needs}'
        else:
            recording = self.hint_at_recording(iteration)
        return OutOfMemoryError(
            f'{failed.text} This allocation needs a limit of at least '
            f'{enough(least)}{later}. Raise memory_limit or lower the batch '
            f'size{failed.hints}{recording}.',
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
            f'recorded, which tells a limit for later ones like it'
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


def crossing_hint(
    model: chainer.Link, device: Device, missing_bytes: int, limit_bytes: int
) -> str:
    """What ``cross_iteration`` can do for an operation that does not fit.

    Optimizer states leave for an operation, also where no plan is followed yet. The
    update needs them all, beside parameters, gradients and a temporary array that is as
    large as a parameter.

    Args:
        model: Whose states may leave.
        device: Must have room for the copies.
        missing_bytes: What is to leave.
        limit_bytes: The memory limit.
    """
    states = [owner for owner in owners_of(model) if isinstance(owner, StateOwner)]
    parameters = [p.array for p in model.params() if p.array is not None]
    together = [
        *(owner.nbytes for owner in states),
        *(2 * p.nbytes for p in parameters),
        max((p.nbytes for p in parameters), default=0),
    ]
    if sum(together) > limit_bytes:
        return ''
    sizes = [owner.nbytes for owner in states if owner.nbytes >= MINIMUM_MAP_BYTES]
    room_bytes = sum(device.copies.host_room(tier) for tier in Tier)
    if not 0 < missing_bytes <= min(sum(sizes), room_bytes):
        return ''
    return (
        f', or let optimizer states ({format_bytes(sum(sizes))}) leave with '
        f"cross_iteration='all'"
    )
