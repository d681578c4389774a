"""How Chainer adds up the gradients of one variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainer import _backprop_utils

Sum = Callable[[list[Any]], Any]

chainers: Sum = _backprop_utils._reduce


def use(add_up: Sum) -> None:
    """Backward adds gradients up with this function from now on."""
    _backprop_utils._reduce = add_up


def holder(gradient: Any) -> list[Any]:
    """The list in which a variable holds its array, as its only item."""
    held: list[Any] = gradient._data
    return held
