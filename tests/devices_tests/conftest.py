"""Host devices that are closed afterwards."""

import pytest

from chainer_hybridmem.training.devices.host.device import HostDevice

LIMIT = 16 << 20


@pytest.fixture
def open_host():
    """Opens and installs host devices; closes them afterwards."""
    devices = []

    def open_one(limit_bytes=LIMIT, install=True, **options):
        devices.append(HostDevice(limit_bytes, **options))
        if install:
            devices[-1].memory.install(lambda nbytes: None)
        return devices[-1]

    yield open_one
    for device in devices:
        device.memory.uninstall()
        device.close()


@pytest.fixture
def host(open_host):
    """An installed host device that swaps to memory."""
    return open_host()
