"""Compilation with and without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chainer_hybridmem import jit


def test_without_a_place_for_a_cache_it_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read-only installation, and no home directory to write to."""

    def njit(
        function: Any = None, cache: bool = False, forceinline: bool = False
    ) -> Callable[..., Any]:
        if function is not None:
            return lambda *arguments: ('compiled', function(*arguments))

        def refuse(function: Any) -> Any:
            raise RuntimeError('cannot cache function: no locator available')

        return refuse if cache else njit

    monkeypatch.setattr(jit.numba, 'njit', njit)
    assert jit.compiled()(lambda x: x + 1)(2) == ('compiled', 3)


def test_what_becomes_part_of_its_callers_does_the_same() -> None:
    """Called from Python, that is; inside the simulator every test checks it."""
    assert jit.compiled(inline=True)(_twice)(3) == 6
    assert jit.compiled(inline=False)(_twice)(3) == 6


def _twice(x: int) -> int:
    return 2 * x
