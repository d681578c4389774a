"""FLOPs and bytes of operations, counted by hand."""

import dataclasses

import pytest
from support import networks, recordings

from chainer_hybridmem.forecasting.estimation.costs import (
    CLASSES,
    kind_of,
    operation_costs,
    pass_cost,
    time_model,
)
from chainer_hybridmem.planning.records.profile import Phase
from chainer_hybridmem.planning.records.specs import parse_spec, spec_bytes

N, SIDE, CHANNELS = 4, 16, 8
PLANE = N * SIDE * SIDE  # elements of one channel of a batch
MAP = 4 * PLANE * CHANNELS  # bytes of a feature map
WEIGHTS = 4 * CHANNELS * CHANNELS * 9


@pytest.fixture(scope='module')
def profile():
    return recordings.recorded(networks.Everything, N)


@pytest.fixture(scope='module')
def costs(profile):
    return operation_costs(profile)


def find(profile, costs, label, phase=Phase.FORWARD):
    return next(
        cost
        for op, cost in zip(profile.operations, costs, strict=True)
        if op.label == label and op.phase is phase
    )


def test_a_pass_is_one_kernel_over_inputs_and_products(profile):
    timed = time_model(profile, lambda cost: cost.nbytes, im2col=False)
    long = [r for r in timed.recipes if len(r.covers) > 1]
    assert long
    for recipe in long:
        touched = {*recipe.inputs, *recipe.products}
        assert recipe.seconds == sum(profile.storages[s].nbytes for s in touched)
        cost = pass_cost(profile, recipe)
        assert (cost.kind, cost.flops, cost.launches) == ('elementwise', 0, 1)
    pooling = next(
        r
        for r in timed.recipes
        if profile.operations[r.operation].function == 'MaxPoolingND'
    )
    assert pass_cost(profile, pooling).kind == 'pooling'


@pytest.mark.parametrize(
    'spec, expected, nbytes',
    [
        ('float32[2,3]', ('float32', (2, 3)), 24),
        ('int64[]', ('int64', ()), 8),
        ('bool[5]', ('bool', (5,)), 5),
        ('float16[4,0]', ('float16', (4, 0)), 0),
        ('str', ('', ()), 0),
        ('', ('', ()), 0),
    ],
)
def test_specs(spec, expected, nbytes):
    assert parse_spec(spec) == expected
    assert spec_bytes(spec) == nbytes


def test_convolution(profile, costs):
    label = '/block1/c1/Convolution2DFunction'
    forward = find(profile, costs, label)
    assert forward.kind == 'convolution'
    assert forward.flops == 2 * PLANE * CHANNELS * CHANNELS * 9
    bias = 4 * CHANNELS
    assert forward.nbytes == 2 * MAP + WEIGHTS + bias
    backward = find(profile, costs, label, Phase.BACKWARD)
    assert backward.flops == 2 * forward.flops
    # Its input is that of the skip connection, too: two gradients are added.
    assert backward.nbytes in (
        2 * forward.nbytes,
        2 * forward.nbytes + 3 * MAP,
    )


def test_pictures_need_no_gradient(profile, costs):
    label = '/first/Convolution2DFunction'
    forward = find(profile, costs, label)
    backward = find(profile, costs, label, Phase.BACKWARD)
    assert forward.flops == 2 * PLANE * CHANNELS * 3 * 9
    assert backward.flops == forward.flops


def test_linear(profile, costs):
    label = '/last/LinearFunction'
    n_in = CHANNELS * SIDE * SIDE // 4
    forward = find(profile, costs, label)
    assert forward.kind == 'gemm'
    assert forward.flops == 2 * N * n_in * 10
    assert find(profile, costs, label, Phase.BACKWARD).flops == 2 * forward.flops


def test_normalisation_reads_twice(profile, costs):
    label = '/block1/b1/BatchNormalization'
    forward = find(profile, costs, label)
    backward = find(profile, costs, label, Phase.BACKWARD)
    assert forward.nbytes == pytest.approx(3 * MAP, rel=0.02)
    assert backward.nbytes == pytest.approx(5 * MAP, rel=0.02)


def test_activation(profile, costs):
    forward = find(profile, costs, '/block1/ReLU')
    backward = find(profile, costs, '/block1/ReLU', Phase.BACKWARD)
    assert (forward.nbytes, backward.nbytes) == (2 * MAP, 3 * MAP)
    assert forward.flops == 0


def test_views_cost_nothing(profile, costs):
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        cost = find(profile, costs, '/Reshape', phase)
        assert (cost.nbytes, cost.launches) == (0, 0)


def test_the_update_touches_every_parameter(profile, costs):
    assert costs[-1].nbytes > 5 * WEIGHTS
    assert costs[-1].launches == 20


def test_patches_cost_bytes(profile, costs):
    label = '/block1/c1/Convolution2DFunction'
    through = operation_costs(profile, im2col=True)
    for phase, products in ((Phase.FORWARD, 1), (Phase.BACKWARD, 2)):
        direct = find(profile, costs, label, phase)
        patches = find(profile, through, label, phase)
        assert patches.flops == direct.flops
        assert patches.nbytes - direct.nbytes == products * 4 * 9 * MAP


def test_every_operation_has_a_cost(profile, costs):
    assert len(costs) == len(profile.operations)
    for cost in costs:
        assert cost.kind in CLASSES
        assert min(cost.flops, cost.nbytes, cost.launches) >= 0
    assert kind_of('SomethingOfMyOwn') == 'elementwise'


def test_a_replay_takes_the_time_of_forward(profile):
    timed = time_model(profile, lambda cost: cost.nbytes, im2col=False)
    for recipe in timed.recipes:
        seconds = timed.operations[recipe.operation].device_seconds
        assert recipe.seconds == seconds or recipe.covers
    changed = dataclasses.replace(timed, operations=(), recipes=())
    assert changed == dataclasses.replace(profile, operations=(), recipes=())
