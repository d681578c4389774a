"""Where the arrays of a model are."""

from __future__ import annotations

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.links as L
import pytest

from chainer_hybridmem.training.chainer_access.models import device_of


class Elsewhere:
    """A device of which a machine without a GPU needs only the name."""

    def __init__(self, name):
        self.name = name

    def __str__(self):
        return self.name


def chain(*names):
    """A model on the host, with a layer on each device."""
    model = chainer.Chain()
    with model.init_scope():
        for i, name in enumerate(names):
            layer = L.Linear(2, 2)
            layer._device = Elsewhere(name)
            setattr(model, f'layer{i}', layer)
    return model


def test_the_only_device_of_the_layers_counts():
    assert str(device_of(chain('@cupy:1', '@cupy:1'))) == '@cupy:1'


@pytest.mark.parametrize('names', [('@numpy', '@cupy:0'), ()])
def test_the_device_of_the_model_counts_where_it_has_layers(names):
    model = chain(*names)
    assert device_of(model) is model.device


def test_layers_on_several_devices_are_named():
    with pytest.raises(hybridmem.OptionError) as found:
        hybridmem.optimize(chain('@cupy:0', '@cupy:1', '@cupy:1'), '1MiB')
    for word in ("'/layer0' on @cupy:0", "'/layer1' on @cupy:1", 'itself is on @numpy'):
        assert word in str(found.value)
