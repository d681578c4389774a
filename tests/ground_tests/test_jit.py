"""Compilation with and without a cache."""

from __future__ import annotations

import gc
import importlib
import os
import pathlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numba
import numpy as np
import pytest

from chainer_hybridmem import compiling, jit, timing

CHAIN = """
import sys
from numba import types
from chainer_hybridmem import jit
_i64 = types.int64

@jit.compiled(_i64(_i64), apart=True)
def add(x):
    return x + 1

@jit.compiled(inline=True)
def twice(x):
    return add(add(x))

@jit.compiled(_i64(_i64), apart=True)
def call(x):
    return twice(x) + 10

def compile_all():
    return call(2), jit.compiling_seconds(), 'numba.np.linalg' in sys.modules
"""


@pytest.fixture
def compile_time(monkeypatch: pytest.MonkeyPatch) -> compiling.CompileTime:
    """As at the beginning of a process that is told of everything."""
    fresh = compiling.CompileTime()
    monkeypatch.setattr(jit._listener, '_compile_time', fresh)
    monkeypatch.setattr(compiling, 'LEAST_SECONDS', 0.0)
    return fresh


def test_who_waits_for_a_compiler_is_told_once(
    compile_time: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, 'CACHE_DIR', str(tmp_path))  # of no former run
    outer: list[str] = []
    inner: list[str] = []
    with compiling.told(outer.append), compiling.told(inner.append):
        for i in range(2):

            @jit.compiled()
            def add(x: int) -> int:
                return x + i  # noqa: B023

            assert not inner or i
            assert add(2) == 2 + i
            assert len(inner) == 1 and inner[0].startswith('compiling')
            add(3)
    assert len(inner) == 1 and not outer


def test_what_does_not_take_long_is_not_told(
    compile_time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    clock = iter([0.0, 0.0, 0.3, 5.0, 5.0, 5.1, 6.0, 6.0, 6.3])
    monkeypatch.setattr(timing, 'now', lambda: next(clock))
    monkeypatch.setattr(compiling, 'LEAST_SECONDS', 0.5)
    with compiling.told(told.append):
        for _ in range(2):  # for 0.3 and 0.1 seconds
            compile_time.begin()
            compile_time.end()
        assert not told
        compile_time.begin()
        compile_time.begin()  # for it, after 0.3 more
        assert told


def test_nobody_is_told_of_what_others_compile(compile_time: Any) -> None:
    told: list[str] = []
    with compiling.told(told.append):
        assert jit.numba.njit(lambda x: x + 1)(2) == 3
    assert not told


def test_without_a_place_for_a_cache_it_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read-only installation, and no home directory to write to."""

    plain, refused = numba.njit, []

    def njit(cache: bool = False, **options: bool) -> Callable[..., Any]:
        def refuse(function: Any) -> Any:
            refused.append(function)
            raise RuntimeError('cannot cache function: no locator available')

        return refuse if cache else plain(**options)

    monkeypatch.setattr(jit.numba, 'njit', njit)
    made = jit.compiled()(lambda x: x + 1)
    assert made(2) == 3 and made.signatures and len(refused) == 1


def test_what_is_inlined_is_compiled_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper would have a copy of it, as long to compile as the function itself."""
    monkeypatch.setattr(numba.config, 'CACHE_DIR', str(tmp_path))  # of no former run

    @jit.compiled(inline=True)
    def add(x: int) -> int:
        return x + 1

    @jit.compiled()
    def call(x: int) -> int:
        return add(x) + add(1) + add(2)

    assert call(2) == 8
    for made, wrappers in ((add, set()), (call, {'cpython'})):
        (overload,) = made.overloads.values()  # type: ignore[attr-defined]
        code = overload.library.get_llvm_str()
        found = {
            name for name in ('cpython', 'cfunc') if f'_ZN{len(name)}{name}' in code
        }
        assert found == wrappers
    with pytest.raises(TypeError, match='add is inlined'):
        add(2)


def test_what_is_apart_is_in_no_copy(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, 'CACHE_DIR', str(tmp_path))  # of no former run
    (tmp_path / 'chain.py').write_text(CHAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    chain = importlib.import_module('chain')
    assert chain.compile_all()[0] == 14
    code = {
        name: overload.library.get_llvm_str()
        for name in ('add', 'call')
        for overload in getattr(chain, name).overloads.values()
    }
    (compiled,) = chain.add.overloads.values()
    name = compiled.fndesc.llvm_func_name
    assert name in code['add'] and name not in code['call']
    with pytest.raises(TypeError):
        chain.add('x')


def test_threads_make_a_function_apart_ready_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, 'CACHE_DIR', str(tmp_path))  # of no former run

    @jit.compiled(numba.int64(numba.int64), apart=True)
    def add(x: int) -> int:
        return x + 1

    together = threading.Barrier(4)

    def call(x: int) -> int:
        together.wait()
        return add(x)

    with futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(4))) == [1, 2, 3, 4]


