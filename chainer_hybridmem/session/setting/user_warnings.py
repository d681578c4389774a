"""Warnings that point to the user's line, not into what runs beneath it."""

from __future__ import annotations

import sys
import types
import warnings

# What calls the package on the user's behalf: a Trainer, an updater, a link.
_BENEATH = {'chainer_hybridmem', 'chainer', 'chainermn'}
_BETWEEN = {'contextlib', 'cupy', 'numpy', 'threading'}


def warn_user(message: str) -> None:
    """Warns at the user's line that has called the package, through Chainer or not.

    Inside of a model's ``forward`` it is the line that has called the model, under a
    Trainer that of ``run()``. Where there is none, as in a thread of the package, it
    is the caller's line.

    Args:
        message: One sentence or more; ``hybridmem: `` is put before it.
    """
    caller = sys._getframe(1)
    frame = _user_frame(caller) or caller
    names = frame.f_globals
    warnings.warn_explicit(
        f'hybridmem: {message}',
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get('__name__'),
        registry=names.setdefault('__warningregistry__', {}),
    )


def _user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    found, beneath = None, False
    while frame is not None:
        name = frame.f_globals.get('__name__') or ''
        package = name.partition('.')[0]
        if package in _BENEATH:
            beneath = True
        elif beneath and package not in _BETWEEN:
            found, beneath = frame, False
        frame = frame.f_back
    return found
