"""Compiled functions with a cache on disk where one can be written.

The first use of a function on a machine compiles it, which takes seconds; the
cache makes that once per installation. A read-only installation without a
home directory compiles in every process instead of failing.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from numba.core import cgutils, event
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUTargetOptions
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.sigutils import normalize_signature
from numba.core.types.misc import unliteral

from chainer_hybridmem import timing
from chainer_hybridmem.compiling import CompileTime

if numba.config.DISABLE_JIT:
    raise ImportError(
        'NUMBA_DISABLE_JIT is set in the environment, but numba is to compile what '
        'counts memory and what plans; unset it for this program.'
    )
IMPORTING = '<frozen importlib'  # how names of the import system's files begin
_ours: set[Callable[..., Any]] = set()
Function = TypeVar('Function', bound=Callable[..., Any])


def compiled(
    *signature: Any,
    uses: Sequence[ModuleType] = (),
    nogil: bool = False,
    inline: bool = False,
    apart: bool = False,
    counted: bool = True,
) -> Callable[[Function], Function]:
    """Decorates a function to be compiled, for one signature or any.

    If Python calls it, it returns numbers, or a tuple of numbers: arrays and named
    tuples are made by instructions of Python, inside which Ctrl-C would end in a
    ``SystemError`` or crash the process. Results go into arrays that it is given. And
    it takes less than a second, for which Ctrl-C waits. See Note: [signals and native
    code] in :mod:`.interrupts`.

    Args:
        signature: Numba's; none compiles for whatever types come.
        uses: Modules whose compiled functions this one calls. The cache of numba
            looks at the file of the function itself only: without this, the
            code of an older version of those would stay inside.
        nogil: Whether other threads may run Python meanwhile. Arrays made inside
            are numba's own: no memory handler is asked for them.
        inline: Whether it becomes part of every function that calls it, and Python
            cannot call it. A call hands over each array as five numbers and more: with
            dozens of arrays that takes longer than a short function.
        apart: Whether functions that call it have no copy of it: they find it by its
            address. numba compiles a copy for each of them, and for each that calls
            those in turn, which takes as long as the function itself. It has one
            signature, and is compiled when it is called, or what calls it is.
        counted: Whether numba counts references to arrays. A function that makes no
            array needs none; counting dozens of them takes longer than a short
            function, and every part of it that is inlined counts again.
    """

    def decorate(function: Function) -> Function:
        _ours.add(function)
        options = {'nogil': nogil, 'forceinline': inline}
        # Each wrapper has a copy of what is inlined, which takes as long to compile.
        options |= {'no_cfunc_wrapper': True, 'no_cpython_wrapper': inline}
        if not counted and hasattr(CPUTargetOptions, '_nrt'):
            options['_nrt'] = False
        try:
            dispatcher, cached = numba.njit(cache=True, **options)(function), True
        except RuntimeError:  # nowhere to write a cache
            types_ = () if apart else signature
            dispatcher, cached = numba.njit(*types_, **options)(function), False
        dispatcher.__class__ = _Inlined if inline else _Apart if apart else _Compiled
        if apart:
            dispatcher.declare(*signature)
        if not cached:
            return cast(Function, dispatcher)
        _Cache.adopt(dispatcher, uses)
        if apart:
            return cast(Function, dispatcher)
        for types_ in signature:  # only now, or the cache is asked too early
            dispatcher.compile(types_)
        if signature:
            dispatcher.disable_compile()
        return cast(Function, dispatcher)

    return decorate


def _without_callers(compile_: Callable[..., Any], *args: Any) -> Any:
    """Does what compiles in a thread of its own, whose frames have no callers.

    What numba compiles leaves cycles of references, with frames in them and so with all
    frames that have called it: arrays of the program would stay until garbage is
    collected. A thread that imports a module would wait for itself, as numba imports.
    """
    if global_compiler_lock.is_locked() or _is_importing():
        return compile_(*args)
    with concurrent.futures.ThreadPoolExecutor(1, 'compiler') as pool:
        try:
            result = pool.submit(compile_, *args)
        except RuntimeError:  # the interpreter ends
            return compile_(*args)
        return result.result()


def _is_importing() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(IMPORTING):
        frame = frame.f_back
    return frame is not None


class _Compiled(CPUDispatcher):
    """One that is not compiled again for each number or bool in the code of a call.

    What a bool decides about is not worth it: an evaluation is no faster without.
    """

    def compile(self, sig: Any) -> Any:
        return _without_callers(self._compile, sig)

    def _compile(self, sig: Any) -> Any:
        for function in _found_apart(self.py_func):  # a cache knows nothing of them
            function.make_ready()
        return super().compile(sig)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template(
            tuple(map(unliteral, args)),
            {name: unliteral(kind) for name, kind in kws.items()},
        )


class _Inlined(_Compiled):
    """There is nothing that Python could call: it would crash."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f'{self.py_func.__name__} is inlined: Python cannot call it')


