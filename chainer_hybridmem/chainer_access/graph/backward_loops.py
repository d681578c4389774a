"""Chainer's loops over the functions of a graph, as they appear in the call stack."""

from __future__ import annotations

import sys
import types

import chainer
from chainer import _backprop, _backprop_utils

BACKWARD_LOOP = _backprop._backprop_to_all.__code__
_LOOPS = (BACKWARD_LOOP, chainer.function_node._backprop.__code__)


def is_loop(frame: types.FrameType | None) -> bool:
    """Whether a frame belongs to Chainer's walk through the functions of a graph."""
    while frame is not None and frame.f_code.co_name == '<listcomp>':
        frame = frame.f_back
    return frame is not None and frame.f_code in _LOOPS


def backward_runs() -> bool:
    """Whether a backward function is among the callers."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _backprop_utils.backprop_step.__code__:
            return True
        frame = frame.f_back
    return False
