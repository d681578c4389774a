"""``hybridmem estimate``."""

import json
import sys

import pytest

from chainer_hybridmem.commands import networks, samples
from chainer_hybridmem.planning.planners import DEFAULT
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.training.devices import ram

GPU = ('--gpu', 'v100-16gb-pcie3')


@pytest.fixture
def estimate(network, hybridmem):
    """Runs the command and returns its figures."""

    def run(*arguments):
        status, out, err = hybridmem('estimate', *network, *arguments, '--json', '-')
        assert out, err
        figures = json.loads(out)
        rows = figures['methods']
        fits = any(row['fits'] for row in rows)
        assert status == (0 if fits else 1), err
        return figures

    return run


def rows(figures):
    return {row['planner']: row for row in figures['methods']}


def test_a_gpu_that_is_not_there(network, hybridmem):
    arguments = ('estimate', *network, '--batchsize', '4096', *GPU)
    status, out, err = hybridmem(*arguments, '-o', 'p.json', '--json', 'e.json')
    assert status == 0, err
    assert 'Tiny, 2 pictures' in err and 'Tiny, 4 pictures' in err
    assert out.startswith('own_networks:Tiny, 4096 pictures of 16x16 on Tesla V100')
    with open('e.json') as file:
        figures = json.load(file)
    profile = library.load_profile('p.json')
    problem = make_problem(profile)
    assert profile.device['model'] == 'v100-16gb-pcie3'
    assert profile.operations[0].specs[0] == 'float32[4096,3,16,16]'
    assert figures['memory_limit_bytes'] == 16 * 10**9
    assert figures['in_core_peak_bytes'] == problem.in_core_peak_bytes
    assert list(rows(figures)) == ['in-core', 'swap-all', DEFAULT]
    for row in figures['methods']:
        assert row['fits'] and row['images_per_second'] > 0
    assert rows(figures)['in-core']['overhead'] == 0
    assert hybridmem('compare', 'p.json', '--memory-limit', '90%')[0] == 0


def test_out_of_core(estimate, hybridmem, network):
    arguments = ('--batchsize', '512', *GPU, '--memory-limit', '60%')
    figures = estimate(*arguments, '--planner', 'superneurons')
    found = rows(figures)
    assert list(found) == ['in-core', 'swap-all', 'superneurons']
    assert not found['in-core']['fits']
    swap_all = found['swap-all']
    seconds, bound = swap_all['iteration_seconds'], swap_all['lower_bound_seconds']
    assert 0 < bound <= seconds
    assert swap_all['gap'] == pytest.approx(seconds / bound - 1)
    assert found['in-core']['images_per_second'] is None
    assert found['swap-all']['fits']
    _, out, err = hybridmem('estimate', *network, *arguments)
    assert 'does not fit' in out and 'recording' not in err
    assert 'bound' in out and 'gap' in out


def test_convolution_through_patches_needs_more(estimate):
    cudnn, im2col = (
        estimate('--batchsize', '1024', *GPU, '--convolution', name)
        for name in ('cudnn', 'im2col')
    )
    assert cudnn['in_core_peak_bytes'] < im2col['in_core_peak_bytes']
    assert cudnn['in_core_seconds'] < im2col['in_core_seconds']


def test_calibration(estimate, hybridmem, network):
    measured = ('--images-per-second', '1000', '--calibrate-batch', '32')
    figures = estimate('--batchsize', '32', *GPU, *measured)
    assert figures['in_core_images_per_second'] == pytest.approx(1000)
    assert figures['device']['calibration']['batchsize'] == 32
    _, out, _ = hybridmem('estimate', *network, '--batchsize', '32', *GPU, *measured)
    assert '1000 images/s at batch size 32' in out


def test_on_the_device_of_the_recording(estimate):
    figures = estimate('--batchsize', '64', '--memory-limit', '1GB')
    assert figures['gpu'] is None
    assert figures['device']['convolution'] == 'recorded'
    assert all(row['fits'] for row in figures['methods'])
    if not compat.cuda_available():
        figures = estimate('--batchsize', '64')
        assert figures['memory_limit_bytes'] == ram.total_ram()


def test_samples_are_kept(network, hybridmem, refused):
    base = ('estimate', *network, '--batchsize', '64', *GPU)
    assert 'recording' in hybridmem(*base)[2]
    assert hybridmem(*base)[2] == ''
    kept, pair = samples.load('s.json')
    assert (kept.arch, kept.insize, kept.n_class) == ('own_networks:Tiny', 16, 10)
    assert pair.batchsizes == (2, 4)
    assert 'at 32x32' in refused(*base, '--insize', '32')
    with open('s.json', 'w') as file:
        file.write('{}')
    assert "'chainer_hybridmem/samples' was expected" in refused(*base)


