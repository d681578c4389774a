"""What functions need in parts, estimated for other batch sizes."""

import dataclasses

import pytest
from support import networks, recordings

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.forecasting.estimation import (
    Estimator,
    SamplePair,
    load_device_model,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.splits import part_of
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.training.recording import Detail
from chainer_hybridmem.training.session.session import Session


@pytest.fixture(scope='module')
def recorded():
    """Profiles by batch size, with everything tried in parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, 'detail', Detail(parts=True, keep_small_arrays=True))
        return {
            b: recordings.recorded.__wrapped__(networks.Everything, b)
            for b in (4, 8, 16, 20, 24)
        }


def peaks(profile):
    return {part_of(split): split.peak_bytes for split in profile.splits}


def estimate(recorded, small, large, batchsize):
    pair = SamplePair.match(recorded[small], recorded[large], (small, large))
    return Estimator.make(pair, None).profile(batchsize)


@pytest.mark.parametrize(
    'small, large, batchsize',
    [(8, 16, 24), (8, 16, 20), (4, 8, 16), (4, 16, 20), (16, 24, 8)],
)
def test_memory_in_parts_is_that_of_a_recording(recorded, small, large, batchsize):
    estimated = peaks(estimate(recorded, small, large, batchsize))
    actual = peaks(recorded[batchsize])
    common = estimated.keys() & actual.keys()
    assert {part.cut for part in common} == {'windows', 'batch', 'channels'}
    assert {p: estimated[p] for p in common} == {p: actual[p] for p in common}


def test_windows_are_laid_out_a_sample_at_a_time(recorded):
    parts = peaks(estimate(recorded, 8, 16, 21))
    assert {p.parts for p in parts if p.cut == 'windows'} == {21}


def test_more_parts_than_were_tried_are_known(recorded):
    parts = peaks(estimate(recorded, 20, 24, 40))
    assert {p.parts for p in parts if p.cut == 'batch'} >= {2, 4, 8, 16}
    assert not [p for p in peaks(estimate(recorded, 8, 16, 1)) if p.cut == 'windows']


def test_an_estimate_plans_with_parts_and_keeps_the_limit(recorded):
    profile = estimate(recorded, 8, 16, 32)
    with pytest.raises(InfeasibleError) as caught:
        make_plan(profile, '4MB', 'swap-all', splitting=False)
    limit = caught.value.requested_bytes * 3 // 4
    plan = make_plan(profile, limit, 'swap-all')
    assert plan.parts and all(part.exact for part in plan.parts)
    check_plan(profile, plan, limit)


def test_a_device_model_knows_no_parts(recorded):
    pair = SamplePair.match(recorded[8], recorded[16], (8, 16))
    for convolution in ('cudnn', 'im2col'):
        model = load_device_model('p100')
        estimator = Estimator.make(pair, model, convolution)
        assert estimator.profile(32).splits == ()


def test_samples_without_parts_are_estimated_as_before(recorded):
    plain = {b: dataclasses.replace(p, splits=()) for b, p in recorded.items()}
    with_parts = estimate(recorded, 8, 16, 24)
    assert estimate(plain, 8, 16, 24) == dataclasses.replace(with_parts, splits=())
