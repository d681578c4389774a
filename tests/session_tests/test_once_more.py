"""A graph that is used once more, after iterations whose plan did not know of that."""

from __future__ import annotations

import hashlib
import random
import types

import numpy as np
import pytest
from support import networks, zoo

# isort: split
import chainer
import chainer.functions as F

import chainer_hybridmem
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.chainer_access.graph import places

ITERATIONS = 9
USUAL = 5  # iterations before, which follow a plan by then
PLANNERS = {
    'hybrid': {'steps': 1000},
    'checkpoint-speed': {},
    'pooch': {'node_budget': 100},
    'in-core': {},
    'swap-opt': {'node_budget': 100},
}


def twice(loss, model):
    loss.backward()
    loss.backward()


def gradients_first(loss, model):
    """As one that watches the norms of gradients does."""
    parameters = [p for p in model.params() if p.array is not None]
    found = chainer.grad([loss], parameters)
    model.slopes.append([float(F.sum(g * g).array) for g in found if g is not None])
    loss.backward()


def part_first(loss, model):
    """The gradient of what the last function has read."""
    creator = loss.creator_node
    inputs = [node.get_variable() for node in creator.inputs if node.requires_grad]
    for gradient in chainer.grad([loss], inputs):
        if gradient is not None:
            model.slopes.append(float(F.sum(gradient).array))
    loss.backward()


def retained(loss, model):
    loss.backward(retain_grad=True)
    loss.backward()


def doubled(loss, model):
    """The loss of a graph that has gone back is used in another one."""
    loss.backward()
    (loss * 2).backward()


USES = [twice, gradients_first, part_first, retained, doubled]


class Training:
    def __init__(self, network, use):
        np.random.seed(0)
        self.network, self.use = network, use
        self.model = network.make()
        self.model.slopes = []
        self.optimizer = chainer.optimizers.Adam().setup(self.model)
        self.data = np.random.RandomState(1)
        self.losses = []

    def step(self, i):
        loss = self.model(*self.network.batch(self.data))
        self.model.cleargrads()
        if i == USUAL or i == USUAL + 2:
            self.use(loss, self.model)
        else:
            loss.backward()
        self.losses.append(float(loss.array))
        del loss
        self.optimizer.update()
        digest = hashlib.sha256(repr(self.model.slopes).encode())
        for name, array in networks.outcome(self.model, self.losses).items():
            digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()


@pytest.fixture(scope='module')
def needs():
    """Least memory, and that of plain Chainer, by network."""
    found = {}

    def find(name):
        if name not in found:
            training = Training(zoo.NETWORKS[name], twice)
            options = {'memory_limit': '1GB', 'planner': 'in-core'}
            with chainer_hybridmem.optimize(training.model, **options) as session:
                while session.profile is None:
                    training.step(0)
            problem = make_problem(session.profile)
            found[name] = least_memory(problem)[0], problem.in_core_peak_bytes
        return found[name]

    return find


@pytest.mark.matrix
@pytest.mark.parametrize('use', USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize('planner', PLANNERS)
@pytest.mark.parametrize('name', zoo.NETWORKS)
def test_it_is_as_in_plain_chainer(name, planner, use, needs):
    plain = Training(zoo.NETWORKS[name], use)
    expected = [plain.step(i) for i in range(ITERATIONS)]
    least, most = needs(name)
    limit = most if planner in ('in-core', 'checkpoint-speed') else (least + most) // 2
    training = Training(zoo.NETWORKS[name], use)
    states = []
    with chainer_hybridmem.optimize(
        training.model,
        limit,
        planner=planner,
        link_bandwidth='1GB/s',
        **PLANNERS[planner],
    ) as session:
        for i in range(ITERATIONS):
            assert training.step(i) == expected[i], (i, states)
            states.append(session.state)
    assert states[USUAL - 1] == 'guided'
    assert session.statistics()['peak_bytes'] <= limit


@pytest.mark.parametrize('planner', ['swap-opt', 'hybrid', 'pooch'])
def test_what_a_plan_has_dropped_is_made_again_after_another_one_is_followed(planner):
    """A second backward is not in the plan: another guide is followed from then on."""

    def train(**options):
        rng = random.Random(2)
        np.random.seed(2)
        model = networks.Sigmoids()
        optimizer = chainer.optimizers.SGD(1e-6).setup(model)
        losses = []
        with networks.session_for(model, options) as session:
            for i in range(40):
                x, length = (
                    np.random.rand(1000, 64).astype('f'),
                    rng.choice((11, 12, 13)),
                )
                loss = model(x, length)
                model.cleargrads()
                loss.backward()
                if i > 20 and not i % 3:
                    loss.backward()
                losses.append(float(loss.array))
                del loss
                optimizer.update()
        return networks.outcome(model, losses), session

    expected, _ = train()
    result, session = train(
        memory_limit=3_300_000, planner=planner, link_bandwidth='1GB/s'
    )
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] > 10


