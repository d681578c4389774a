"""When a program begins to train: an optimizer gets a model, then a function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer


class Beginnings:
    """Tells of optimizers that get a model, and of the next function for a backward.

    Args:
        meet (callable): Gets each optimizer whose ``setup`` has been called.
        begin (callable): Called right before the first function that is applied for a
            backward once :meth:`wait` has been called. Arrays are on their device then.
    """

    def __init__(
        self, meet: Callable[[chainer.Optimizer], None], begin: Callable[[], None]
    ) -> None:
        self._begin = begin
        self._apply = apply = chainer.FunctionNode.apply
        setup = chainer.Optimizer.setup

        def setup_and_tell(optimizer: Any, link: Any) -> Any:
            result = setup(optimizer, link)
            meet(optimizer)
            return result

        def begin_and_apply(function: Any, inputs: Any) -> Any:
            if chainer.config.enable_backprop:
                chainer.FunctionNode.apply = apply
                begin()
            return apply(function, inputs)

        self._setup, self._telling = setup, setup_and_tell
        self._awaiting = begin_and_apply
        chainer.Optimizer.setup = setup_and_tell

    def stop(self) -> None:
        """Tells of nothing more; what others have put in place since stays."""
        if chainer.Optimizer.setup is self._telling:
            chainer.Optimizer.setup = self._setup
        if chainer.FunctionNode.apply is self._awaiting:
            chainer.FunctionNode.apply = self._apply

    def wait(self) -> None:
        """The next function that is applied for a backward is told of."""
        chainer.FunctionNode.apply = self._awaiting
