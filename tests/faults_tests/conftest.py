"""What all tests of faults have in common."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from support import faulty


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """No test leaves a file or a thread behind."""
    files = faulty.open_files()
    yield
    assert faulty.open_files() <= files
    assert not faulty.copy_threads()


@pytest.fixture(autouse=True, scope='module')
def quick_collections() -> None:
    """Leaves out what was there before when garbage is collected in each case."""
    faulty.in_core()
    gc.collect()
    gc.freeze()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a terminal; jobs in the background start with it ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)
