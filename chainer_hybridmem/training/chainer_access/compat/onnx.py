"""Makes ``onnx_chainer``, Chainer's own exporter, importable with onnx 1.19 and newer.

It reads tables of ``onnx.mapping``, which is gone; functions of onnx tell the same. So
models can leave Chainer.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy

from chainer_hybridmem.training.chainer_access.compat.import_wrapper import (
    ImportWrapper,
)
from chainer_hybridmem.training.chainer_access.compat.patches import Overlay

NAME = 'onnx_chainer'
GONE = 'onnx.mapping'
READER = 'onnx_chainer.context'  # reads it as an attribute of onnx, later
KINDS = (
    *('bool', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64'),
    *('float16', 'float32', 'float64', 'complex64', 'complex128', 'object'),
)


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """Around the exporter's own import, which imports all of its modules."""
    if importlib.util.find_spec('onnx') is None or _is_there():
        yield
        return
    mapping = make_mapping()
    ImportWrapper.install(READER, lambda: _with_attribute(mapping))
    sys.modules[GONE] = mapping
    try:
        yield
    finally:
        del sys.modules[GONE]


@contextlib.contextmanager
def _with_attribute(mapping: types.ModuleType) -> Iterator[None]:
    yield
    reader: Any = sys.modules[READER]
    reader.onnx = Overlay(reader.onnx, mapping=mapping)


def _is_there() -> bool:
    return importlib.util.find_spec(GONE) is not None


def make_mapping() -> types.ModuleType:
    """Makes a module with the tables of ``onnx.mapping`` that the exporter reads."""
    helper: Any = importlib.import_module('onnx.helper')
    kinds = [numpy.dtype(kind) for kind in KINDS]
    numbers = {kind: int(helper.np_dtype_to_tensor_dtype(kind)) for kind in kinds}
    module = types.ModuleType(GONE)
    vars(module).update(
        NP_TYPE_TO_TENSOR_TYPE=numbers,
        TENSOR_TYPE_TO_NP_TYPE={number: kind for kind, number in numbers.items()},
        STORAGE_TENSOR_TYPE_TO_FIELD={
            number: helper.tensor_dtype_to_field(number) for number in numbers.values()
        },
    )
    return module
