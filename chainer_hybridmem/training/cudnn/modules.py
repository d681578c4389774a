"""``cupy.cudnn`` and ``cupy.cuda.cudnn``, made importable where CuPy has none.

A finder behind all others: where CuPy has the modules, they are CuPy's.
``cupy.cuda.cudnn`` can be imported without cuDNN; its ``available`` tells, and its
functions raise. ``cupy.cudnn`` cannot, which is how Chainer learns of it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

_LIBRARY = ('cupy.cuda.cudnn', 'cupy_backends.cuda.libs.cudnn')
_ARRAYS = ('cupy.cudnn', 'cupyx.cudnn')


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
        if module.__name__ in _LIBRARY:
            vars(module).update(_library_names())
        else:
            vars(module).update(_array_names())


def install() -> None:
    """Makes the modules importable; imports nothing itself."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def _library_names() -> dict[str, Any]:
    from chainer_hybridmem.training.cudnn import constants, functions, recurrent

    return {
        **{name: value for name, value in vars(constants).items() if name[0] == 'C'},
        **functions.FUNCTIONS,
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
        if name[0] != '_' and getattr(value, '__module__', None) == room.__name__
    }
