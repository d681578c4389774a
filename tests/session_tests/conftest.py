"""Shared by the tests of sessions."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from chainer_hybridmem.devices import copies
from chainer_hybridmem.devices.host import HostDevice


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory is full of NaN, and copies are late by chance."""
    install, execute = HostDevice.install, copies.CopyThread._execute
    chance = random.Random(0)

    def poisoned(self: HostDevice, reclaim: Callable[[int], None]) -> None:
        install(self, reclaim)
        self._counter.poison_freed(True)

    def late(self: copies.CopyThread, job: Any) -> None:
        time.sleep(chance.choice((0, 0, 0.002, 0.01)))
        execute(self, job)

    monkeypatch.setattr(HostDevice, 'install', poisoned)
    monkeypatch.setattr(copies.CopyThread, '_execute', late)
