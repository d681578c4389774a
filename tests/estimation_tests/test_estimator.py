"""From two recordings to a profile on a device model."""

import dataclasses

import pytest

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.forecasting.batches import largest_batchsize, largest_planned
from chainer_hybridmem.forecasting.estimation import (
    Estimator,
    load_device_model,
)
from chainer_hybridmem.planning.records.profile_file import (
    check_profile,
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.simulation import make_problem


@pytest.fixture(scope='module')
def model():
    return load_device_model('v100-16gb-pcie3')


def test_on_a_device_model(pair, model):
    estimator = Estimator.make(pair, model)
    profile = estimator.profile(64)
    check_profile(profile)
    assert profile.link == model.link
    assert profile.device['model'] == 'v100-16gb-pcie3'
    assert profile.device['estimated'] is True
    assert profile.device['batchsize'] == 64
    assert profile.device['convolution'] == 'cudnn'
    assert profile.device['sample_batchsizes'] == [4, 6]
    assert profile.device['recorded_on']['kind'] == 'host'
    assert profile.device['calibration'] is None
    assert parse_profile(serialise_profile(profile)) == profile


def test_on_the_recorded_device(pair, profiles):
    profile = Estimator.make(pair).profile(6)
    assert profile.operations == profiles[6].operations
    assert profile.link == profiles[6].link
    assert profile.device['model'] is None


@pytest.mark.parametrize('convolution', ['cudnn', 'im2col'])
def test_more_pictures_take_longer_and_need_more(pair, model, convolution):
    estimator = Estimator.make(pair, model, convolution)
    problems = [make_problem(estimator.profile(b)) for b in (1, 4, 9, 64, 1024)]
    peaks = [problem.in_core_peak_bytes for problem in problems]
    seconds = [problem.in_core_seconds for problem in problems]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds)
    assert len({len(problem.maps) for problem in problems}) == 1


def test_patches_need_more_and_take_longer(pair, model):
    direct, through = (
        make_problem(Estimator.make(pair, model, name).profile(512))
        for name in ('cudnn', 'im2col')
    )
    assert through.in_core_peak_bytes > direct.in_core_peak_bytes
    assert through.in_core_seconds > direct.in_core_seconds


def test_calibration(pair, model):
    plain = Estimator.make(pair, model)
    estimator = plain.calibrated(1000.0, 32)
    profile = estimator.profile(32)
    assert 32 / profile.compute_seconds == pytest.approx(1000)
    factor = profile.compute_seconds / plain.profile(32).compute_seconds
    assert profile.device['compute_factor'] == pytest.approx(factor)
    assert profile.device['calibration'] == {
        'images_per_second': 1000.0,
        'batchsize': 32,
    }
    recipes = [e.profile(8).recipes for e in (plain, estimator)]
    for before, after in zip(*recipes, strict=True):
        assert after.seconds == pytest.approx(factor * before.seconds)
    assert estimator.profile(8).link == model.link
    assert estimator.calibrated(500.0, 32).factor == pytest.approx(2 * factor)
    assert plain.with_factor_of(estimator) == estimator


def test_options_that_cannot_be(pair, model):
    with pytest.raises(OptionError, match='winograd'):
        Estimator.make(pair, model, 'winograd')
    with pytest.raises(OptionError, match='needs a device model'):
        Estimator.make(pair, None, 'cudnn')
    estimator = Estimator.make(pair, model)
    for speed, batchsize in ((0.0, 1), (float('inf'), 1), (1.0, 0)):
        with pytest.raises(OptionError, match='above zero'):
            estimator.calibrated(speed, batchsize)
    for batchsize in (0, -1, 2**40):
        with pytest.raises(OptionError, match='out of range'):
            estimator.profile(batchsize)
    nothing = dataclasses.replace(model, kernel_seconds=0.0)
    for peak in ('flops_per_second', 'bytes_per_second'):
        nothing = dataclasses.replace(nothing, **{peak: float('inf')})
    with pytest.raises(OptionError, match='takes no time'):
        Estimator.make(pair, nothing).calibrated(1.0, 1)


@pytest.mark.parametrize(
    'needed',
    [
        lambda b: 10 * b,
        lambda b: 1000 + 7 * b,
        lambda b: 100 + b * b,
        lambda b: max(900 + b, 20 * b),
        lambda b: 500 if b < 77 else 5000,
    ],
)
@pytest.mark.parametrize('limit', [0, 10, 999, 1007, 1234, 99999])
def test_largest_batch_size(needed, limit):
    asked = []

    def ask(batchsize):
        asked.append(batchsize)
        return needed(batchsize)

    expected = max((b for b in range(1, 20001) if needed(b) <= limit), default=0)
    assert largest_batchsize(ask, limit, most=20000) == expected
    assert len(asked) < 60
    assert len(set(asked)) == len(asked)


def test_largest_planned_batch_size():
    for answer in range(12):
        assert largest_planned(lambda b, a=answer: b <= a, 10) == min(answer, 10)
    assert largest_planned(lambda b: True, 0) == 0
