"""Reads pickles without unpickling: opcodes that make data, and nothing else.

``pickle`` calls whatever a file names. Here the opcodes, as ``pickletools`` of the
standard library takes them apart, drive a small machine of our own that knows only
numbers, text, bytes, tuples, lists, dicts and, for names that the caller admits, what
the caller makes of them. No class of another package is imported, looked up or called.
Sizes, depth and kinds of keys are bounded, so that what comes out can be walked
through.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError

MOST_OPCODES = 20_000_000
DEEPEST = 64
LARGEST_INTEGER = 2**63  # in either direction
_KEYS = (str, int)

Call = Callable[[tuple[Any, ...]], Any]
"""What a name makes of its arguments, when the file calls it."""


class Thing:
    """An object of a class that the file names: its attributes, and no behaviour.

    Attributes:
        state (dict): Attributes by name.
    """

    __slots__ = ('state',)

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def build(self, state: Any) -> None:
        """Takes the attributes that the file gives it."""
        if not isinstance(state, dict) or not all(isinstance(k, str) for k in state):
            raise ValueError('an object has attributes that are no names')
        self.state.update(state)


class _Named:
    """A name that the file uses, and what calling it gives."""

    __slots__ = ('call', 'name')

    def __init__(self, name: str, call: Call) -> None:
        self.name, self.call = name, call


_MARK = object()
_CONSTANTS = {'NONE': None, 'NEWTRUE': True, 'NEWFALSE': False}
_VALUES = frozenset(
    {'BININT', 'BININT1', 'BININT2', 'LONG1', 'BINFLOAT'}
    | {'BINUNICODE', 'SHORT_BINUNICODE', 'BINUNICODE8'}
    | {'BINBYTES', 'SHORT_BINBYTES', 'BINBYTES8'}
)
_STORES = frozenset({'BINPUT', 'LONG_BINPUT', 'MEMOIZE'})
_FETCHES = frozenset({'BINGET', 'LONG_BINGET'})
_TUPLES = {'EMPTY_TUPLE': 0, 'TUPLE1': 1, 'TUPLE2': 2, 'TUPLE3': 3}
_IGNORED = frozenset({'PROTO', 'FRAME'})


def read_pickle(data: bytes, admitted: Mapping[str, Call]) -> Any:
    """What a pickle holds.

    Args:
        data: The whole file.
        admitted: What each name that the file may use makes of its arguments, such as
            ``{'builtins set': ...}``. What it returns is data, or a :class:`Thing`.

    Raises:
        FormatError: If the file is no pickle, uses another name or opcode, or is larger
            or deeper than allowed.
    """
    if len(data) > files.MAXIMUM_FILE_BYTES:
        raise FormatError(
            f'The pickle has {len(data)} bytes; {files.MAXIMUM_FILE_BYTES} are allowed.'
        )
    try:
        value = _Machine(admitted).run(data)
    except FormatError:
        raise
    except (*files.UNPACKING_ERRORS, struct.error) as error:
        what = f'{error}' if isinstance(error, ValueError) else type(error).__name__
        raise FormatError(f'This is no pickle that can be read: {what}.') from error
    _check_depth(value)
    return value


class _Machine:
    """The stack and the memo of one file."""

    def __init__(self, admitted: Mapping[str, Call]) -> None:
        self._admitted = admitted
        self._stack: list[Any] = []
        self._memo: dict[Any, Any] = {}

    def run(self, data: bytes) -> Any:
        stack, memo = self._stack, self._memo
        for count, (opcode, argument, _) in enumerate(
            pickletools.genops(io.BytesIO(data))
        ):
            name = opcode.name
            if count >= MOST_OPCODES:
                raise FormatError(f'The pickle has more than {MOST_OPCODES} opcodes.')
            if name in _STORES:
                memo[len(memo) if argument is None else argument] = stack[-1]
            elif name in _FETCHES:
                stack.append(memo[argument])
            elif name in _VALUES:
                stack.append(_checked(argument))
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _TUPLES:
                self._push_tuple(_TUPLES[name])
            elif name == 'STOP':
                return self._data(stack.pop())
            elif name not in _IGNORED:
                step = getattr(self, f'_do_{name.lower()}', None)
                if step is None:
                    raise FormatError(f'The pickle uses {name}, which is not allowed.')
                step(argument)
        raise ValueError('it has no end')

    def _push_tuple(self, length: int) -> None:
        items = self._stack[len(self._stack) - length :] if length else []
        if len(items) != length:
            raise ValueError('its stack is empty')
        del self._stack[len(self._stack) - length :]
        self._stack.append(tuple(items))

    def _marked(self) -> list[Any]:
        """What has come since the last mark."""
        stack = self._stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError('a mark is missing')
        items = stack[place + 1 :]
        del stack[place:]
        return items

    @staticmethod
    def _data(value: Any) -> Any:
        if value is _MARK or isinstance(value, _Named):
            raise ValueError('a name stands where data should')
        return value

    def _do_mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _do_pop(self, _: Any) -> None:
        self._stack.pop()

    def _do_empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _do_empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _do_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._marked()))

    def _do_append(self, _: Any) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _do_appends(self, _: Any) -> None:
        self._extend(self._marked())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise ValueError('something is appended to what is no list')
        target.extend(self._data(item) for item in items)

    def _do_setitem(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _do_setitems(self, _: Any) -> None:
        self._set(self._marked())

    def _set(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ValueError('items are set in what is no dict')
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            target[_key(key)] = self._data(value)

    def _do_global(self, argument: str) -> None:
        self._name(argument)

    def _do_stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise ValueError('a name is no text')
        self._name(f'{module} {name}')

    def _name(self, name: str) -> None:
        if name not in self._admitted:
            raise FormatError(
                f'The pickle names {name[:80]!r}, which is not among what such a file '
                'needs: it is refused.'
            )
        self._stack.append(_Named(name, self._admitted[name]))

    def _do_reduce(self, _: Any) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, _Named) or not isinstance(arguments, tuple):
            raise ValueError('something is called that has no name')
        # A name among the arguments stands for its text, as `getattr(Class, 'Inner')`.
        self._stack.append(called.call(tuple(_as_data(part) for part in arguments)))

    def _do_newobj(self, argument: Any) -> None:
        self._do_reduce(argument)

    def _do_build(self, _: Any) -> None:
        state = self._stack.pop()
        built = self._stack[-1]
        if not isinstance(built, Thing):
            raise ValueError('attributes are given to what is no object')
        built.build(state)


def admit(name: str, call: Call) -> Any:
    """A name as a value: what a call may return to have it called later."""
    return _Named(name, call)


def _as_data(value: Any) -> Any:
    return value.name if isinstance(value, _Named) else value


def _checked(value: Any) -> Any:
    if isinstance(value, int) and not -LARGEST_INTEGER <= value < LARGEST_INTEGER:
        raise ValueError('a number has more than 64 bits')
    return value


def _key(key: Any) -> str | int:
    """Keys are never nested: hashing one that is deep would end the process."""
    if not isinstance(key, _KEYS):
        raise ValueError(f'a key is a {type(key).__name__}')
    return key


def _check_depth(value: Any) -> None:
    """Walks through everything once, level by level.

    Raises:
        FormatError: If there are more than :data:`DEEPEST` levels.
    """
    seen: set[int] = set()
    level = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for item in level:
            inner: Any
            if isinstance(item, Thing):
                inner = item.state.values()
            elif isinstance(item, dict):
                inner = item.values()
            elif isinstance(item, list | tuple):
                inner = item
            else:
                continue
            if id(item) not in seen:
                seen.add(id(item))
                below.extend(inner)
        if not below:
            return
        level = below
    raise FormatError(f'The pickle is nested more than {DEEPEST} levels deep.')
