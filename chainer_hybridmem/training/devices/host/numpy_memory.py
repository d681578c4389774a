"""Sends NumPy's data allocations of one context to native code.

NumPy asks the handler of the current context for every block of array data
(NEP 49) and remembers it in the array, which frees its block through the same
handler, perhaps much later and in another thread.

Note: [immortal handler]
    An array may outlive every Python object, so the handler's structure, its
    counters and the name of its capsule live in C memory that is never freed.
    Each array holds a reference to the capsule: once there is none but our own, no
    array is left, and the next counter takes the memory over.
    At exit the compiled code goes away before the last arrays do: an ``atexit``
    function points the structure to C functions instead, with NULL as their
    first argument. ``labs(NULL)`` returns NULL: as ``free`` it leaks, as
    ``calloc`` and ``realloc`` it refuses. ``realloc(NULL, size)`` is ``malloc``.

Note: [pages of small blocks]
    The C library's heap gives its top back as soon as 128 KiB of it are free, and each
    iteration would touch these pages anew: a small language model then has 1,900 page
    faults an iteration, 8 of 102 ms. A program that frees an array of its own mapping
    raises that to twice its size (glibc, ``M_TRIM_THRESHOLD``); here such arrays come
    from slabs, so one block is freed for this alone.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy

from chainer_hybridmem.training.devices import counting, slab
from chainer_hybridmem.training.devices.host import counter_words as words
from chainer_hybridmem.training.devices.host import native_handler
from chainer_hybridmem.training.devices.host.native_pages import (
    drop_slab,
    release_holes,
)

try:
    from numpy._core import (  # type: ignore[attr-defined,unused-ignore]
        _multiarray_umath,
        multiarray,
    )
except ImportError:  # NumPy 1.x
    from numpy.core import (  # type: ignore[attr-defined,no-redef,unused-ignore]
        _multiarray_umath,
        multiarray,
    )

NAME = 'chainer_hybridmem'
_SLOTS = 304, 305  # PyDataMem_SetHandler, _GetHandler in numpy/_core/code_generators
_SLABS = words.SIDE, words.ARENA
_KEPT = (  # when memory is taken over
    counting.NEXT_ID,
    counting.LOG,
    counting.LOG_CAPACITY,
    words.SIDE + slab.HOLES,
    words.ARENA + slab.HOLES,
)
_libc = ctypes.PyDLL(None)
_RAISING_BYTES = 4 << 20  # the heap keeps at most twice as much


class Functions(ctypes.Structure):
    """What NumPy calls, each with ``ctx`` as its first argument."""

    _fields_ = (
        ('ctx', ctypes.c_void_p),
        ('malloc', ctypes.c_void_p),
        ('calloc', ctypes.c_void_p),
        ('realloc', ctypes.c_void_p),
        ('free', ctypes.c_void_p),
    )


class _Handler(ctypes.Structure):
    _fields_ = (
        ('name', ctypes.c_char * 127),
        ('version', ctypes.c_uint8),
        ('allocator', Functions),
    )


class MemoryOwner(Protocol):
    """Reads and writes the words of a memory."""

    def keep_figures(self) -> None:
        """Another owner gets the memory: keeps the last figures elsewhere."""


class NumpyMemory:
    """What arrays may still need of a counter; see Note: [immortal handler].

    Attributes:
        address (int): Of the counter's words.
        number (int): Of this memory; ids begin with it.
        words (ctypes array): The counter's words.
        capsule: What NumPy takes a handler from.
    """

    def __init__(self, number: int) -> None:
        self.address = slab.immortal(8 * words.FIELDS)
        self.number = number
        self.words = (ctypes.c_int64 * words.FIELDS).from_address(self.address)
        self.words[counting.NEXT_ID // 8] = (number << counting.ID_BITS) + 1
        self.words[counting.LOG_CAPACITY // 8] = counting.FIRST_LOG_ENTRIES
        self.words[counting.LOG // 8] = slab.immortal(16 * counting.FIRST_LOG_ENTRIES)
        for place in _SLABS:
            holes = slab.immortal(slab.HOLE_BYTES * slab.MOST_HOLES)
            self.words[(place + slab.HOLES) // 8] = holes
        self._handler = _make_handler(_native_functions(self.address))
        self.capsule = _make_capsule(self._handler)
        _keep_heap()
        self._owner: weakref.ref[MemoryOwner] | None = None
        self._unused = sys.getrefcount(self.capsule)

    @property
    def idle(self) -> bool:
        """Whether no array, context or open counter is left that needs it."""
        return sys.getrefcount(self.capsule) == self._unused

    @property
    def functions(self) -> Functions:
        """What NumPy calls for the arrays of this memory."""
        return Functions.from_buffer_copy(self._handler.allocator)

    def call(self, functions: Functions) -> None:
        """From now on NumPy calls these functions for the arrays of this memory."""
        ctypes.memmove(
            ctypes.addressof(self._handler) + _Handler.allocator.offset,
            ctypes.addressof(functions),
            ctypes.sizeof(Functions),
        )

    def hand_to(self, owner: MemoryOwner) -> None:
        """Makes an owner the one that reads and writes the words."""
        self._owner = weakref.ref(owner)

    def renew(self) -> None:
        """Makes everything as in the beginning, but ids go on."""
        former = self._owner() if self._owner is not None else None
        if former is not None:
            former.keep_figures()
        for place in _SLABS:
            drop_slab(self.address, place)
        renewed = type(self.words)()
        for field in _KEPT:
            renewed[field // 8] = self.words[field // 8]
        # At once: Ctrl-C must not leave the handler without its log and its holes.
        ctypes.memmove(self.address, renewed, ctypes.sizeof(renewed))

    def lift_limit(self) -> None:
        """Refuses nothing any more, and gives the pages of holes back."""
        self.words[words.LIMITED // 8] = 0
        release_holes(self.address, 0)


_memories: list[NumpyMemory] = []


def take_memory() -> NumpyMemory:
    """Memory that no array needs any more, or new memory."""
    for memory in _memories:
        if memory.idle:
            memory.renew()
            return memory
    memory = NumpyMemory(len(_memories))
    _memories.append(memory)
    return memory


def counted(array: numpy.ndarray) -> bool:
    """Whether an array that owns its data got it from one of our handlers."""
    return multiarray.get_handler_name(array) == NAME


def installed() -> bool:
    """Whether one of our handlers serves the current context."""
    return multiarray.get_handler_name() == NAME


def _native_functions(counter: int) -> Functions:
    return Functions(
        counter,
        native_handler.on_malloc.address,
        native_handler.on_calloc.address,
        native_handler.on_realloc.address,
        native_handler.on_free.address,
    )


def _keep_heap() -> None:
    """See Note: [pages of small blocks]."""
    _libc.malloc.restype, _libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    _libc.free(_libc.malloc(ctypes.c_size_t(_RAISING_BYTES)))


def _make_handler(functions: Functions) -> _Handler:
    handler = _Handler.from_address(slab.immortal(ctypes.sizeof(_Handler)))
    made = _Handler(NAME.encode(), 1, functions)
    ctypes.memmove(
        ctypes.addressof(handler), ctypes.addressof(made), ctypes.sizeof(_Handler)
    )
    return handler


def _make_capsule(handler: _Handler) -> Any:
    name = slab.immortal(16)
    ctypes.memmove(name, b'mem_handler', 11)
    new = ctypes.PYFUNCTYPE(
        ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    )(('PyCapsule_New', ctypes.pythonapi))
    return new(ctypes.addressof(handler), name, None)


def serves() -> bool:
    """Whether an open counter counts the allocations of the current context."""
    capsule = _get_handler()
    return any(
        memory.capsule is capsule and memory.words[words.LIMITED // 8]
        for memory in _memories
    )


def _find_functions() -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ('PyCapsule_GetPointer', ctypes.pythonapi)
    )
    table = ctypes.cast(
        get(_multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p)
    )
    setter, getter = (table[slot] for slot in _SLOTS)
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
    return prototype(setter), ctypes.PYFUNCTYPE(ctypes.py_object)(getter)


# Of the current context; the first one returns the former handler.
set_handler, _get_handler = _find_functions()


def _make_harmless() -> None:
    """At exit; see Note: [immortal handler]."""
    if installed():
        set_handler(ctypes.py_object())  # NULL: NumPy's own
    leak = ctypes.cast(_libc.labs, ctypes.c_void_p).value
    malloc = ctypes.cast(_libc.realloc, ctypes.c_void_p).value
    for memory in _memories:
        memory.call(Functions(None, malloc, leak, leak, leak))


def _forget_parent() -> None:
    """A forked child has no copy threads: it goes back to NumPy's handler.

    Arrays stay where they are. The pages of holes go: else the parent would get
    new ones for what it writes there, beyond its limit.
    """
    if installed():
        set_handler(ctypes.py_object())
    for memory in _memories:
        memory.lift_limit()


atexit.register(_make_harmless)
os.register_at_fork(after_in_child=_forget_parent)
