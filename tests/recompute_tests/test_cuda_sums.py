"""One kernel on a GPU makes the bits of normalisation, addition and ReLU."""

from __future__ import annotations

import contextlib

import pytest
from support import networks
from support.marks import needs_emulated_cudnn

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import numpy as np

from chainer_hybridmem.planning.records.profile import FORMULAS
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.devices.cuda.device import CudaDevice
from chainer_hybridmem.training.recompute import cuda_sums, fused_replays
from chainer_hybridmem.training.recording import trials

pytestmark = pytest.mark.gpu
ITERATIONS = 8
SHAPE = (3, 7, 6, 5)
TYPES = [np.float16, np.float32, np.float64]
ALIVE = []


@pytest.fixture(autouse=True)
def without_cudnn():
    """How cuDNN rounds is for trials to find out."""
    with chainer.using_config('use_cudnn', 'never'):
        yield
    ALIVE.clear()


def variable(dtype, seed, layout='usual'):
    """Numbers of both signs, with zeros of both, infinity and NaN among them."""
    import cupy

    rng = np.random.RandomState(seed)
    values = rng.randn(*SHAPE) * (rng.rand(*SHAPE) > 0.2)
    values[rng.rand(*SHAPE) > 0.9] = -0.0
    values[:, 0] = -1  # normalised to zeros
    values[0, 1, 0, 0], values[0, 2, 1, 1] = np.inf, np.nan
    array = cupy.asarray(values.astype(dtype))
    if layout == 'channels last':
        array = cupy.moveaxis(
            cupy.ascontiguousarray(cupy.moveaxis(array, 1, -1)), -1, 1
        )
    if layout == 'every other':
        array = cupy.repeat(array, 2, axis=3)[..., ::2]
    ALIVE.append(chainer.Variable(array))
    return ALIVE[-1]


def normalise(x, parameters=None):
    import cupy

    rng = np.random.RandomState(3)
    dtype = parameters or x.dtype
    gamma, beta = (cupy.asarray(rng.randn(7).astype(dtype)) for _ in range(2))
    beta[0] = -0.0
    ALIVE.extend([chainer.Variable(gamma), chainer.Variable(beta)])
    ALIVE.append(F.batch_normalization(x, *ALIVE[-2:]))
    return ALIVE[-1]


def check(y, number):
    """The candidate that covers so many functions makes what they have made."""
    functions = next(
        c for c in fused_replays.find_candidates(y.creator_node) if len(c) == number
    )
    (again,), _ = fused_replays.run(functions, graph.node_array)
    assert again.dtype == y.dtype and again.strides == y.array.strides
    assert again.get().tobytes() == y.array.get().tobytes()


@pytest.mark.parametrize('layout', ['usual', 'channels last', 'every other'])
@pytest.mark.parametrize('parameters', [None, np.float32])
@pytest.mark.parametrize('dtype', TYPES)
def test_normalisation_and_relu(dtype, parameters, layout):
    y = normalise(variable(dtype, 1, layout), parameters)
    check(y, 1)
    ALIVE.append(F.relu(y))
    check(ALIVE[-1], 2)


@pytest.mark.parametrize('first', [True, False])
@pytest.mark.parametrize('dtype', TYPES)
def test_one_normalised_term(dtype, first):
    y, other = normalise(variable(dtype, 1)), variable(dtype, 2)
    ALIVE.append(y + other if first else other + y)
    check(ALIVE[-1], 2)
    check(F.relu(ALIVE[-1]), 3)


@pytest.mark.parametrize('dtype', TYPES)
def test_two_normalised_terms(dtype):
    ALIVE.append(normalise(variable(dtype, 1)) + normalise(variable(dtype, 2)))
    check(ALIVE[-1], 3)
    check(F.relu(ALIVE[-1]), 4)


def test_terms_that_differ_are_left_to_forward():
    row = variable(np.float32, 2)[:1]
    y = normalise(variable(np.float32, 1)) + row
    functions = fused_replays.find_candidates(y.creator_node)[0]
    with pytest.raises(fused_replays.NoFusedReplayError, match='one type and shape'):
        fused_replays.run(functions, graph.node_array)


def train(data):
    """The exact recipes of a session: what each covers by name, and its formula."""
    expected = networks.train_on_gpu(networks.Everything, data)[0]
    result, session = networks.train_on_gpu(
        networks.Everything, data, memory_limit='1GB', planner='checkpoint-speed'
    )
    networks.assert_same(expected, result)
    labels = [
        operation.label.split('/')[-1] for operation in session.profile.operations
    ]
    recipes = {r.operation: r for r in session.profile.recipes if r.exact and r.covers}
    replays = [
        recipes[replay.operation]
        for replay in session.plan.replays
        if replay.operation in recipes
    ]
    return {
        (tuple(labels[k] for k in recipe.covers), recipe.formula) for recipe in replays
    }


def test_training_with_them(data):
    covered = train(data)
    assert (('BatchNormalization', 'ReLU'), 0) in covered
    assert (('BatchNormalization', 'Add', 'ReLU'), 0) in covered


@needs_emulated_cudnn
def test_a_trial_finds_how_cudnn_rounds(data):
    with chainer.using_config('use_cudnn', 'always'):
        covered = train(data)
    assert (('BatchNormalization', 'ReLU'), 1) in covered
    assert (('BatchNormalization', 'Add', 'ReLU'), 1) in covered


@needs_emulated_cudnn
@pytest.mark.parametrize(
    ('gamma', 'beta', 'ways'), [(1, 0, 0), (1, 2, 0), (2, 0, 0), (2, 2, FORMULAS)]
)
def test_no_way_to_round_is_tried_with_parameters_that_tell_none_apart(
    gamma, beta, ways
):
    """As before the first update: the wrong one may give the same bits then."""
    x = variable(np.float32, 0)
    parameters = [
        chainer.Variable(x.xp.full(7, value, np.float32)) for value in (gamma, beta)
    ]
    with chainer.using_config('use_cudnn', 'always'):
        y = F.batch_normalization(x, *parameters)
        functions = (y.creator_node,)
        found = fused_replays.list_formulas(functions, graph.node_array)
    assert len(found) == ways


@needs_emulated_cudnn
def test_what_cudnn_has_normalised_is_not_tried_without_its_parameters():
    """They may have left by the time of a function after it."""

    def fetch(node):
        raise fused_replays.NoFusedReplayError('an input has left')

    x = variable(np.float32, 0)
    with chainer.using_config('use_cudnn', 'always'):
        functions = (normalise(x).creator_node,)
        with contextlib.closing(CudaDevice(1 << 30)) as device:
            assert trials.try_fused(functions, fetch, device, None) is None


def test_every_formula_has_a_number():
    assert len(cuda_sums.FORMULAS) == FORMULAS
