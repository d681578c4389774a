"""Names that NumPy, ``collections`` and ``inspect`` have removed, for old programs.

They are put back for the whole process, so only where somebody has asked for it:
``hybridmem run --old-names``. What is still there stays as it is.
"""

from __future__ import annotations

import builtins
import collections
import collections.abc
import dataclasses
import importlib
from collections.abc import Callable, Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class OldNames:
    """Names of one module that went together.

    Attributes:
        module (str): Had them.
        since (str): The first version without them.
        instead (dict): For each name, what is put there: a name of the module, or what
            makes the value.
    """

    module: str
    since: str
    instead: dict[str, str | Callable[[Any], Any]]


def _scalar(numpy: Any) -> Any:
    return lambda a: numpy.asarray(a).item()


def _sorted(numpy: Any) -> Any:
    return lambda a: numpy.sort(a, axis=0)


def _floats(numpy: Any) -> Any:
    def asfarray(a: Any, dtype: Any = numpy.float64) -> Any:
        floating = numpy.issubdtype(dtype, numpy.inexact)
        return numpy.asarray(a, dtype=dtype if floating else numpy.float64)

    return asfarray


def _casts(numpy: Any) -> Any:
    class Casts(dict[Any, Any]):
        def __missing__(self, kind: Any) -> Any:
            return lambda x: numpy.asarray(x).astype(kind)

    return Casts()


def _common_type(numpy: Any) -> Any:
    return lambda arrays, scalars: numpy.result_type(*arrays, *scalars)


def _builtin(name: str) -> Callable[[Any], Any]:
    return lambda module: getattr(builtins, name)


def _number(value: float) -> Callable[[Any], Any]:
    return lambda module: value


def _exception(name: str) -> Callable[[Any], Any]:
    return lambda numpy: getattr(numpy.exceptions, name)


def _abstract(name: str) -> Callable[[Any], Any]:
    return lambda module: getattr(collections.abc, name)


_ArgSpec = collections.namedtuple('_ArgSpec', 'args varargs keywords defaults')


def _getargspec(module: Any) -> Any:
    return lambda function: _ArgSpec(*module.getfullargspec(function)[:4])


_EXCEPTIONS = 'AxisError', 'ComplexWarning', 'VisibleDeprecationWarning'
TABLE = (
    OldNames('numpy', 'NumPy 1.23', {'asscalar': _scalar}),
    OldNames(
        'numpy',
        'NumPy 1.24',
        {n: _builtin(n) for n in ('bool', 'complex', 'float', 'int', 'object', 'str')},
    ),
    OldNames(
        'numpy',
        'NumPy 2.0',
        {
            'Inf': 'inf',
            'Infinity': 'inf',
            'NINF': _number(float('-inf')),
            'NZERO': _number(-0.0),
            'NaN': 'nan',
            'PINF': 'inf',
            'PZERO': _number(0.0),
            'alltrue': 'all',
            'asfarray': _floats,
            'bool8': 'bool_',
            'cast': _casts,
            'cfloat': 'complex128',
            'complex_': 'complex128',
            'cumproduct': 'cumprod',
            'find_common_type': _common_type,
            'float_': 'float64',
            'infty': 'inf',
            'int0': 'intp',
            'longcomplex': 'clongdouble',
            'longfloat': 'longdouble',
            'mat': 'asmatrix',
            'msort': _sorted,
            'object0': 'object_',
            'product': 'prod',
            'round_': 'round',
            'singlecomplex': 'complex64',
            'sometrue': 'any',
            'string_': 'bytes_',
            'uint0': 'uintp',
            'unicode_': 'str_',
            **{name: _exception(name) for name in _EXCEPTIONS},
        },
    ),
    OldNames(
        'numpy',
        'NumPy 2.4',
        {'in1d': 'isin', 'row_stack': 'vstack', 'trapz': 'trapezoid'},
    ),
    OldNames(
        'collections',
        'Python 3.10',
        {
            name: _abstract(name)
            for name in sorted(collections.abc.__all__)
            if name not in ('Buffer', 'ByteString')
        },
    ),
    OldNames('inspect', 'Python 3.11', {'getargspec': _getargspec}),
)


def put_back(table: Iterable[OldNames] = TABLE) -> None:
    """Gives the modules those names that they do not have."""
    for group in table:
        module: Any = importlib.import_module(group.module)
        there = vars(module)
        for name, instead in group.instead.items():
            if name in there:
                continue
            if callable(instead):
                there[name] = instead(module)
            elif instead in there:
                there[name] = there[instead]
