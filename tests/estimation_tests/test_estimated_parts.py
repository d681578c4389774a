"""What functions need in parts, estimated for other batch sizes."""

import dataclasses

import pytest
from support import networks, recordings

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.estimation import Estimator, SamplePair, load_device_model
from chainer_hybridmem.planners import make_plan
from chainer_hybridmem.records.splits import part_of
from chainer_hybridmem.records.validation import check_plan
from chainer_hybridmem.session.session import Session


@pytest.fixture(scope='module')
def recorded():
    """Profiles by batch size, with everything tried in parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, 'tries_parts', True)
        return {
            b: recordings.recorded.__wrapped__(networks.Everything, b)
            for b in (4, 8, 16, 20, 24)
        }


def peaks(profile):
    return {part_of(split): split.peak_bytes for split in profile.splits}


def estimate(recorded, small, large, batchsize):
    pair = SamplePair.match(recorded[small], recorded[large], (small, large))
    return Estimator.make(pair, None).profile(batchsize)


def test_memory_in_parts_is_that_of_a_recording(recorded):
    estimated, actual = peaks(estimate(recorded, 8, 16, 24)), peaks(recorded[24])
    assert {part.cut for part in estimated} == {'windows', 'batch', 'channels'}
    assert estimated.items() <= actual.items()


def test_unequal_parts_count_as_the_largest(recorded):
    estimated, actual = peaks(estimate(recorded, 8, 16, 20)), peaks(recorded[20])
    common = estimated.keys() & actual.keys()
    assert any(part.parts == 8 for part in common)
    for part in common:
        likened = 20 if part.cut == 'channels' else -(-20 // part.parts) * part.parts
        same = actual[part] == estimated[part]
        assert same if likened == 20 else actual[part] <= estimated[part]


def test_ways_of_one_sample_only_are_left_out(recorded):
    parts = peaks(estimate(recorded, 4, 8, 16))
    # Its parts are one sample each in both recordings: nothing tells how they grow.
    assert 'windows' not in {part.cut for part in parts}
    assert {p.parts for p in parts if p.cut == 'batch' and p.exact} == {2, 4}
    assert {p.parts for p in parts if not p.exact} == {2}
    parts = peaks(estimate(recorded, 8, 16, 6))
    assert {p.parts for p in parts if p.cut == 'batch' and p.exact} == {2, 4}


def test_parts_of_other_shares_are_left_out(recorded):
    assert all(
        p.cut == 'channels' or p.parts in (2, 4)
        for p in peaks(estimate(recorded, 20, 24, 40))
    )


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
