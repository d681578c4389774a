"""``hybridmem batch``."""

import json

import pytest

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.training.devices import ram

GPU = ('--gpu', 'v100-16gb-pcie3')


@pytest.fixture
def batch(network, hybridmem):
    """Runs the command and returns its figures."""

    def run(*arguments):
        status, out, err = hybridmem('batch', *network, *arguments, '--json', '-')
        assert status == 0, err
        return json.loads(out)

    return run


def test_the_answer_has_a_plan_and_its_profile(batch, hybridmem, folder):
    figures = batch(*GPU, '-o', 'plan.json', '--profile', 'p.json')
    assert figures['memory_limit_bytes'] == 16e9
    assert figures['batchsize'] > figures['in_core']['batchsize'] > 1000
    assert figures['refusal']['batchsize'] == figures['batchsize'] + 1
    assert figures['refusal']['operation'].startswith('/')
    plan, profile = library.load_plan('plan.json'), library.load_profile('p.json')
    assert plan.predicted_peak_bytes == figures['planned']['peak_bytes'] <= 16e9
    again = make_plan(profile, 16_000_000_000, 'hybrid')
    assert again.predicted_seconds == plan.predicted_seconds
    with pytest.raises(InfeasibleError):
        make_plan(profile, plan.predicted_peak_bytes // 2, 'in-core')


def test_text_for_people(network, hybridmem):
    status, out, err = hybridmem('batch', *network, *GPU, '--memory-limit', '1GiB')
    assert status == 0, err
    assert 'memory limit  1.0 GiB' in out
    assert 'does not fit in-core: plain Chainer needs' in out
    assert 'does not fit with hybrid: operation' in out


def test_nothing_fits(network, hybridmem):
    status, out, _ = hybridmem('batch', *network, *GPU, '--memory-limit', '100KiB')
    assert status == 1
    assert 'Batch size 1 does not fit with hybrid' in out


def test_a_least_speed(batch):
    free = batch(*GPU, '--planner', 'swap-all')
    fast = batch(*GPU, '--min-speed', '99.9%')
    assert fast['min_speed'] == pytest.approx(0.999)
    assert fast['batchsize'] <= free['batchsize']
    assert fast['planned']['speed_share'] >= 0.999


def test_without_a_gpu_parts_count(batch):
    whole = batch('--memory-limit', '8MiB', '--splitting', 'false')
    parts = batch('--memory-limit', '8MiB')
    assert parts['batchsize'] > whole['batchsize'] > 1


def test_a_cpu_has_its_ram_once(batch, network, hybridmem, monkeypatch, folder):
    """Copies to the host would lie in what the limit has already."""
    monkeypatch.setattr(ram, 'total_ram', lambda: 64 * 2**20)
    files = '-o', 'plan.json', '--profile', 'p.json'
    assert batch(*files)['memory_limit_bytes'] == 64 * 2**20
    plan, profile = library.load_plan('plan.json'), library.load_profile('p.json')
    assert (
        plan.tier_bytes(profile, Tier.RAM) == plan.tier_bytes(profile, Tier.DISK) == 0
    )
    for command in (('batch',), ('estimate', '--batchsize', '512')):
        assert 'host copies lie, too' in hybridmem(*command, *network)[1]
    batch(*files, '--memory-limit', '64MiB', '--planner', 'swap-all')
    plan, profile = library.load_plan('plan.json'), library.load_profile('p.json')
    assert plan.tier_bytes(profile, Tier.RAM) > 0


def test_wrong_questions(network, refused, hybridmem):
    assert 'There is no device model' in refused('batch', *network, '--gpu', 'v1')
    status, _, err = hybridmem('batch', *network, *GPU, '--min-speed', '120%')
    assert status == 2
    assert "'120%' is not a share such as 80% or 0.8" in err
    status, _, err = hybridmem('batch', *network, *GPU, '--batchsize', '3')
    assert status == 2
