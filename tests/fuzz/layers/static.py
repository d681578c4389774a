"""Static chains."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import static_graph

from .layer import Layer, kind


class _Static(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.dense = L.Linear(4, 4)

    @static_graph
    def forward(self, x: Any) -> Any:
        return F.tanh(self.dense(x))


@kind('vector', twice=False, draw=lambda r: {'rare': r.random()},
      links=lambda rare: {'static': _Static()})  # fmt: skip
def static(at: Layer, x: Any, rare: float) -> Any:
    """A static chain, which a session refuses."""
    if x.shape[1] < 4 or rare > 0.3 or x.dtype != np.float32:
        return F.sigmoid(x)
    with contextlib.redirect_stdout(io.StringIO()):  # it talks
        return F.concat((at.static(x[:, :4]), x), axis=1)