TYPED = """
from typing import NamedTuple
from chainer_hybridmem import jit

class {name}(NamedTuple):
    number: int

@jit.compiled()
def number_of(pair):
    return pair.number

def call():
    return number_of({name}(7)), sum(number_of.stats.cache_hits.values())
"""


def test_a_cache_that_names_a_type_which_is_gone_counts_as_empty(
    tmp_path: pathlib.Path,
) -> None:
    """An upgrade leaves it behind."""
    hits = []
    for name in ('Former', 'Former', 'Other', 'Other'):  # lengths tell bytecode apart
        (tmp_path / 'typed.py').write_text(TYPED.format(name=name))
        made = subprocess.run(
            [sys.executable, '-c', 'import typed; print(*typed.call())'],
            cwd=tmp_path,
            env={**os.environ, 'NUMBA_CACHE_DIR': str(tmp_path / 'cache')},
            capture_output=True,
            text=True,
            check=True,
        )
        number, found = made.stdout.split()
        assert number == '7'
        hits.append(int(found))
    assert hits == [0, 1, 0, 1]


def test_a_process_that_finds_functions_in_the_cache_needs_no_compiler(
    tmp_path: pathlib.Path,
) -> None:
    """Nor a function apart that is called by one of them; it may call what it finds."""
    (tmp_path / 'chain.py').write_text(CHAIN)
    cache = tmp_path / 'cache'
    for cached in (False, True, False):
        made = subprocess.run(
            [sys.executable, '-c', 'import chain; print(*chain.compile_all())'],
            cwd=tmp_path,
            env={**os.environ, 'NUMBA_CACHE_DIR': str(cache)},
            capture_output=True,
            text=True,
            check=True,
        )
        result, seconds, compiler = made.stdout.split()
        assert result == '14'
        assert (float(seconds) == 0, compiler) == (cached, str(not cached))
        if cached:
            (index,) = cache.rglob('chain.call-*.nbi')
            index.unlink()  # for the last one


class Held:
    """What a program has while something is compiled."""


def test_compiling_keeps_nothing_of_those_who_have_called():
    """Not even until garbage is collected: it may be an array."""
    names: dict[str, Any] = {'np': np}
    body = 'a = np.zeros((3, 4))\n    a[x % 3, :] += 2\n    return a[0, 0]'
    exec(f'def fill(x):\n    {body}', names)  # there is no file to cache
    fill = jit.compiled()(names['fill'])

    def call() -> weakref.ref[Held]:
        held = Held()
        assert fill(3) == 2
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        reference = call()
        assert fill.overloads and reference() is None
    finally:
        gc.enable()


def test_who_waits_for_what_is_compiled_gets_its_error():
    names: dict[str, Any] = {}
    exec('def fail(x):\n    return x.nothing', names)
    with pytest.raises(numba.TypingError, match='nothing'):
        jit.compiled()(names['fail'])(2)
