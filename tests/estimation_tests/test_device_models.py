"""Device models: those that come with the package, and those of a user."""

import json

import pytest

from chainer_hybridmem.errors import FormatError, UnknownNameError
from chainer_hybridmem.forecasting.estimation import load_device_model, model_names
from chainer_hybridmem.forecasting.estimation.costs import CLASSES, Cost
from chainer_hybridmem.forecasting.estimation.device_models import FORMAT, VERSION

LINK = {
    'latency_seconds': 0,
    'd2h_bytes_per_second': 1e9,
    'h2d_bytes_per_second': 2e9,
}
OWN = {
    'format': FORMAT,
    'version': VERSION,
    'name': 'mine',
    'flops_per_second': 1e12,
    'bytes_per_second': 1e11,
    'memory_bytes': 8e9,
    'link': LINK,
}


@pytest.fixture
def write(tmp_path):
    """Writes a model with some values changed; returns the path."""

    def write(**changes):
        body = {k: v for k, v in {**OWN, **changes}.items() if v is not None}
        path = tmp_path / 'mine.json'
        path.write_text(json.dumps(body))
        return str(path)

    return write


def test_the_models_that_are_promised():
    assert set(model_names()) >= {
        *('v100-16gb-pcie3', 'p100', 'gtx1080ti', 'titan-x', 'titan-v'),
        *('rtx3090', 'a100', 'h200'),
    }


@pytest.mark.parametrize('name', model_names())
def test_each_model(name):
    model = load_device_model(name)
    assert model.name == name
    assert 'NVIDIA' in model.source
    assert set(model.efficiency) == set(CLASSES)
    assert 10e9 < model.memory_bytes < 200e9
    # FLOPs per byte of memory, and memory per link: any GPU of the last ten years.
    assert 5 < model.flops_per_second / model.bytes_per_second < 50
    assert 20 < model.bytes_per_second / model.link.h2d_bytes_per_second < 200


def test_roofline():
    model = load_device_model('v100-16gb-pcie3')
    share, launch = model.efficiency['gemm'], model.kernel_seconds
    assert model.seconds(Cost('gemm', 15.7e12, 0, 2)) == pytest.approx(
        2 * launch + 1 / share
    )
    assert model.seconds(Cost('gemm', 15.7e12, 1800e9, 0)) == pytest.approx(2 / share)


def test_a_model_of_my_own(write):
    model = load_device_model(write(efficiency={'gemm': 0.5}))
    assert (model.name, model.memory_bytes) == ('mine', 8 * 10**9)
    assert model.link.h2d_bytes_per_second == 2e9
    assert model.efficiency['gemm'] == 0.5
    assert model.efficiency['pooling'] > 0  # the default
    assert model.convolution == 'cudnn'


def test_unknown_name():
    with pytest.raises(UnknownNameError) as caught:
        load_device_model('v100-16gb')
    message = str(caught.value)
    assert "Did you mean 'v100-16gb-pcie3'?" in message
    assert all(name in message for name in model_names())


def test_missing_file(tmp_path):
    with pytest.raises(FormatError, match='cannot be read'):
        load_device_model(str(tmp_path / 'nothing.json'))


@pytest.mark.parametrize(
    'changes, expected',
    [
        ({'format': 'else'}, "'chainer_hybridmem/device-model' was expected"),
        ({'version': 9}, '9'),
        ({'flops_per_second': None}, "'flops_per_second' is missing"),
        ({'link': None}, "'link' is missing"),
        ({'flops_per_second': 0}, 'flops_per_second is 0.0; it must be above zero'),
        ({'bytes_per_second': '900GB'}, "bytes_per_second is '900GB', not a number"),
        ({'memory_bytes': True}, 'memory_bytes is True, not a number'),
        ({'memory_bytes': -1}, 'memory_bytes is -1, not a size in bytes'),
        ({'kernel_seconds': -1e-6}, 'must not be below zero'),
        ({'kernel_seconds': float('nan')}, 'not a number'),
        ({'colour': 'green'}, "'colour' is not a value of it"),
        ({'convolution': 'winograd'}, "convolution is 'winograd'"),
        ({'efficiency': 0.5}, 'efficiency is 0.5, not an object'),
        ({'efficiency': {'gemm': 2}}, 'efficiency of gemm is 2, not in (0, 1]'),
        ({'efficiency': {'sorting': 1}}, "no class 'sorting'"),
        (
            {'link': {**LINK, 'd2h_bytes_per_second': 0}},
            'its link has d2h_bytes_per_second 0.0; it must be',
        ),
        ({'link': {'latency_seconds': 0}}, "its link has ['latency_seconds']"),
        ({'link': [1]}, 'link is [1], not an object'),
        ({'title': 5}, 'title is 5, not text'),
    ],
)
def test_files_that_cannot_be_used(changes, expected, write):
    with pytest.raises(FormatError) as caught:
        load_device_model(write(**changes))
    assert expected in str(caught.value)
