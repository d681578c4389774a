"""Variables in the form that a layer needs: picture, vector, like another one."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import numpy as np

MOST_FEATURES = 256  # per example; longer variables are pooled or cut


def bring(x: Any, form: str) -> Any:
    """The variable in a form, and not too long."""
    x = _shorter(x)
    if form == 'picture' and x.ndim != 4:
        return _as_picture(x)
    if form == 'vector' and x.ndim != 2:
        return F.reshape(x, (x.shape[0], _features(x)))
    return x


def _features(x: Any) -> int:
    return int(np.prod(x.shape[1:], dtype=int))


def _shorter(x: Any) -> Any:
    if _features(x) <= MOST_FEATURES:
        return x
    if x.ndim == 4 and min(x.shape[2:]) >= 4:
        return _shorter(F.average_pooling_2d(x, 2))
    return F.reshape(x, (x.shape[0], _features(x)))[:, :MOST_FEATURES]


def _as_picture(x: Any) -> Any:
    n, length = x.shape[0], _features(x)
    side = 6 if length >= 72 else 3 if length >= 9 else 1
    channels = max(length // (side * side), 1)
    x = F.reshape(x, (n, length))
    if length == 0:
        return F.pad(x, ((0, 0), (0, 1)), 'constant')[:, :, None, None]
    return F.reshape(x[:, : channels * side * side], (n, channels, side, side))


def like(x: Any, other: Any) -> Any:
    """The second variable in the shape and type of the first."""
    length = _features(x)
    y = F.reshape(other, (other.shape[0], _features(other)))
    if y.shape[1] == 0:
        y = F.pad(y, ((0, 0), (0, 1)), 'constant')
    if y.shape[1] < length:
        y = F.tile(y, (1, -(-length // y.shape[1])))
    if y.shape[1] > length:
        y = y[:, :length]
    y = F.reshape(y, x.shape)
    return y if y.dtype == x.dtype else F.cast(y, x.dtype)


def fits_window(x: Any, ksize: int) -> bool:
    return min(x.shape[2:]) >= ksize


def beside(x: Any, array: Any) -> Any:
    """An array of NumPy where another one is."""
    return chainer.backend.get_device_from_array(x).send(array)
