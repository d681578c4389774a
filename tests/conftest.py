"""Makes ``import toys`` work everywhere; skips GPU tests where there is no GPU."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` unless CuPy finds a GPU it can use."""
    marked = [item for item in items if item.get_closest_marker('gpu')]
    if not marked:
        return
    from chainer_hybridmem.compat import cuda_available

    if cuda_available():
        return
    skip = pytest.mark.skip(reason='needs CuPy and a CUDA GPU')
    for item in marked:
        item.add_marker(skip)
