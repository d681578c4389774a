"""Notices when gradients are summed over processes.

Note: [an all-reduce is an operation]
    It comes between backward and the update, and takes as long as the slowest process
    makes the others wait. Nothing of a plan moves meanwhile: maps are back for
    backward, parameters and states before it begins. With ``double_buffering`` it runs
    beside the next iteration, in another thread, and is no operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from chainer_hybridmem.planning.records.sharing import ring_bytes
from chainer_hybridmem.training.session.iterations.iteration import Iteration
from chainer_hybridmem.training.session.setting.runtime import Runtime

NAME = 'multi_node_mean_grad'


class AllReduce:
    """Stands before a communicator's sum of gradients while a session is open.

    Args:
        runtime (Runtime): Its instruments are told when it starts and ends.
        find_iteration (callable): Returns the iteration under way.
    """

    def __init__(
        self, runtime: Runtime, find_iteration: Callable[[], Iteration]
    ) -> None:
        self._communicator = runtime.options.communicator  # None: one process
        self._instruments = runtime.instruments
        self._find_iteration = find_iteration
        self._sum: Callable[..., Any] | None = None
        self._own: Callable[..., Any] | None = None  # not its class's
        self._thread = 0

    def enter(self) -> None:
        """From here on it is noticed, in this thread."""
        self._thread = threading.get_ident()
        self._sum = getattr(self._communicator, NAME, None)
        if self._sum is not None:
            self._own = vars(self._communicator).get(NAME)
            setattr(self._communicator, NAME, self._run)

    def leave(self) -> None:
        """The communicator is as it was."""
        if self._sum is None or vars(self._communicator).get(NAME) != self._run:
            return
        if self._own is None:
            delattr(self._communicator, NAME)
        else:
            setattr(self._communicator, NAME, self._own)
        self._sum = self._own = None

    def _run(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._sum is not None
        iteration = self._find_iteration()
        mine = threading.get_ident() == self._thread
        if not mine or iteration.quiet or not iteration.is_complete:
            return self._sum(model, *args, **kwargs)
        self._note(ring_bytes(self._gradient_bytes(model), self._communicator.size))
        try:
            return self._sum(model, *args, **kwargs)
        finally:
            self._note(None)

    def _note(self, exchanged_bytes: int | None) -> None:
        instruments = self._instruments
        instruments.enter()
        instruments.start_after_backward(exchanged_bytes)
        instruments.leave(starts_operation=False)

    def _gradient_bytes(self, model: Any) -> int:
        """Bytes of all gradients, of the type in which they are sent."""
        sent_as = getattr(self._communicator, 'allreduce_grad_dtype', None)
        gradients = [p.grad for p in model.params() if p.grad is not None]
        if sent_as is None:
            return sum(g.nbytes for g in gradients)
        return sum(g.size for g in gradients) * np.dtype(sent_as).itemsize
