"""Layers of vectors: linear, attention, recurrent."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from .forms import like
from .layer import Layer, kind


@kind('vector', draw=lambda r: {'out': r.choice((4, 8, 16)), 'nobias': r.random() < .3},
      links=lambda out, nobias: {
          'dense': L.Linear(None, out, nobias=nobias)})  # fmt: skip
def linear(at: Layer, x: Any, out: int, nobias: bool) -> Any:
    return at.dense(x)


@kind('vector', links=lambda: {'dense': L.Linear(None, 12)})
def tied_linear(at: Layer, x: Any) -> Any:
    """There and back with the same parameter, once transposed."""
    h = F.tanh(at.dense(x))
    return F.linear(h, F.transpose(at.dense.W))


@kind('vector', twice=False, links=lambda: {'out': L.Linear(None, 12),
                               'maxout': L.Maxout(None, 8, 2)})  # fmt: skip
def maxout(at: Layer, x: Any) -> Any:
    return at.maxout(F.relu(at.out(x)))


@kind('vector', links=lambda: {'dense': L.Linear(None, 10), 'highway': L.Highway(10)})
def highway(at: Layer, x: Any) -> Any:
    return at.highway(at.dense(x))


def _bilinear() -> dict[str, chainer.Link]:
    with chainer.using_config('dtype', np.dtype('float32')):
        both = L.Bilinear(6, 5, 7)
    return {'a': L.Linear(None, 6), 'b': L.Linear(None, 5), 'both': both}


@kind('vector', inputs=2, twice=False, links=_bilinear)
def bilinear(at: Layer, x: Any, y: Any) -> Any:
    a, b = (F.cast(h, 'float32') for h in (at.a(x), at.b(like(x, y))))
    return F.cast(at.both(a, b), x.dtype)


@kind('vector', draw=lambda r: {'heads': r.choice((1, 2))},
      links=lambda heads: {'joint': L.Linear(None, 3 * 8 * heads)})  # fmt: skip
def attention(at: Layer, x: Any, heads: int) -> Any:
    n = x.shape[0]
    q, k, v = F.split_axis(at.joint(x), 3, axis=1)
    q, k, v = (
        F.transpose(F.reshape(h, (n, heads, 4, 2)), (0, 2, 1, 3)) for h in (q, k, v)
    )
    weights = F.softmax(F.matmul(q, k, transb=True), axis=3)
    return F.matmul(F.dropout(weights, 0.2), v)


@kind('vector', draw=lambda r: {'words': r.randint(3, 9)},
      links=lambda words: {'embed': L.EmbedID(words, 6)})  # fmt: skip
def embed(at: Layer, x: Any, words: int) -> Any:
    index = np.nan_to_num(x.array[:, :7].astype(np.float64) * 8, posinf=0, neginf=0)
    index = np.clip(np.abs(index), 0, words - 1).astype(np.int32)
    y = F.reshape(at.embed(index), (x.shape[0], 6 * index.shape[1]))
    return F.concat((x, F.cast(y, x.dtype)), axis=1)


@kind('vector', draw=lambda r: {'steps': r.randint(2, 3), 'carry': r.random() < 0.4},
      links=lambda steps, carry: {'lstm': L.LSTM(None, 8)})  # fmt: skip
def lstm(at: Layer, x: Any, steps: int, carry: bool) -> Any:
    """Shared parameters over time; the state may outlive the iteration."""
    last = at.lstm.h
    if not carry or last is None or last.shape[0] != x.shape[0]:
        at.lstm.reset_state()
    else:
        at.lstm.h.unchain_backward()
        at.lstm.c.unchain_backward()
    width = max(x.shape[1] // steps, 1)
    outputs = []
    for step in range(steps):
        part = x[:, step * width : (step + 1) * width]
        outputs.append(at.lstm(like(x[:, :width], part)))
    return F.concat(outputs, axis=1)


@kind('vector', draw=lambda r: {'steps': r.randint(2, 4)}, twice=False,
      links=lambda steps: {'dense': L.Linear(None, 6), 'gru': L.GRU(6, 6)})  # fmt: skip
def gru(at: Layer, x: Any, steps: int) -> Any:
    at.gru.reset_state()
    h = at.dense(x)
    for _ in range(steps):
        h = at.gru(h)
    return h


@kind('vector', twice=False, draw=lambda r: {'dropout': r.choice((0.0, 0.3))},
      links=lambda dropout: {'dense': L.Linear(None, 12),
                             'many': L.NStepLSTM(2, 4, 3, dropout)})  # fmt: skip
def n_step_lstm(at: Layer, x: Any, dropout: float) -> Any:
    """Sentences of different lengths."""
    h = F.reshape(at.dense(x), (x.shape[0], 3, 4))
    sentences = [h[i, : 1 + i % 3] for i in range(x.shape[0])]
    _, cell, outputs = at.many(None, None, sentences)
    ends = F.stack([y[-1] for y in outputs])
    return F.concat((ends, F.reshape(F.swapaxes(cell, 0, 1), (x.shape[0], -1))), axis=1)
