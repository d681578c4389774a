"""``hybridmem profile``."""

import json
import os

import pytest

from chainer_hybridmem.commands import base
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.chainer_access import compat


@pytest.fixture
def arguments(trained):
    """A command line that records a tiny network; the last option given counts."""
    return (
        *('profile', '--arch', 'trained_networks:Tiny', '--batchsize', '16'),
        *('--n-class', '10', '--device', 'cpu', '--memory-limit', '16MiB'),
        *('-o', 'p.json'),
    )


def test_records_and_summarises(arguments, hybridmem):
    status, out, err = hybridmem(*arguments, '--json', 's.json')
    assert status == 0, err
    assert 'iteration 1 (warm-up)' in err  # progress
    profile = library.load_profile('p.json')
    problem = make_problem(profile)
    with open('s.json') as file:
        figures = json.load(file)
    assert out.startswith('trained_networks:Tiny, 16 pictures of 8x8\n')
    assert figures['arch'] == 'trained_networks:Tiny'
    assert figures['insize'] == 8
    assert sum(figures['operations'].values()) == len(profile.operations)
    assert figures['feature_maps'] == len(problem.maps) > 5
    assert figures['in_core_peak_bytes'] == problem.in_core_peak_bytes
    assert 0 < figures['least_memory_bytes'] < problem.in_core_peak_bytes
    assert sum(figures['seconds'].values()) == pytest.approx(profile.compute_seconds)
    assert figures['link']['h2d_bytes_per_second'] > 0
    assert figures['bytes_by_category']['feature map'] > 0
    assert hybridmem('plan', 'p.json', '--memory-limit', '90%')[0] == 0


def test_batch_counts(arguments, hybridmem):
    hybridmem(*arguments)
    profile = library.load_profile('p.json')
    pictures = 16 * 3 * 8 * 8 * 4
    assert profile.initial_bytes >= pictures


def test_named_architecture_and_throttled_link(arguments, hybridmem):
    status, out, err = hybridmem(
        *arguments,
        *('--arch', 'alexnet', '--insize', '67', '--batchsize', '1'),
        *('--memory-limit', '2GB', '--link-bandwidth', '100MB/s', '--swap-dir', '.'),
        *('--shared-link', f'test-{os.getpid()}', '--json', '-'),
    )
    assert status == 0, err
    figures = json.loads(out)
    assert figures['insize'] == 67
    assert figures['link']['h2d_bytes_per_second'] == pytest.approx(1e8, rel=0.3)
    assert library.load_profile('p.json').device['link_is_shared'] is True


@pytest.mark.parametrize(
    'options, expected',
    [
        (('--arch', 'resnet51'), "Did you mean 'resnet50'?"),
        (('--arch', 'nowhere:Net'), "no module 'nowhere'"),
        (('--arch', 'trained_networks:Nothing'), "no class 'Nothing'"),
        (('--arch', 'trained_networks:Broken'), "has no attribute 'missing' ("),
        (('--arch', 'trained_networks:Demanding'), 'wish'),
        (('--insize', '9'), 'cannot be run on 16 pictures of 9x9'),
        (('--swap-dir', 'nowhere'), 'nowhere'),
        (('-o', 'nowhere/p.json'), 'there is no folder nowhere'),
        (('--json', 'nowhere/p.json'), 'there is no folder nowhere'),
        (('--batchsize', '1' + '0' * 12), 'out of memory'),
    ],
)
def test_refused(arguments, options, expected, folder, refused):
    assert expected in refused(*arguments, *options)
    assert not (folder / 'p.json').exists()


@pytest.mark.parametrize(
    'options, expected',
    [
        (('--memory-limit', '100kB'), 'do not fit'),
        (('--shared-link', 'bus0'), 'there is no --link-bandwidth to share'),
        (('--iterations', '2'), 'too few of 2 iterations'),
        (
            ('--arch', 'trained_networks:Restless', '--iterations', '5'),
            'unless each computes something else',
        ),
    ],
)
def test_fails_after_some_progress(arguments, options, expected, folder, hybridmem):
    status, out, err = hybridmem(*arguments, *options)
    assert (status, out) == (1, '')
    assert err.splitlines()[-1].startswith('hybridmem: error: ')
    assert expected in err.splitlines()[-1]
    assert not (folder / 'p.json').exists()


@pytest.mark.parametrize(
    'options',
    [
        ('--batchsize', '0'),
        ('--insize', 'big'),
        ('--memory-limit', '0%'),
        ('--link-bandwidth', 'fast'),
        ('--device', 'tpu'),
    ],
)
def test_usage_errors(arguments, options, hybridmem):
    assert hybridmem(*arguments, *options)[0] == 2


@pytest.mark.skipif(compat.cuda_available(), reason='there is a GPU')
def test_no_gpu(arguments, refused):
    assert 'hybridmem doctor' in refused(*arguments, '--device', 'cuda')


def test_no_chainer(arguments, refused, monkeypatch):
    def absent():
        raise ImportError('No module named chainer')

    monkeypatch.setattr(base.compat, 'import_chainer', absent)
    message = refused(*arguments)
    assert 'No module named chainer' in message and 'hybridmem doctor' in message


def test_a_long_iteration_says_why_while_it_runs(arguments, hybridmem):
    status, _, err = hybridmem(*arguments)
    assert status == 0
    lines = err.splitlines()
    told = [i for i, line in enumerate(lines) if 'several times as long' in line]
    over = [i for i, line in enumerate(lines) if 'iteration 2 (profiling)' in line]
    assert len(told) == len(over) == 1 and told < over
    assert 'iteration 2 takes' in lines[told[0]]
    assert 'runs again, as a whole and in parts' in lines[told[0]]
