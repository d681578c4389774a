import pytest

from chainer_hybridmem.errors import UnknownNameError
from chainer_hybridmem.training.devices import open_device


@pytest.mark.parametrize('name', ['cpu', 'host', '@numpy', 'CPU', None])
def test_host_names(name):
    device = open_device(name, 1000, link_bandwidth=5e6)
    assert device.kind == 'host'
    assert device.memory.limit_bytes == 1000
    assert device.describe()['link_bandwidth'] == 5e6
    device.close()


@pytest.mark.parametrize('name', ['tpu', 'cuda:', 'cuda:x', '-1', ''])
def test_unknown_names(name):
    with pytest.raises(UnknownNameError, match='cuda:N'):
        open_device(name, 1000)
