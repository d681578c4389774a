"""Shared by the tests of sessions, which are on a machine of their own.

Neither how busy this computer is nor how its threads take turns makes a difference to
a test, unless it has the mark ``real_time``: for real threads, the real link, or the
real clock.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest
from support.hostile import late_copies, poisoned_memory
from support.virtual import Machine

from chainer_hybridmem.training.devices.copies import Copies
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.devices.host.memory import HostMemory


def _is_real(node: pytest.Item | pytest.Collector) -> bool:
    """Whether a test or module knows the real time; each GPU has a time of its own."""
    return any(node.get_closest_marker(name) for name in ('real_time', 'gpu'))


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine | None]:
    """What each test runs on; None for the computer itself."""
    if _is_real(request.node):
        yield None
        return
    with Machine().running() as machine:
        yield machine


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """What a module prepares for its tests, it prepares on a machine, too."""
    if fixturedef.scope == 'function' or _is_real(request.node):
        return (yield)
    with Machine().running():
        return (yield)


@pytest.fixture
def hostile(machine: Machine | None) -> Iterator[None]:
    """Freed memory is full of NaN, and copies are late by chance."""
    if machine is not None:
        machine.change(lateness=1000.0)
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
def hasty(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory is handed out while the copy of its contents still runs.

    The machine finds that, too.
    """
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
    yield
    assert any('freed in their copy' in fault for fault in machine.take_faults())
