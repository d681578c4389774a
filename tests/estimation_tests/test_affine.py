"""Two recorded iterations, extrapolated: compared with a third one."""

import dataclasses

import pytest
from support import toys

from chainer_hybridmem.errors import OptionError, ProfileMismatchError
from chainer_hybridmem.forecasting.estimation import SamplePair
from chainer_hybridmem.planning.records.profile_file import (
    check_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.simulation import make_problem


def outline(profile):
    """Everything but times."""
    return [
        dataclasses.replace(op, device_seconds=0.0, host_seconds=0.0)
        for op in profile.operations
    ]


def test_a_batch_size_that_was_not_recorded(profiles, pair):
    estimate, real = pair.at(8), profiles[8]
    check_profile(estimate)
    assert estimate.events == real.events
    assert estimate.storages == real.storages
    assert outline(estimate) == outline(real)
    assert estimate.initial_bytes == real.initial_bytes
    assert estimate.graph_end_event == real.graph_end_event
    left, right = make_problem(estimate), make_problem(real)
    assert left.in_core_peak_bytes == right.in_core_peak_bytes
    assert estimate.fingerprint() == real.fingerprint()


def test_recipes_of_a_batch_size_that_was_not_recorded(profiles, pair):
    estimate = {recipe.operation: recipe for recipe in pair.at(8).recipes}
    for recipe in profiles[8].recipes:
        assert (
            dataclasses.replace(estimate[recipe.operation], seconds=recipe.seconds)
            == recipe
        )


def test_the_samples_themselves(profiles, pair):
    assert serialise_profile(pair.at(6)) == serialise_profile(profiles[6])
    assert pair.at(4).storages == profiles[4].storages
    assert outline(pair.at(4)) == outline(profiles[4])


def test_maps_too_small_to_be_recorded_as_such(profiles, pair):
    smaller = SamplePair.match(profiles[2], profiles[4], (2, 4))
    assert smaller.at(8).storages == pair.at(8).storages
    assert profiles[2].storages != smaller.at(2).storages


def test_more_pictures_never_need_less(pair):
    problems = [make_problem(pair.at(b)) for b in (1, 2, 3, 7, 50, 1000)]
    peaks = [problem.in_core_peak_bytes for problem in problems]
    seconds = [problem.in_core_seconds for problem in problems]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds)


@pytest.mark.parametrize('b1, b2', [(4, 2), (3, 3), (0, 2)])
def test_batch_sizes_must_ascend(b1, b2):
    profile = toys.chain()
    with pytest.raises(OptionError, match=rf'\({b1}, {b2}\); two ascending'):
        SamplePair.match(profile, profile, (b1, b2))


def test_times_are_affine_and_never_negative():
    fast = toys.chain(3, seconds=[1.0, 2.0, 3.0])
    slow = toys.chain(3, seconds=[1.5, 5.0, 2.0])
    pair = SamplePair.match(fast, slow, (2, 4))
    forward = [op.device_seconds for op in pair.at(8).operations[:3]]
    # Affine; more than proportional counts as proportional; less time as constant.
    assert forward == pytest.approx([2.5, 10.0, 2.0])
    forward = [op.device_seconds for op in pair.at(1).operations[:3]]
    assert forward == pytest.approx([0.75, 1.25, 2.0])


def test_sizes_that_do_not_scale_stay():
    one, two = toys.chain(2, nbytes=[100, 300]), toys.chain(2, nbytes=[100, 500])
    profile = SamplePair.match(one, two, (2, 4)).at(10)
    assert [s.nbytes for s in profile.storages[:2]] == [100, 1100]
    assert profile.initial_bytes == one.initial_bytes


def test_sizes_in_fractions_are_rounded_up():
    one, two = toys.chain(1, nbytes=10), toys.chain(1, nbytes=13)
    pair = SamplePair.match(one, two, (2, 4))
    assert pair.at(5).storages[0].nbytes == 15
    assert pair.at(6).storages[0].nbytes == 16


