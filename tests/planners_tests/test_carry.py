"""Plans that travel to another batch size, link or device."""

import dataclasses

import pytest

from chainer_hybridmem.errors import FormatError, OptionError
from chainer_hybridmem.planners import carry, make_plan
from chainer_hybridmem.records import library
from chainer_hybridmem.records.validation import check_plan
from chainer_hybridmem.search.candidates import least_memory
from chainer_hybridmem.simulation import make_problem
from chainer_hybridmem.testing import networks

SOURCE = 3


def resized(profile, factor):
    """The same network with arrays and times as of another batch size."""
    return dataclasses.replace(
        profile,
        storages=tuple(
            dataclasses.replace(s, nbytes=round(s.nbytes * factor))
            for s in profile.storages
        ),
        operations=tuple(
            dataclasses.replace(
                op,
                device_seconds=op.device_seconds * factor,
                workspace_bytes=round(op.workspace_bytes * factor),
            )
            for op in profile.operations
        ),
        recipes=tuple(
            dataclasses.replace(
                r, seconds=r.seconds * factor, peak_bytes=round(r.peak_bytes * factor)
            )
            for r in profile.recipes
        ),
        initial_bytes=round(profile.initial_bytes * factor),
    )


def limit_of(problem, share=0.5):
    least, peak = least_memory(problem)[0], problem.in_core_peak_bytes
    return least + int((peak - least) * share)


@pytest.fixture
def made(tmp_path):
    """Files of a plan and of its profile, and the profile."""
    profile = networks.random_network(SOURCE, nodes=14)
    plan = make_plan(profile, limit_of(make_problem(profile)), 'hybrid', steps=2000)
    files = {
        'plan_file': str(tmp_path / 'plan'),
        'profile_file': str(tmp_path / 'profile'),
    }
    library.save(plan, files['plan_file'])
    library.save(profile, files['profile_file'])
    return files, profile, plan


@pytest.fixture
def searches(monkeypatch):
    """How often the default planner has searched."""
    found = []

    original = carry.HYBRID
    planner = dataclasses.replace(
        original,
        function=lambda *args: (found.append(args[1]), original.function(*args))[1],
    )
    monkeypatch.setattr(carry, 'HYBRID', planner)
    return found


@pytest.mark.parametrize('factor', [1.0, 0.75, 1.5, 4.0])
def test_a_plan_for_another_batch_size_is_near_the_best(made, factor):
    files, profile, _ = made
    target = resized(profile, factor)
    limit = limit_of(make_problem(target), 0.4)
    carried = make_plan(target, limit, 'carry', **files)
    check_plan(target, carried, limit)
    fresh = make_plan(target, limit, 'hybrid')
    assert carried.predicted_seconds <= fresh.predicted_seconds * 1.01


def test_what_is_proven_good_is_not_searched(made, searches):
    files, profile, plan = made
    limit = plan.memory_limit_bytes
    gap = plan.predicted_seconds / plan.lower_bound_seconds - 1
    carried = make_plan(profile, limit, 'carry', tolerance=gap + 1e-6, **files)
    assert not searches
    assert carried.options['searched'] is False
    assert carried.predicted_seconds <= plan.predicted_seconds * (1 + 1e-6)


def test_what_is_not_proven_good_is_searched(made, searches):
    files, profile, _ = made
    slow = dataclasses.replace(
        profile,
        link=dataclasses.replace(
            profile.link,
            d2h_bytes_per_second=profile.link.d2h_bytes_per_second / 10,
            h2d_bytes_per_second=profile.link.h2d_bytes_per_second / 10,
        ),
    )
    limit = limit_of(make_problem(slow), 0.2)
    carried = make_plan(slow, limit, 'carry', tolerance=0.0, **files)
    assert searches == [limit]
    fresh = make_plan(slow, limit, 'hybrid')
    assert carried.predicted_seconds <= fresh.predicted_seconds


def test_without_a_plan_it_is_a_search(made, searches):
    _, profile, plan = made
    limit = plan.memory_limit_bytes
    assert make_plan(profile, limit, 'carry').options['found_by'] == 'hybrid'
    assert searches == [limit]


def test_what_does_not_go_together_is_refused(made, tmp_path):
    files, profile, plan = made
    limit = plan.memory_limit_bytes
    with pytest.raises(OptionError, match='both needed'):
        make_plan(profile, limit, 'carry', plan_file=files['plan_file'])
    with pytest.raises(FormatError):
        make_plan(profile, '1TB', 'carry', **{**files, 'plan_file': 'missing'})
    other = str(tmp_path / 'other')
    library.save(networks.random_network(SOURCE + 1), other)
    with pytest.raises(OptionError, match='was not made for'):
        make_plan(
            profile, limit, 'carry', plan_file=files['plan_file'], profile_file=other
        )
    with pytest.raises(OptionError, match='path'):
        make_plan(profile, limit, 'carry', plan_file=3, profile_file=other)
