"""Private fields of single Chainer functions."""

from __future__ import annotations

from typing import Any

from chainer.functions.activation import leaky_relu, relu
from chainer.functions.normalization import batch_normalization as bn

LeakyReLUGrad = leaky_relu._LeakyReLUGrad
IN_SHAPE = '_in_shape'  # attribute of pooling: the shape of its input


def chooses_as_chainer(normalization: Any) -> bool:
    """Whether Chainer chooses the implementation of a batch normalization."""
    return bool(normalization._impl_selector is bn._impl_selector)


def is_general(gradient: Any) -> bool:
    """Whether a batch normalization's backward is Chainer's own, without a library."""
    return type(gradient._impl) is bn.GeneralBatchNormalizationImpl


def is_by_cudnn(normalization: Any) -> bool:
    """Whether cuDNN has computed a batch normalization's forward."""
    return type(normalization._impl) is bn._CudnnBatchNormalizationImpl


def is_relu_of_cudnn(function: Any) -> bool:
    """Whether the forward of a ReLU has gone through cuDNN."""
    return bool(function._use_cudnn)


def relu_of_cudnn(x: Any) -> Any:
    """What cuDNN's ReLU makes of an array."""
    return relu.cudnn.activation_forward(x, relu._mode)


def input_layouts(function: Any) -> tuple[Any, ...]:
    """How the axes of inputs lie in memory; empty if all lie as usual."""
    return getattr(function, '_input_layouts', None) or ()


def set_batch_size(function: Any, original: Any, length: int) -> None:
    """Changes the batch size that a pooling remembers of its input.

    Args:
        function: Gets it, if it is a pooling whose forward has run.
        original: Knows the rest of the shape.
        length: Of the batch.
    """
    if IN_SHAPE in vars(original):
        function._in_shape = (length, *original._in_shape[1:])
