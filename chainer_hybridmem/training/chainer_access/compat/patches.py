"""Repairs of Chainer's own code under NumPy 2 and CuPy 14.

The code fails, or silently gives other numbers, under NumPy 2's promotion rules. Known
and left: the means of ``F.hinge`` and ``F.triplet`` in float16, on the CPU, over more
than 65,504 rows.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy

from chainer_hybridmem.training.chainer_access.compat.chainermn import (
    FLOAT16,
    has_float16_header,
)
from chainer_hybridmem.training.chainer_access.compat.stand_ins import list_scalar_types

_MARK = '_chainer_hybridmem_patch'


def patch_all() -> None:
    """Applies every repair to the imported Chainer, each one once."""
    _patch_summary()
    _patch_micro_average()
    _patch_as_strided()
    _patch_resize_images()
    _patch_categorical()
    _patch_pad_sequence()
    _patch_mean_squared_error()
    _patch_multiprocess_updater()
    _patch_pooling_cycle()


def _chainer_module(name: str) -> Any:
    return importlib.import_module('chainer.' + name)


def _wrap(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces ``owner.name`` by ``wrap`` of it, once."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    wrapped = functools.wraps(original)(wrap(original))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _patch_summary() -> None:
    """Lets Summary accumulate in double precision.

    Under NEP 50 ``0.0 + numpy.float32`` stays float32, and an int32 square
    overflows: means lose digits, deviations become NaN, silently.
    """

    def wrap(add: Any) -> Any:
        def add_in_double(self: Any, value: Any, weight: Any = 1) -> None:
            add(self, _widened(value), _widened(weight))

        return add_in_double

    _wrap(_chainer_module('reporter').Summary, 'add', wrap)


def _widened(value: Any) -> Any:
    """Casts a NumPy scalar or 0-d array as NumPy 1 did beside a Python number."""
    if not isinstance(value, numpy.generic | numpy.ndarray):
        return value  # Python numbers, and arrays on a GPU
    if value.ndim != 0:
        return value
    if value.dtype.kind in 'bi' or (value.dtype.kind == 'u' and value.itemsize < 8):
        return value.astype(numpy.int64)
    if value.dtype.kind == 'u' or (value.dtype.kind == 'f' and value.itemsize < 8):
        return value.astype(numpy.float64)
    return value


def _patch_micro_average() -> None:
    """Lets MicroAverage add up in double precision, as :func:`_patch_summary`."""

    def wrap(call: Any) -> Any:
        def call_in_double(self: Any, trainer: Any) -> None:
            # Its sums start from the Python number 0 after every trigger, which
            # float32 observations would turn into float32.
            if isinstance(self._numerator, int):
                self._numerator = numpy.float64(self._numerator)
            if isinstance(self._denominator, int):
                self._denominator = numpy.float64(self._denominator)
            call(self, trainer)

        return call_in_double

    module = _chainer_module('training.extensions.micro_average')
    _wrap(module.MicroAverage, '__call__', wrap)


def _patch_as_strided() -> None:
    """Gives as_strided, whose backward needs it as well, its numpy.sctypes."""
    module = _chainer_module('functions.array.as_strided')
    if not hasattr(module.np, 'sctypes'):
        module.np = Overlay(numpy, sctypes=list_scalar_types())


def _patch_resize_images() -> None:
    """Gives resize_images its numpy.float, which went with NumPy 1.24."""
    module = _chainer_module('functions.array.resize_images')
    if hasattr(module.numpy, 'float'):
        return

    def wrap(function: Any) -> Any:
        # The module tests `xp is numpy` elsewhere: only this function, which uses
        # no other global, may see another numpy. CuPy asks for the builtins.
        return types.FunctionType(
            function.__code__,
            {'__builtins__': builtins, 'numpy': Overlay(numpy, float=float)},
        )

    _wrap(module, 'compute_indices_and_weights', wrap)


def _patch_categorical() -> None:
    """Lets Categorical.log_prob append to what meshgrid returns.

    It is a tuple since NumPy 2.
    """
    module = _chainer_module('distributions.categorical')
    if isinstance(module.numpy, Overlay):
        return

    @functools.wraps(numpy.meshgrid)
    def meshgrid(*args: Any, **kwargs: Any) -> list[Any]:
        return list(numpy.meshgrid(*args, **kwargs))

    module.numpy = Overlay(numpy, meshgrid=meshgrid)


def _patch_pad_sequence() -> None:
    """Lets pad_sequence pad with a number outside the range of an integer dtype.

    -1 in uint8 is 255, as it was before NumPy 2 refused it.
    """

    def wrap(forward: Any) -> Any:
        def forward_with_cast_padding(self: Any, xs: Any) -> Any:
            padding, dtype = self.padding, xs[0].dtype
            if isinstance(padding, int) and dtype.kind in 'iu':
                self.padding = numpy.asarray(padding).astype(dtype)[()]
            try:
                return forward(self, xs)
            finally:
                self.padding = padding

        return forward_with_cast_padding

    module = _chainer_module('functions.array.pad_sequence')
    _wrap(module.PadSequence, 'forward', wrap)


def _patch_mean_squared_error() -> None:
    """Lets mean_squared_error divide float16 by more than 65,504 elements.

    Under NEP 50 the count becomes float16, that is infinity, and the error 0.
    """

    def wrap(forward_cpu: Any) -> Any:
        def forward_cpu_in_double(self: Any, inputs: Any) -> Any:
            if inputs[0].dtype != numpy.float16:
                return forward_cpu(self, inputs)
            self.retain_inputs((0, 1))
            difference = (inputs[0] - inputs[1]).ravel()
            total = numpy.float64(difference.dot(difference))
            return (numpy.array(total / difference.size, dtype=numpy.float16),)

        return forward_cpu_in_double

    module = _chainer_module('functions.loss.mean_squared_error')
    _wrap(module.MeanSquaredError, 'forward_cpu', wrap)


def _patch_multiprocess_updater() -> None:
    """Lets the kernels of MultiprocessParallelUpdater know the type float16.

    Since CuPy 14 only kernels with such arguments get its header.
    """
    module = _chainer_module('training.updaters.multiprocess_parallel_updater')
    if isinstance(module.cuda, Overlay):
        return
    elementwise = module.cuda.elementwise

    @functools.wraps(elementwise)
    def elementwise_with_float16(*args: Any, **options: Any) -> Any:
        if has_float16_header(module.cuda.cupy):
            options.setdefault('preamble', f'#include <{FLOAT16}>')
        return elementwise(*args, **options)

    module.cuda = Overlay(module.cuda, elementwise=elementwise_with_float16)


def _patch_pooling_cycle() -> None:
    """Lets a pooling function that cuDNN computes die with its graph.

    It and its helper hold each other. Without this repair, the graphs of past
    iterations stay in memory until Python collects garbage.
    """
    helper = _chainer_module('functions.pooling.pooling_nd')._CudnnPoolingNDImpl
    if isinstance(vars(helper).get('func'), property):
        return

    def get(self: Any) -> Any:
        return self._func()

    def hold_weakly(self: Any, function: Any) -> None:
        self._func = weakref.ref(function)

    helper.func = property(get, hold_weakly)


class Overlay(types.ModuleType):
    """What one module gets for its global ``numpy``, say.

    The module itself, which all others share, stays as it is. It is equal to the
    module, for code that tests ``xp != numpy``, but not for what tests ``xp is numpy``.
    """

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._module

    def __hash__(self) -> int:
        return hash(self._module)
