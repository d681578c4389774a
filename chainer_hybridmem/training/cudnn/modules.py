"""``cupy.cudnn`` and ``cupy.cuda.cudnn``, made importable where CuPy has none.

A finder behind all others: where CuPy has the modules, they are CuPy's.
``cupy.cuda.cudnn`` can be imported without cuDNN; its ``available`` tells, and its
functions raise. ``cupy.cudnn`` cannot, which is how Chainer learns of it.

Both have what Chainer calls, and what it takes; what else CuPy 13 had is told apart.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

_LIBRARY = ('cupy.cuda.cudnn', 'cupy_backends.cuda.libs.cudnn')
_ARRAYS = ('cupy.cudnn', 'cupyx.cudnn')
_CLASSES = 'Descriptor', 'DropoutStates'
_CUPYS_NAMES = {
    'activationBackward_v4': 'activationBackward',
    'activationForward_v4': 'activationForward',
    'addTensor_v3': 'addTensor',
    'convolutionBackwardData_v3': 'convolutionBackwardData',
    'convolutionBackwardFilter_v3': 'convolutionBackwardFilter',
    'getDropoutReserveSpaceSize': 'dropoutGetReserveSpaceSize',
    'setConvolutionNdDescriptor_v3': 'setConvolutionNdDescriptor',
    'setFilter4dDescriptor_v4': 'setFilter4dDescriptor',
    'setFilterNdDescriptor_v4': 'setFilterNdDescriptor',
    'setPoolingNdDescriptor_v4': 'setPoolingNdDescriptor',
    'setSpatialTransformerDescriptor': 'setSpatialTransformerNdDescriptor',
}


# Of no base class of importlib.abc, whose import takes as long as all of compat.
class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _LIBRARY + _ARRAYS:
            loader: Any = self
            return importlib.util.spec_from_loader(fullname, loader)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """None: a module like any other."""

    def exec_module(self, module: Any) -> None:
        is_library = module.__name__ in _LIBRARY
        vars(module).update(_library_names() if is_library else _array_names())
        vars(module)['__getattr__'] = functools.partial(_tell_lacking, module.__name__)


def install() -> None:
    """Makes the modules importable; imports nothing itself."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def _tell_lacking(module: str, name: str) -> Any:
    told = f'module {module!r} has no attribute {name!r}'
    if not name.startswith('__'):
        told += f': of cuDNN 9 it has what Chainer calls; {_tell_others()}'
    raise AttributeError(told, name=name)


@functools.cache
def _tell_others() -> str:
    from chainer_hybridmem.version import describe_installation

    found = describe_installation('cuda12-cudnn8')
    return f'what else CuPy 13 had comes with CuPy 13 and cuDNN 8: {found}'


def _library_names() -> dict[str, Any]:
    from chainer_hybridmem.training.cudnn import constants, functions, recurrent

    return {
        **{name: value for name, value in vars(constants).items() if name[0] == 'C'},
        **functions.FUNCTIONS,
        **{name: functions.FUNCTIONS[own] for name, own in _CUPYS_NAMES.items()},
        'CuDNNError': functions.CuDNNError,
        'available': functions.is_available(),
        'getRNNParamsSize': recurrent.getRNNParamsSize,
        'getVersion': functions.getVersion,
        'get_build_version': functions.getVersion,  # of what CuPy was built for
    }


def _array_names() -> dict[str, Any]:
    from chainer_hybridmem.training.cudnn import (
        convolutions,
        descriptors,
        functions,
        layers,
        normalization,
        recurrent,
    )

    functions.check_names()
    rooms = (convolutions, descriptors, layers, normalization, recurrent)
    return {
        name: value
        for room in rooms
        for name, value in vars(room).items()
        if name[0] != '_' and ('_' in name or name in _CLASSES)
        if getattr(value, '__module__', None) == room.__name__
    }
