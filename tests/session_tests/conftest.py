"""Shared by the tests of sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.hostile import late_copies, poisoned_memory

from chainer_hybridmem.devices.copies import Copies
from chainer_hybridmem.devices.host.device import HostDevice
from chainer_hybridmem.devices.host.memory import HostMemory


@pytest.fixture(autouse=True)
def unmeasured_link(known_link: None) -> None:
    """A session takes the link's speed as given, where it is not throttled.

    To measure it takes longer than the training of most tests. A module whose tests
    need a measured link has a fixture ``known_link`` of its own, which does nothing.
    """


@pytest.fixture
def hostile() -> Iterator[None]:
    """Freed memory is full of NaN, and copies are late by chance."""
    with poisoned_memory(), late_copies(0, (0, 0, 0.002, 0.01)):
        yield


@pytest.fixture
def device() -> Iterator[HostDevice]:
    """An installed device without a session, of 16 MiB."""
    device = HostDevice(1 << 24)
    device.memory.install(lambda nbytes: None)
    yield device
    device.memory.uninstall()
    device.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is handed out while the copy of its contents still runs."""
    swap_out, wait, uninstall = Copies.swap_out, Copies.wait, HostMemory.uninstall
    engines: set[Any] = set()

    def unheld(self: Copies, root: Any, copy: Any) -> Any:
        engines.add(self._engine)
        copy, transfer = swap_out(self, root, copy)
        transfer.root = None  # nothing keeps the memory any more
        return copy, transfer

    def orderly(self: HostMemory) -> None:
        for engine in engines:
            engine.finish()  # or the slab goes while threads read it
        uninstall(self)

    monkeypatch.setattr(Copies, 'swap_out', unheld)
    monkeypatch.setattr(HostMemory, 'uninstall', orderly)
    monkeypatch.setattr(
        Copies,
        'wait',
        lambda self, transfer: transfer.root is None or wait(self, transfer),
    )
