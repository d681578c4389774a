"""A recording through im2col, as it would be with cuDNN."""

import pytest
from support import networks, recordings, toys

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.forecasting.estimation import lower_to_cudnn
from chainer_hybridmem.forecasting.estimation.lowering import CONVOLUTIONS, SERVED
from chainer_hybridmem.forecasting.estimation.structure import (
    events_by_operation,
    passing,
)
from chainer_hybridmem.planning.planners import PLANNERS, make_plan
from chainer_hybridmem.planning.records.profile import Category, Phase, SlotKind
from chainer_hybridmem.planning.records.profile_file import (
    check_profile,
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.records.specs import spec_bytes
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem

WORKSPACE = 12345


@pytest.fixture(scope='module')
def recorded():
    return recordings.recorded(networks.Everything, 6)


@pytest.fixture(scope='module')
def lowered(recorded):
    return lower_to_cudnn(recorded, WORKSPACE)


def operation(profile, function, phase=Phase.FORWARD):
    return next(
        op for op in profile.operations if op.function == function and op.phase is phase
    )


def slots_of(profile, function):
    return {
        slot.key: storage
        for storage in profile.storages
        for slot in storage.slots
        if slot.kind is SlotKind.ATTRIBUTE
        and profile.operations[slot.operation].function == function
    }


def test_is_a_profile_that_needs_less(recorded, lowered):
    check_profile(lowered)
    assert parse_profile(serialise_profile(lowered)).events == lowered.events
    assert [op.label for op in lowered.operations] == [
        op.label for op in recorded.operations
    ]
    before, after = make_problem(recorded), make_problem(lowered)
    assert after.in_core_peak_bytes < before.in_core_peak_bytes
    assert least_memory(after)[0] < least_memory(before)[0]


def test_temporaries_give_way_to_workspaces(lowered):
    groups = events_by_operation(lowered)
    for op in lowered.operations:
        if op.function not in SERVED:
            continue
        storages = [lowered.storages[s] for s in passing(groups[op.index])]
        sizes = [s.nbytes for s in storages if not s.slots]
        input_bytes = spec_bytes(
            (op if op.forward < 0 else lowered.operations[op.forward]).specs[0]
        )
        assert len(sizes) <= 1, op
        if op.function in CONVOLUTIONS:
            assert sizes in ([WORKSPACE], [max(WORKSPACE, input_bytes)])
        elif op.phase is Phase.FORWARD:
            assert sizes == []
        else:
            assert sizes in ([], [input_bytes])


def test_events_are_balanced(lowered):
    present = {s.id for s in lowered.storages if s.allocated_at < 0}
    for position, event in enumerate(lowered.events):
        storage = lowered.storages[abs(event) - 1]
        if event > 0:
            assert storage.id not in present
            assert storage.allocated_at == position
            present.add(storage.id)
        else:
            assert storage.freed_at == position
            present.remove(storage.id)


def test_pooling_keeps_input_and_output_and_no_indexes(recorded, lowered):
    assert 'indexes' in slots_of(recorded, 'MaxPoolingND')
    assert 'indexes' not in slots_of(lowered, 'MaxPoolingND')
    forward = operation(lowered, 'MaxPoolingND')
    backward = operation(lowered, 'MaxPoolingND', Phase.BACKWARD)
    x = lowered.storages[forward.reads[0]]
    y = next(lowered.storages[i] for i in forward.writes)
    for storage in (x, y):
        assert storage.category is Category.FEATURE_MAP
        assert backward.index in storage.backward_uses
        assert storage.plannable
    recipe = next(r for r in lowered.recipes if r.operation == forward.index)
    assert recipe.products == (y.id,)


def test_a_map_nobody_kept_before_becomes_one(recorded, lowered):
    # Dropout reads what pooling makes and keeps nothing of it.
    before = operation(recorded, 'MaxPoolingND')
    after = operation(lowered, 'MaxPoolingND')
    outputs = [
        {p.storages[i].category for i in op.writes}
        for p, op in ((recorded, before), (lowered, after))
    ]
    assert outputs == [{Category.WORKSPACE}, {Category.FEATURE_MAP}]


def test_normalisation_keeps_one_array_less(recorded, lowered):
    name = 'LocalResponseNormalization'
    assert set(slots_of(recorded, name)) == {'unit_scale', 'scale'}
    assert set(slots_of(lowered, name)) == {'scale'}


def test_dropout_masks_stay(recorded, lowered):
    assert 'mask' in slots_of(recorded, 'Dropout')
    assert 'mask' in slots_of(lowered, 'Dropout')


def test_gradients_lose_their_padding(recorded, lowered):
    def largest(profile):
        op = next(
            op
            for op in profile.operations
            if op.function in CONVOLUTIONS and op.phase is Phase.BACKWARD
        )
        kept = [profile.storages[i] for i in op.writes]
        sizes = [s.nbytes for s in kept if s.freed_at >= 0]
        return max(sizes), spec_bytes(profile.operations[op.forward].specs[0])

    padded, exact = largest(recorded)
    assert padded > exact
    assert largest(lowered) == (exact, exact)


def test_replays_need_their_products_and_a_workspace(lowered):
    for recipe in lowered.recipes:
        function = lowered.operations[recipe.operation].function
        products = sum(lowered.storages[s].nbytes for s in recipe.products)
        if function in CONVOLUTIONS:
            assert recipe.peak_bytes == products + WORKSPACE
        elif function in SERVED:
            assert recipe.peak_bytes == products


def test_lowering_twice_changes_nothing(lowered):
    again = lower_to_cudnn(lowered, WORKSPACE)
    assert again.storages == lowered.storages
    assert again.events == lowered.events
    assert again.recipes == lowered.recipes


def test_what_cudnn_does_not_serve_stays():
    for seed in range(5):
        profile = toys.random_network(seed)
        assert lower_to_cudnn(profile).events == profile.events


@pytest.mark.matrix
@pytest.mark.parametrize('planner', PLANNERS)
@pytest.mark.parametrize('share', [0.0, 0.3, 0.7, 1.0])
def test_every_planner_can_plan_it(planner, share, lowered):
    problem = make_problem(lowered)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    limit = least + int(share * (most - least))
    try:
        options = {'time_budget': 5.0} if planner == 'exact' else {}
        plan = make_plan(problem, limit, planner, **options)
    except InfeasibleError:
        assert share < 1
        return
    assert max(check_plan(lowered, plan, limit)) <= limit