class Ordered(chainer.Chain):
    """A function reads an array that the program gives it, and no forward makes."""

    def __init__(self):
        super().__init__(dense=chainer.links.Linear(64, 64))

    def forward(self, x):
        order = np.arange(len(x))[::-1].copy()
        return F.sum(F.sin(F.permutate(F.tanh(self.dense(x)), order)))

    @staticmethod
    def batch(data):
        return (data.rand(1000, 64).astype('f'),)


@pytest.mark.parametrize('use', USES, ids=lambda use: use.__name__)
def test_what_the_program_has_given_to_a_function_is_there(use):
    network = types.SimpleNamespace(make=Ordered, batch=Ordered.batch)
    plain = Training(network, use)
    expected = [plain.step(i) for i in range(ITERATIONS)]
    training = Training(network, use)
    limit = {'memory_limit': 1_300_000, 'link_bandwidth': '1GB/s'}
    with chainer_hybridmem.optimize(training.model, planner='swap-opt', **limit):
        assert [training.step(i) for i in range(ITERATIONS)] == expected


@chainer_hybridmem.recomputable
class Overwriting(chainer.Function):
    """Its backward writes over what forward has kept."""

    def forward(self, inputs):
        self.retain_inputs(())
        self.slope = inputs[0] * 0 + np.float32(0.5)
        return (inputs[0] * self.slope,)

    def backward(self, inputs, grads):
        self.slope *= np.float32(0.5)
        return (grads[0] * self.slope,)


@chainer_hybridmem.recomputable
class OverwritingList(Overwriting):
    """It keeps a list."""

    def forward(self, inputs):
        self.retain_inputs(())
        self.kept = [inputs[0] * 0, inputs[0] * 0 + np.float32(0.25)]
        return (inputs[0] * np.float32(0.25),)

    def backward(self, inputs, grads):
        self.kept[1] += grads[0]
        return (grads[0] * (self.kept[0] + self.kept[1]),)


class Overwritten(Ordered):
    kind = Overwriting

    def forward(self, x):
        return F.sum(F.sin(self.kind()(F.tanh(self.dense(x)))))


class OverwrittenList(Overwritten):
    kind = OverwritingList


@pytest.mark.parametrize(
    ('network', 'kept'),
    [
        (Ordered, set()),
        (Overwritten, {'slope'}),
        (OverwrittenList, {'kept.0', 'kept.1'}),
    ],
)
def test_a_replay_does_not_make_what_backward_has_written_over(network, kept):
    """It begins with that, as with the mask of a dropout."""
    training = Training(types.SimpleNamespace(make=network, batch=Ordered.batch), twice)
    with chainer_hybridmem.optimize(training.model, '1GB', planner='in-core') as opened:
        while opened.profile is None:
            training.step(0)
    recipes = opened.profile.recipes
    assert set().union(*(recipe.attributes for recipe in recipes)) == kept
    for recipe in recipes:
        slots = zip(recipe.products, recipe.sources, strict=True)
        read = {slot.key for storage, slot in slots if storage in recipe.inputs}
        assert read == set(recipe.attributes)


@pytest.mark.parametrize('kind', [list, tuple])
def test_a_function_that_runs_again_has_a_place_for_each_array_that_is_away(kind):
    function, arrays = Overwriting(), [np.zeros(2), np.ones(2)]
    function.kept = kind(arrays)
    places.take_attribute(function, 'kept.0', None)
    again = graph.pristine(function).copied()
    assert list(again.kept) == [None, arrays[1]]
    places.put_attribute(again, 'kept.0', arrays[0])
    assert all(map(np.array_equal, again.kept, arrays))
    assert list(places.away_values(function)) == ['kept']


@chainer_hybridmem.recomputable
class OverwritingNode(chainer.FunctionNode):
    """New style."""

    def forward(self, inputs):
        self.slope = inputs[0] * 0 + np.float32(0.5)
        return (inputs[0] * self.slope,)

    def backward(self, indexes, grads):
        self.slope *= np.float32(0.5)
        return (grads[0] * self.slope,)


@pytest.mark.parametrize(
    'kind', ['@numpy', pytest.param('@cupy:0', marks=pytest.mark.gpu)]
)
def test_what_backward_has_written_over_leaves_as_it_is_then(kind):
    """Whatever the host can compare, its copy from before is not what comes back."""
    device = chainer.get_device(kind)

    def train(**options):
        np.random.seed(0)
        model = chainer.Chain(dense=chainer.links.Linear(64, 64))
        model.to_device(device)
        optimizer = chainer.optimizers.SGD().setup(model)
        losses = []
        with networks.session_for(model, options) as session:
            for i in range(ITERATIONS):
                h = model.dense(device.send(np.random.rand(200, 64).astype('f')))
                for _ in range(3):
                    (h,) = OverwritingNode().apply((F.sigmoid(h),))
                loss = F.sum(h)
                model.cleargrads()
                loss.backward()
                if i == USUAL:
                    loss.backward()
                losses.append(float(loss.array))
                del h, loss
                optimizer.update()
        return networks.outcome(model, losses), session

    expected, _ = train()
    result, session = train(memory_limit='1GB', planner='swap-all')
    networks.assert_same(expected, result)
    assert session.statistics()['swap'] > 3
