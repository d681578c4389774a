"""Local response normalization in one kernel on a GPU.

Chainer runs three: the squares, their sums over neighbouring channels, the outputs.
The kernel runs the second one's loop, with the others' arithmetic inside.

Note: [rounding]
    Chainer's squares and sums lie in arrays of the input's type between its kernels.
    Here they are rounded to that type too; the functions of CUDA that round a product
    keep the compiler from turning square and sum into one rounding.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np
from chainer.backends import cuda

from chainer_hybridmem.devices.protocol import Array
from chainer_hybridmem.recompute.no_fused_replay import NoFusedReplayError

_SQUARE = """
template <class H> __device__ inline H square(H x) { return x * x; }  // float16
__device__ inline float square(float x) { return __fmul_rn(x, x); }
__device__ inline double square(double x) { return __dmul_rn(x, x); }
"""
_LOOP = """
int half_n = n / 2;
int start = i / size * channels * size + i % size;
float sum = 0;
for (int j = 0; j < channels + half_n; ++j) {
  if (j < channels) {
    sum += square(x[start + j * size]);
  }
  if (j >= n) {
    sum -= square(x[start + (j - n) * size]);
  }
  if (j >= half_n) {
    int at = start + (j - half_n) * size;
    T response = sum;
    T value = k + alpha * response;
    scale[at] = value;
    y[at] = x[at] * pow(value, -beta);
  }
}
"""


def normalise(
    function: Any, x: Array
) -> tuple[tuple[Array, ...], types.SimpleNamespace]:
    """Outputs and scales.

    Args:
        function: ``LocalResponseNormalization``.
        x: Its input, (n, c, ...).

    Returns:
        Output arrays, and an object with the attributes ``y`` and ``scale``.

    Raises:
        NoFusedReplayError: If the input is not on a GPU.
    """
    if isinstance(x, np.ndarray):
        raise NoFusedReplayError('only arrays on a GPU have one')
    samples, channels = x.shape[:2]
    y, scale = (cuda.cupy.empty(x.shape, x.dtype) for _ in range(2))
    _make_kernel()(
        *(x, x.size // (samples * channels), channels),
        *(function.n, function.k, function.alpha, function.beta),
        *(y, scale),
        size=x.size // channels,
    )
    return (y,), types.SimpleNamespace(y=y, scale=scale)


@functools.cache
def _make_kernel() -> Any:
    return cuda.elementwise(
        'raw T x, int32 size, int32 channels, int32 n, T k, T alpha, T beta',
        'raw T y, raw T scale',
        _LOOP,
        'hybridmem_lrn',
        preamble=_SQUARE,
    )
