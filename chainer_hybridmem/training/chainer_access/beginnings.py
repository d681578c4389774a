"""When a program begins to train: an optimizer gets a model, then a function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
from chainer import _backprop


class Beginnings:
    """Tells of optimizers that get a model, of functions, and of each backward.

    Args:
        meet (callable): Gets each optimizer whose ``setup`` has been called.
        begin (callable): Called right before the first function that is applied for a
            backward once :meth:`wait` has been called. Arrays are on their device then.
        start_backward (callable): Called before each backward of a graph.
    """

    def __init__(
        self,
        meet: Callable[[chainer.Optimizer], None],
        begin: Callable[[], None],
        start_backward: Callable[[], None],
    ) -> None:
        apply = chainer.FunctionNode.apply
        setup = chainer.Optimizer.setup
        backward = _backprop._backprop_to_all

        def setup_and_tell(optimizer: Any, link: Any) -> Any:
            result = setup(optimizer, link)
            meet(optimizer)
            return result

        def begin_and_apply(function: Any, inputs: Any) -> Any:
            if chainer.config.enable_backprop:
                self.begin()
            return apply(function, inputs)

        def tell_and_go_back(*args: Any, **kwargs: Any) -> Any:
            start_backward()
            return backward(*args, **kwargs)

        self._replaced = (
            (chainer.Optimizer, 'setup', setup, setup_and_tell),
            (chainer.FunctionNode, 'apply', apply, begin_and_apply),
            (_backprop, '_backprop_to_all', backward, tell_and_go_back),
        )
        self._apply, self._awaiting = apply, begin_and_apply
        self._begin = begin
        chainer.Optimizer.setup = setup_and_tell
        _backprop._backprop_to_all = tell_and_go_back

    def stop(self) -> None:
        """Tells of nothing more; what others have put in place since stays."""
        for owner, name, own, telling in self._replaced:
            if getattr(owner, name) is telling:
                setattr(owner, name, own)

    def begin(self) -> None:
        """Tells of a function before there is one; the next one is not told of."""
        chainer.FunctionNode.apply = self._apply
        self._begin()

    def wait(self) -> None:
        """The next function that is applied for a backward is told of."""
        chainer.FunctionNode.apply = self._awaiting