class _Apart(_Compiled):
    """One that is called by its address, which stands in a cell that has a name."""

    def declare(self, signature: Any) -> None:
        _declared.append(self)
        self._declared = signature
        self._cell = np.zeros(1, np.int64)
        # Never freed: at exit the last arrays die after all modules.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._cell))
        self._cell_name = f'{self.py_func.__module__}.{self.py_func.__name__}.address'
        llvm.add_symbol(self._cell_name, self._cell.ctypes.data)

    def make_ready(self) -> None:
        """Compiles it, or finds it in the cache."""
        if not self._cell[0]:
            _without_callers(self._make_ready)

    def _make_ready(self) -> None:
        with global_compiler_lock:  # several threads may be about to call it
            if not self._cell[0]:
                self.compile(self._declared)
                self.disable_compile()

    def _compile(self, sig: Any) -> Any:
        entry = super()._compile(sig)
        made = self.overloads[normalize_signature(sig)[0]]
        self._cell[0] = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
        self.targetctx.remove_user_function(entry)
        call: Any = functools.partial(_call_by_address, self._cell_name, made.fndesc)
        call.signature = made.fndesc.argtypes
        call.libs = ()
        self.targetctx._defns[entry].append(call, call.signature)
        return entry

    def _compile_for_args(self, *args: Any, **kwargs: Any) -> Any:
        """What numba calls: a first call makes it ready, others have other types."""
        self.make_ready()
        (made,) = self.overloads.values()
        given = [self.typeof_pyval(arg) for arg in args]
        pairs = zip(given, made.signature.args, strict=False)
        fits = all(self.typingctx.can_convert(*pair) is not None for pair in pairs)
        if kwargs or len(given) != len(made.signature.args) or not fits:
            raise TypeError(
                f'{self.py_func.__name__} takes {made.signature.args}, not {given}'
            )
        return made.entry_point

    def get_call_template(self, args: Any, kws: Any) -> Any:
        self.make_ready()
        return super().get_call_template(args, kws)


_declared: list[_Apart] = []


def make_ready(*functions: Any) -> None:
    """Compiles functions apart, or finds them in the cache, before they are called."""
    for function in functions:
        function.make_ready()


def make_all_ready() -> int:
    """Makes all functions apart ready of the modules that are imported; how many."""
    make_ready(*_declared)
    return len(_declared)


def _call_by_address(
    cell: str, callee: Any, context: Any, builder: Any, sig: Any, args: Any
) -> Any:
    """As numba calls what is compiled, at the address that stands in a cell."""
    word = ir.IntType(64)
    place = builder.module.globals.get(cell)
    if place is None:
        place = ir.GlobalVariable(builder.module, word, cell)
    convention = context.call_conv
    kind = convention.get_function_type(callee.restype, callee.argtypes)
    function = builder.inttoptr(builder.load(place), kind.as_pointer())
    status, result = convention.call_function(
        builder, function, callee.restype, callee.argtypes, args
    )
    with cgutils.if_unlikely(builder, status.is_error):
        convention.return_status_propagate(builder, status)
    return result


def _found_apart(function: Callable[..., Any]) -> Iterator[_Apart]:
    """The functions apart that a function calls, or another compiled into it."""
    names = function.__code__.co_names
    for name in names:
        value = function.__globals__.get(name)
        values = [value]
        if isinstance(value, ModuleType):
            values += [getattr(value, part, None) for part in names]
        for value in values:
            if isinstance(value, _Apart):
                yield value
            elif isinstance(value, _Compiled) and value.py_func is not function:
                yield from _found_apart(value.py_func)


class _Listener(event.Listener):
    """Is told when numba compiles; what it finds in its cache does not count."""

    def __init__(self) -> None:
        self._compile_time = CompileTime()

    @property
    def seconds(self) -> float:
        return self._compile_time.seconds

    def on_start(self, event: Any) -> None:
        if event.data['dispatcher'].py_func in _ours:
            self._compile_time.begin()

    def on_end(self, event: Any) -> None:
        if event.data['dispatcher'].py_func in _ours:
            self._compile_time.end()


_listener = _Listener()
event.register('numba:compile', _listener)


def compiling_seconds() -> float:
    """How long this process has been compiling, as on the first run on a machine."""
    return _listener.seconds


def clock() -> float:
    """Seconds of a clock that stands still while functions are compiled."""
    return timing.now() - compiling_seconds()


@functools.cache
def _digest(module: ModuleType) -> str:
    """Of a module's source; dozens of functions use the same ones."""
    source = pathlib.Path(str(module.__file__)).read_bytes()
    return hashlib.sha256(source).hexdigest()


class _Index(IndexDataCacheFile):
    """One that another version of the sources may have written.

    numba reads the types in it before it compares versions, and a type may be gone.
    """

    def _load_index(self) -> dict[Any, str]:
        try:
            return cast(dict[Any, str], super()._load_index())
        except (AttributeError, ImportError):
            return {}


class _Cache(FunctionCache):
    """One whose code depends on other modules, and is loaded without the compiler.

    numba would import all that it can compile first, which takes longer than to load
    all functions. What it compiles, it prepares itself for once more.
    """

    @classmethod
    def adopt(cls, made: Any, uses: Sequence[ModuleType]) -> None:
        """Makes it the cache of what numba has made with one of its own.

        Args:
            made: A dispatcher or a callback.
            uses: As for :func:`compiled`.
        """
        made._cache.__class__ = cls
        index = made._cache._cache_file
        index.__class__ = _Index
        index._source_stamp = (index._source_stamp, *map(_digest, uses))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)


def callback(
    signature: Any, uses: Sequence[ModuleType] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function to be called from C code, at its ``address``.

    Args:
        signature: Numba's.
        uses: As for :func:`compiled`.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        for one in _found_apart(function):
            one.make_ready()
        made = CFunc(function, normalize_signature(signature), {}, {})
        try:
            made.enable_caching()
        except RuntimeError:  # nowhere to write a cache
            pass
        else:
            _Cache.adopt(made, uses)
        made.compile()
        return made

    return decorate
