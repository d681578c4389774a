"""Shared by the tests of sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hostile import late_copies, poisoned_memory


@pytest.fixture
def hostile() -> Iterator[None]:
    """Freed memory is full of NaN, and copies are late by chance."""
    with poisoned_memory(), late_copies(0, (0, 0, 0.002, 0.01)):
        yield
