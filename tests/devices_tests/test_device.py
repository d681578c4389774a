"""The suite that every device passes, for ours and for that of the virtual machine."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from support.device_suite import DeviceConformance
from support.virtual import Machine

from chainer_hybridmem.training.devices import open_device
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.devices.protocol import Device


class TestOurs(DeviceConformance):
    """Host copies in RAM, in a file and in both, and CUDA."""

    @pytest.fixture(
        params=['ram', 'file', 'tiers', pytest.param('cuda', marks=pytest.mark.gpu)]
    )
    def kind(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def device(self, kind: str, tmp_path: pathlib.Path) -> Device:
        if kind in ('ram', 'cuda'):
            return open_device({'ram': 'cpu'}.get(kind, kind), self.limit_bytes)
        host_limit = 2 << 20 if kind == 'tiers' else None
        return HostDevice(
            self.limit_bytes, swap_dir=str(tmp_path), host_limit_bytes=host_limit
        )

    @pytest.fixture
    def xp(self, kind: str) -> Any:
        return importlib.import_module('cupy') if kind == 'cuda' else numpy

    def test_by_how_much_host_memory_grows(self, kind: str, opened: Any) -> None:
        """Beyond a slab of 3 MiB, and what of it stays without copies."""
        grown, kept = {'ram': (5, 5), 'cuda': (4.5, 4.5)}.get(kind, (4, 3))
        device = opened.device
        opened.reserve(3 << 20)
        roots = [device.memory.allocate(1 << 20) for _ in range(4)]
        pairs = [device.copies.swap_out(root, None) for root in roots]
        for _, transfer in pairs:
            device.copies.wait(transfer)
        assert opened.host_bytes == grown * (1 << 20)
        device.clock.synchronize()
        for copy, _ in pairs:
            copy.close()
        assert opened.host_bytes == kept * (1 << 20)


class TestVirtual(DeviceConformance):
    """Copies take the time of a virtual machine, and each is watched by it."""

    # The machine says what its link is like: sessions do not measure it.
    test_measured_link_leaves_nothing_behind = None

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with Machine().running():
            yield HostDevice(self.limit_bytes)