def with_temporaries(profile, sizes, stay=False):
    """Adds allocations of the first operation that it frees itself, or the program."""
    from chainer_hybridmem.forecasting.estimation.structure import (
        assemble,
        events_by_operation,
    )
    from chainer_hybridmem.planning.records.profile import Category, Storage

    groups = events_by_operation(profile)
    storages = list(profile.storages)
    for nbytes in sizes:
        n = len(storages)
        storages.append(Storage(n, nbytes, Category.WORKSPACE, 'x', 0, -1, -1))
        groups[0][1:1] = [n + 1] if stay else [n + 1, -n - 1]
        if stay:
            groups[-1].append(-n - 1)
    return assemble(profile, groups, storages, profile.recipes, profile.initial_bytes)


def test_temporaries_that_only_one_sample_has():
    one = with_temporaries(toys.chain(2), [100, 70, 50, 8])
    two = with_temporaries(toys.chain(2), [200, 100, 8])
    profile = SamplePair.match(one, two, (2, 4)).at(8)
    assert [s.nbytes for s in profile.storages[-3:]] == [400, 200, 8]
    two = with_temporaries(toys.chain(2), [200, 140, 100, 8, 60])
    profile = SamplePair.match(one, two, (2, 4)).at(8)
    # Nobody knows about the last one: it grows with the batch.
    assert [s.nbytes for s in profile.storages[-5:]] == [400, 280, 200, 8, 120]


def test_programs_that_keep_arrays_of_each_example():
    """As detectors do: boxes and labels of a picture, beside the batch."""
    one, two = (
        with_temporaries(toys.chain(2), [100 * n, *([60, 8] * n)], stay=True)
        for n in (2, 4)
    )
    pair = SamplePair.match(one, two, (2, 4))
    for batchsize in (2, 4, 100):
        own = [s.nbytes for s in pair.at(batchsize).storages[-9:]]
        assert sum(own) == batchsize * (100 + 60 + 8)
    assert pair.at(4).storages == two.storages
    with pytest.raises(ProfileMismatchError, match='leaves 10 arrays'):
        SamplePair.match(two, one, (2, 4))


@pytest.mark.parametrize(
    'other, expected',
    [
        (toys.chain(4), 'operation 3'),
        (toys.chain(3, function='Else'), 'operation 0 is /0/Layer'),
        (toys.graph([[], [0], [0]]), 'operation 0 (/0/Layer) leaves'),
    ],
)
def test_networks_that_differ(other, expected):
    with pytest.raises(ProfileMismatchError) as caught:
        SamplePair.match(toys.chain(3), other, (2, 4))
    message = str(caught.value)
    assert expected in message
    assert 'batch size 2' in message and 'hybridmem profile' in message


def test_garbage_of_the_smaller_sample_does_not_shrink(profiles):
    small = dataclasses.replace(
        profiles[4], initial_bytes=2 * profiles[6].initial_bytes
    )
    garbage = SamplePair.match(small, profiles[6], (4, 6))
    assert garbage.at(100).initial_bytes == profiles[6].initial_bytes


def test_words_that_are_small_in_one_sample_only(profiles):
    """Arrays that are there before: the recorder takes small ones for no maps."""
    small, large = profiles[4], profiles[6]
    index = next(s.id for s in large.storages if s.producer < 0 and not s.persistent)
    storages = list(small.storages)
    storages[index] = dataclasses.replace(
        storages[index], nbytes=1000, backward_uses=(), slots=()
    )
    changed = dataclasses.replace(small, storages=tuple(storages))
    assert SamplePair.match(changed, large, (4, 6)).smaller_bytes[index] == 1000


def test_any_toy_network_matches_itself():
    for seed in range(20):
        profile = toys.random_network(seed)
        pair = SamplePair.match(profile, profile, (1, 2))
        assert pair.at(2).events == profile.events
        assert pair.at(2).storages == profile.storages
        check_profile(pair.at(9))
