"""When an allocation did not fit: in an operation, in the update, or between these.

The hooks know operations alone. What else was under way stands in the traceback.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import chainer

from chainer_hybridmem.chainer_access.graph import BACKWARD_LOOP

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