def test_other_samples(estimate):
    figures = estimate('--batchsize', '9', *GPU, '--sample-batches', '3', '5')
    assert figures['device']['sample_batchsizes'] == [3, 5]


@pytest.mark.parametrize(
    'arguments, expected',
    [
        (('--gpu', 'v100'), 'no device model'),
        (('--gpu', 'nothing.json'), 'cannot be read'),
        ((*GPU, '--planner', 'nobody'), "no planner 'nobody'"),
        ((*GPU, '--images-per-second', '5'), '--calibrate-batch'),
        ((*GPU, '--sample-batches', '4', '2'), 'ascending'),
        ((*GPU, '-o', 'nowhere/p.json'), 'no folder'),
        ((*GPU, '--arch', 'resnet'), 'Unknown architecture'),
        ((*GPU, '--arch', '.:Net'), 'write module:Class'),
        ((*GPU, '-o', 's.json'), 'what the command reads'),
        ((*GPU, '--batchsize', 10**12), 'out of range'),
        (('--memory-limit', '1GB', '--convolution', 'cudnn'), 'needs a device model'),
    ],
)
def test_one_clear_sentence(arguments, expected, network, refused, monkeypatch):
    """Before anything is recorded."""
    monkeypatch.setattr(networks.Network, 'ask', None)
    assert expected in refused('estimate', *network, '--batchsize', '8', *arguments)


def test_a_network_that_depends_on_the_batch_size(network, hybridmem):
    status, out, err = hybridmem(
        *(
            'estimate',
            *network,
            '--arch',
            'own_networks:Picky',
            '--batchsize',
            '8',
            *GPU,
        )
    )
    assert status == 1 and out == ''
    assert 'The two sample iterations differ' in err.splitlines()[-1]


@pytest.mark.parametrize(
    'arguments',
    [
        (),
        ('--batchsize', '0'),
        ('--batchsize', '8', '--convolution', 'winograd'),
        ('--batchsize', '8', '--images-per-second', 'many'),
        ('--batchsize', '8', '--memory-limit', 'much'),
    ],
)
def test_usage(arguments, network, hybridmem):
    assert hybridmem('estimate', *network, *arguments)[0] == 2


def test_rules(estimate):
    figures = estimate(
        *('--batchsize', '4096', *GPU, '--memory-limit', '2GB'),
        *('--rule', 'Tanh=swap'),
    )
    found = rows(figures)
    assert "'in-core' cannot obey the rules" in found['in-core']['reason']
    assert found[DEFAULT]['fits']
    assert found[DEFAULT]['swap'] >= 4
    (cost,) = figures['rules']
    assert (cost['pattern'], cost['says'], cost['maps']) == ('Tanh', 'swap', 4)
    assert cost['seconds'] is not None


OTHER_NETWORKS = """
from own_networks import *


class Ten(Tiny):
    def __init__(self):
        super().__init__(10)


class Alone(Tiny):
    def forward(self, x):
        return self.conv(x)


class Lossless(Tiny):
    def forward(self, x, t):
        return self.conv(x)


class Plain(Tiny):
    def forward(self, x, t):
        return 1.0


class Wider(Tiny):
    def __init__(self, width):
        super().__init__(10)
"""


@pytest.mark.parametrize(
    ('name', 'messages'),
    [
        ('Ten', ['labels from 0 to 999', 'named with --n-class']),
        ('Alone', ['takes 2 positional', 'is called with pictures and labels']),
        ('Lossless', ['a scalar loss is needed, and its shape is (2, 8, 16, 16)']),
        ('Plain', ['a loss is needed, and a float was returned']),
        ('Wider', ["Wider(width): missing a required argument: 'width'", 'n_class']),
    ],
)
def test_a_class_of_ones_own_that_does_not_work(
    name, messages, network, folder, monkeypatch, hybridmem
):
    (folder / 'other_networks.py').write_text(OTHER_NETWORKS)
    monkeypatch.delitem(sys.modules, 'other_networks', raising=False)
    status, _, err = hybridmem(
        *('estimate', '--arch', f'other_networks:{name}', '--batchsize', '8', *GPU)
    )
    assert status == 1
    for message in messages:
        assert message in err.splitlines()[-1]
