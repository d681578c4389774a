"""Shared by all tests; ``toys`` and ``networks`` in this folder are importable."""

from __future__ import annotations

import pytest

from chainer_hybridmem import compat  # makes Chainer importable, so before it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` unless CuPy finds a GPU it can use."""
    marked = [item for item in items if item.get_closest_marker('gpu')]
    if not marked or compat.cuda_available():
        return
    skip = pytest.mark.skip(reason='needs CuPy and a CUDA GPU')
    for item in marked:
        item.add_marker(skip)
