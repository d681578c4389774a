"""Tables of arrays and numbers that compiled code finds by one address.

numba takes a named tuple apart: each array in it becomes seven values of every function
that it is handed to. With dozens of arrays most of the compiler's time goes there, and
a call takes longer than a short function. A table is one pointer instead.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    unbox,
)
from numba.np import numpy_support
from numba.np.arrayobj import make_array, populate_array

Ints = Annotated[np.ndarray, np.int64, 1]
Ints2 = Annotated[np.ndarray, np.int64, 2]  # with two axes
Shorts = Annotated[np.ndarray, np.int32, 1]
Floats = Annotated[np.ndarray, np.float64, 1]
Floats2 = Annotated[np.ndarray, np.float64, 2]
Bools = Annotated[np.ndarray, np.bool_, 1]
Bools2 = Annotated[np.ndarray, np.bool_, 2]

AnyTable = TypeVar('AnyTable', bound='Table')
_NUMBERS = {int: types.int64, float: types.float64, bool: types.boolean}
_WORD = ir.IntType(64)
# What an older version of this file has compiled looks in other places.
_VERSION = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:16]


class TableType(types.Type):
    """What numba knows of a class of tables.

    Attributes:
        members (dict): Type and first word of each, by name; an array has the address
            of its data and its shape.
    """

    def __init__(self, name: str, members: dict[str, Any]) -> None:
        self.members: dict[str, tuple[Any, int]] = {}
        word = 0
        for member, kind in members.items():
            self.members[member] = kind, word
            word += 1 + getattr(kind, 'ndim', 0)
        layout = hashlib.sha256(repr(self.members).encode()).hexdigest()[:16]
        super().__init__(name=f'{name}_{layout}_{_VERSION}')


class Table:
    """The base of frozen dataclasses with numbers, and arrays of the types above.

    Arrays are copied if they are not contiguous or have another type. How long the axes
    of an array are may stand behind its type: ``Annotated[Ints2, 'maps', 3]``.
    """

    compiled: ClassVar[TableType]  # its type in signatures
    _arrays: ClassVar[dict[str, tuple[Any, ...]]]  # type and axes of each, by name
    _numba_type_: ClassVar[TableType]  # where numba looks for it

    def __init_subclass__(cls) -> None:
        members = {}
        cls._arrays = {}
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if hint in _NUMBERS:
                members[name] = _NUMBERS[hint]
            elif get_args(hint)[:1] == (np.ndarray,):
                _, kind, axes, *lengths = get_args(hint)
                cls._arrays[name] = kind, *lengths
                dtype = numpy_support.from_dtype(np.dtype(kind))
                members[name] = types.Array(dtype, axes, 'C')
        cls.compiled = cls._numba_type_ = TableType(cls.__name__, members)

    def __post_init__(self) -> None:
        words: list[Any] = []
        for name, (kind, _) in self._numba_type_.members.items():
            value = getattr(self, name)
            if not isinstance(kind, types.Array):
                number = np.float64 if kind is types.float64 else np.int64
                words.append(number(value).view(np.int64))
                continue
            dtype = numpy_support.as_dtype(kind.dtype)
            array = np.ascontiguousarray(value, dtype)
            if array.ndim != kind.ndim:
                raise TypeError(f'{name} has {array.ndim} axes, not {kind.ndim}')
            object.__setattr__(self, name, array)
            words += [array.ctypes.data, *array.shape]
        found = np.array(words, np.int64)
        object.__setattr__(self, '_words', found)
        object.__setattr__(self, '_address', found.ctypes.data)

    @classmethod
    def zeros(
        cls: type[AnyTable], lengths: Mapping[str, int], **given: Any
    ) -> AnyTable:
        """A table of zeros, but for what is given.

        Args:
            lengths: Of axes, by name.
            given: Arrays and numbers by name.
        """
        for name, (kind, *axes) in cls._arrays.items():
            if name not in given:
                shape = [lengths.get(axis, axis) for axis in axes]
                given[name] = np.zeros(shape, kind)
        return cls(**given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies have arrays of their own, thus other addresses."""
        return type(self), tuple(getattr(self, m) for m in self._numba_type_.members)


register_model(TableType)(models.OpaqueModel)


@infer_getattr
class _Members(AttributeTemplate):
    key = TableType

    def generic_resolve(self, table: TableType, name: str) -> Any:
        return table.members[name][0] if name in table.members else None


@lower_getattr_generic(TableType)
def _read(context: Any, builder: Any, table: TableType, value: Any, name: str) -> Any:
    kind, first = table.members[name]
    words = builder.bitcast(value, _WORD.as_pointer())
    # Nobody writes into the words: a loop need not look again.
    always = builder.module.add_metadata([])

    def word(place: int) -> Any:
        pointer = builder.gep(words, [ir.Constant(_WORD, place)])
        loaded = builder.load(pointer)
        loaded.set_metadata('invariant.load', always)
        return loaded

    if kind is types.boolean:
        return builder.icmp_signed('!=', word(first), _WORD(0))
    if kind is types.float64:
        return builder.bitcast(word(first), ir.DoubleType())
    if kind is types.int64:
        return word(first)
    array = make_array(kind)(context, builder)
    shape = [word(first + 1 + axis) for axis in range(kind.ndim)]
    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides = [_WORD(size)]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    data = builder.inttoptr(word(first), array.data.type)
    populate_array(array, data, shape, strides, _WORD(size), meminfo=None)
    return array._getvalue()


@unbox(TableType)
def _address(table: TableType, owner: Any, c: Any) -> Any:
    number = c.pyapi.object_getattr_string(owner, '_address')
    pointer = c.pyapi.long_as_voidptr(number)
    c.pyapi.decref(number)
    return NativeValue(pointer)
