"""What all tests of faults have in common."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import faulty
import pytest

from chainer_hybridmem import session
from chainer_hybridmem.profile import Link


@pytest.fixture(autouse=True)
def known_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions are many and short: the link need not be measured in each."""
    link = Link(
        latency_seconds=1e-5, d2h_bytes_per_second=1e9, h2d_bytes_per_second=1e9
    )
    monkeypatch.setattr(session, 'measure_link', lambda device, **_: link)


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """No test leaves a file or a thread behind."""
    files = faulty.open_files()
    yield
    assert faulty.open_files() <= files
    assert not faulty.copy_threads()


@pytest.fixture(autouse=True, scope='module')
def quick_collections() -> Iterator[None]:
    """Leaves out what was there before when garbage is collected in each case."""
    faulty.in_core()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a terminal; jobs in the background start with it ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)
