"""One fixture: every device that this machine has."""

import numpy
import pytest

from chainer_hybridmem.devices.host.device import HostDevice
from chainer_hybridmem.records.plan import Tier

LIMIT = 16 << 20


class Opened:
    """A device, its array module and the bytes ``reclaim`` was asked for."""

    def __init__(self, device, xp):
        self.device = device
        self.xp = xp
        self.asked = []
        self.give_up = lambda: None

    @property
    def host_bytes(self):
        """What host copies hold in all tiers."""
        return self.device.copies.host_bytes + self.device.copies.disk_bytes

    def reserve(self, nbytes):
        """Slabs of so many bytes in all, in RAM first."""
        ram = min(nbytes, self.device.copies.host_room(Tier.RAM))
        self.device.copies.reserve(ram, nbytes - ram)

    def reclaim(self, nbytes):
        self.asked.append(nbytes)
        self.give_up()


def _has_gpu():
    try:
        import cupy

        return bool(cupy.cuda.is_available())
    except Exception:
        return False


def _open(name, tmp_path):
    if name == 'cuda':
        if not _has_gpu():
            pytest.skip('no CUDA GPU')
        import cupy

        from chainer_hybridmem.devices.cuda.device import CudaDevice

        return Opened(CudaDevice(LIMIT), cupy)
    options = {} if name == 'ram' else {'swap_dir': str(tmp_path)}
    if name == 'tiers':
        options['host_limit_bytes'] = 2 << 20
    return Opened(HostDevice(LIMIT, **options), numpy)


@pytest.fixture(
    params=['ram', 'file', 'tiers', pytest.param('cuda', marks=pytest.mark.gpu)]
)
def opened(request, tmp_path):
    """An installed device; uninstalled and closed afterwards."""
    opened = _open(request.param, tmp_path)
    opened.device.memory.install(opened.reclaim)
    yield opened
    opened.device.memory.uninstall()
    opened.device.close()


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
