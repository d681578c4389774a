"""Small networks recorded on the CPU, each once per test run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import chainer_hybridmem as hybridmem

from . import networks

# isort: split
import chainer

from chainer_hybridmem.planning.records.profile import Profile


@functools.cache
def recorded(make: Callable[[], Any], batchsize: int, insize: int = 16) -> Profile:
    """The profile of one training iteration."""
    np.random.seed(0)
    model = make()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    x, t = networks.batches(1, batchsize, insize)[0]
    with hybridmem.optimize(model, '1GB', planner='swap-all') as session:
        for _ in range(5):
            loss = model(x.copy(), t.copy())
            model.cleargrads()
            loss.backward()
            del loss
            optimizer.update()
        profile = session.profile
    assert profile is not None
    return profile
