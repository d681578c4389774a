"""Shared by all tests; see also toys.py and networks.py in this folder."""

from __future__ import annotations

import pytest

from chainer_hybridmem import compat  # makes Chainer importable, so before it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` where there is none."""
    if compat.cuda_available():
        return
    skip = pytest.mark.skip(reason='needs a CUDA GPU, and CuPy finds none here')
    for item in items:
        if 'gpu' in item.keywords:
            item.add_marker(skip)
