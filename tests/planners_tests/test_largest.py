"""The largest batch that fits, by planners asked about problems."""

import dataclasses

import pytest

from chainer_hybridmem.errors import InfeasibleError, OptionError, UnknownNameError
from chainer_hybridmem.forecasting.batches import (
    find_largest_batch,
    with_room_for_trials,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.planning.simulation.in_core import last_forward
from chainer_hybridmem.testing import networks

PROFILE = networks.random_network(7, nodes=10)
MOST = 100


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


def problem_of(batchsize):
    return make_problem(resized(PROFILE, batchsize / 8))


def fits(batchsize, limit, planner):
    try:
        make_plan(problem_of(batchsize), limit, planner)
    except InfeasibleError:
        return False
    return True


@pytest.mark.parametrize('planner', ['swap-all', 'hybrid', 'superneurons', 'in-core'])
@pytest.mark.parametrize('batches', [3.2, 17.9])
def test_the_answer_fits_and_one_more_does_not(planner, batches):
    limit = int(least_memory(problem_of(8))[0] * batches / 8)
    found = find_largest_batch(problem_of, limit, MOST, planner)
    assert found.batchsize == found.planned.batchsize > 0
    assert fits(found.batchsize, limit, planner)
    assert not fits(found.batchsize + 1, limit, planner)
    assert found.refusal.batchsize == found.batchsize + 1
    assert found.planned.peak_bytes <= limit
    assert found.in_core.peak_bytes <= limit
    more = problem_of(found.in_core.batchsize + 1)
    assert found.in_core_refusal.needed_bytes == more.in_core_peak_bytes > limit


def test_the_refusal_names_the_operation():
    limit = least_memory(problem_of(12))[0]
    found = find_largest_batch(problem_of, limit, MOST, 'swap-all')
    assert found.batchsize == 12
    least, worst = least_memory(problem_of(13))
    assert found.refusal.needed_bytes == least
    assert found.refusal.operation == PROFILE.operations[worst].label
    assert f'operation {worst}' in found.refusal.reason


def test_a_least_speed_ends_it_earlier():
    limit = least_memory(problem_of(20))[0]
    free = find_largest_batch(problem_of, limit, MOST, 'hybrid')
    assert free.planned.speed_share < 0.9
    fast = find_largest_batch(problem_of, limit, MOST, 'hybrid', min_speed=0.9)
    assert fast.batchsize < free.batchsize
    assert fast.planned.speed_share >= 0.9
    assert 'less than 90.0%' in fast.refusal.reason


def test_nothing_fits():
    limit = least_memory(problem_of(1))[0] - 1
    found = find_largest_batch(problem_of, limit, MOST, 'swap-all')
    assert found.batchsize == 0 and found.plan is None
    assert found.refusal.batchsize == 1


def test_there_is_no_end():
    found = find_largest_batch(problem_of, 2**60, MOST, 'hybrid')
    assert found.batchsize == found.in_core.batchsize == MOST
    assert found.refusal is None and found.in_core_refusal is None


def test_what_has_no_room_to_be_tried_is_never_made_again():
    problem = problem_of(12)
    least = least_memory(problem)[0]
    assert with_room_for_trials(problem, 2**40) is problem
    tight = with_room_for_trials(problem, least)
    left = {recipe.operation for recipe in tight.profile.recipes}
    gone = [r for r in problem.profile.recipes if r.operation not in left]
    assert left and gone
    needed = []
    for recipe in gone:
        k = recipe.operation
        there = [s for s in problem.maps if s.producer <= k <= last_forward(s)]
        load = int(problem.arrays.fixed_start[k + 1]) + sum(s.nbytes for s in there)
        needed.append(load + recipe.peak_bytes)
    assert min(needed) > least
    enough = with_room_for_trials(problem, max(needed))
    assert len(enough.profile.recipes) == len(problem.profile.recipes)


def test_wrong_names_are_refused():
    with pytest.raises(UnknownNameError):
        find_largest_batch(problem_of, 2**60, MOST, 'hybird')
    with pytest.raises(OptionError):
        find_largest_batch(problem_of, 2**60, MOST, 'hybrid', stepps=3)
    assert dataclasses.asdict(find_largest_batch(problem_of, 1, 1, 'in-core'))
