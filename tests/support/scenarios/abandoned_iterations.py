"""Iterations that end early: no backward, or an exception."""

from __future__ import annotations

from typing import Any

import chainer

from .classifier import pictures
from .loop import begin, learn, step
from .registry import scenario
from .running import Run


@scenario()
def early_break(run: Run) -> None:
    """Some forwards are thrown away."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(27):
            loss = model(*pictures(rng))
            if i % 5 == 4:
                del loss
                continue
            learn(model, optimizer, loss)
            run.record(model, loss=loss)
            del loss


class Fault(Exception):
    """Raised by a program on purpose."""


class Faulty(chainer.FunctionHook):
    """Raises at the n-th function of a phase."""

    name = 'faulty'

    def __init__(self, phase: str, at: int = 6) -> None:
        self.phase, self.at = phase, at

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        self._count('forward')

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._count('backward')

    def _count(self, phase: str) -> None:
        self.at -= phase == self.phase
        if self.at == 0:
            raise Fault


@scenario(deviations=4, evictions=True)
def exceptions_caught(run: Run) -> None:
    """An exception in forward or backward is caught and training goes on."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(25):
            batch = pictures(rng)
            try:
                if i in (1, 8, 16, 17):
                    with Faulty('forward' if i % 2 else 'backward'):
                        step(model, optimizer, *batch)
                else:
                    run.record(model, loss=step(model, optimizer, *batch))
            except Fault:
                model.cleargrads()
