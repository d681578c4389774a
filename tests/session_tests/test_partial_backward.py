"""Iterations whose backward ends early, among others that begin in the same way."""

from __future__ import annotations

from collections.abc import Collection

import chainer_hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import numpy as np
import pytest
from support import faulty

ITERATIONS = 12


def train(run: faulty.Run, partial: Collection[int]) -> None:
    """Some iterations train the last layers alone, with ``chainer.grad``."""
    head = [*run.model.d.params(), *run.model.e.params()]
    for i in range(ITERATIONS):
        loss = run.model(run.pictures[i], run.labels[i])
        run.model.cleargrads()
        if i in partial:
            for parameter, grad in zip(head, chainer.grad([loss], head), strict=True):
                parameter.grad_var = grad
            del grad
        else:
            loss.backward()
        del loss
        run.optimizer.update()


@pytest.mark.parametrize('partial', [(1,), (2,), (1, 3), (2, 3), (0, 2)], ids=str)
def test_maps_that_leave_late_are_not_held(partial):
    """What is recorded follows the guide of the short ones, and then its own.

    By then it has what the other guide puts away earlier. Nobody else holds that.
    """
    run = faulty.Run()
    session = chainer_hybridmem.optimize(
        run.model, faulty.LIMIT, planner='superneurons'
    )
    with session:
        train(run, partial)
    assert session.statistics()['guided_iterations'] >= 3
    assert session.statistics()['guided_peak_bytes'] <= faulty.LIMIT
    plain = faulty.Run()
    train(plain, partial)
    for name, array in plain.learnt().items():
        np.testing.assert_array_equal(run.learnt()[name], array)
