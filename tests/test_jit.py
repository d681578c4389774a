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
        function: Any = None, cache: bool = False, **options: bool
    ) -> Callable[..., Any]:
        assert not any(options.values())
        if function is not None:
            return lambda *arguments: ('compiled', function(*arguments))

        def refuse(function: Any) -> Any:
            raise RuntimeError('cannot cache function: no locator available')

        return refuse if cache else njit

    monkeypatch.setattr(jit.numba, 'njit', njit)
    assert jit.compiled()(lambda x: x + 1)(2) == ('compiled', 3)
