"""With what cuDNN multiplies and sums.

Note: [arithmetic]
    float32 is multiplied as float32 unless CuPy may use TF32 (``CUPY_TF32=1``, or
    ``cupy._core.set_compute_type``), float16 on tensor cores unless Chainer's
    ``use_cudnn_tensor_core`` is ``'never'``; either is summed as float32.
"""

from __future__ import annotations

from chainer_hybridmem.training.cudnn import constants as c

_TF32 = 7  # COMPUTE_TYPE_TF32 of CuPy


def choose_math(kind: int, tensor_cores: bool = True) -> int:
    """``CUDNN_..._MATH`` for a type; see [arithmetic]."""
    if kind == c.CUDNN_DATA_HALF and tensor_cores:
        return c.CUDNN_TENSOR_OP_MATH
    if kind == c.CUDNN_DATA_FLOAT and not may_use_tf32():
        return c.CUDNN_FMA_MATH
    return c.CUDNN_DEFAULT_MATH


def sum_kind(kind: int) -> int:
    """The type in which products of a type are summed."""
    return c.CUDNN_DATA_FLOAT if kind == c.CUDNN_DATA_HALF else kind


def may_use_tf32() -> bool:
    """Whether CuPy multiplies float32 as TF32."""
    from cupy._core import get_compute_type

    return bool(get_compute_type('f') == _TF32)
