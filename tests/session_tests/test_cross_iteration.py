"""Parameters and optimizer states that leave during the iteration: the same bits."""

from __future__ import annotations

import contextlib
import copy
import functools

import numpy as np
import pytest
from support import networks
from support.virtual import Machine

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning import planners
from chainer_hybridmem.planning.planners.hybrid import hybrid
from chainer_hybridmem.planning.planners.uniform import swap_all
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.search.relaxed import relaxed
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.devices.ports import Arrays
from chainer_hybridmem.training.execution.crossing import PersistentMap
from chainer_hybridmem.training.execution.live_map import State
from chainer_hybridmem.training.execution.mover import Mover
from chainer_hybridmem.training.execution.replayer import Restorer

OPTIMIZERS = {
    'momentum': lambda: chainer.optimizers.MomentumSGD(0.01),
    'adam': lambda: chainer.optimizers.Adam(0.001),
}
ITERATIONS = 6


@pytest.fixture
def known_link(machine: Machine | None) -> None:
    """A fast one: over a slower one parameters come back too early to tell."""
    if machine is not None:
        machine.change(link=1e10)


class Wide(chainer.Chain):
    """A dense layer whose parameters are in the way of what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.one = L.Linear(3 * 16 * 16, 4 * 16 * 16)
            self.conv = L.Convolution2D(4, 8, 3, pad=1)
            self.bn = L.BatchNormalization(8)
            self.two = L.Linear(8 * 8 * 8, 10)

    def forward(self, x, t):
        h = F.reshape(F.tanh(self.one(x)), (-1, 4, 16, 16))
        h = F.max_pooling_2d(F.relu(self.bn(self.conv(h))), 2)
        return F.softmax_cross_entropy(self.two(F.dropout(h, 0.3)), t)


class Run:
    """A model that is trained step by step."""

    def __init__(self, optimizer: str = 'momentum') -> None:
        np.random.seed(0)
        self.model = Wide()
        self.optimizer = OPTIMIZERS[optimizer]().setup(self.model)
        self.optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
        self.data = networks.batches(ITERATIONS, 96, 16)
        self.losses: list[float] = []

    def forward(self, x, t):
        loss = self.model(x, t)
        self.model.cleargrads()
        return loss

    def update(self, loss) -> None:
        loss.backward()
        self.losses.append(float(loss.array))
        del loss
        self.optimizer.update()

    def train(self, steps: int = ITERATIONS) -> None:
        for x, t in self.data[:steps]:
            self.update(self.forward(x, t))

    def outcome(self):
        result = networks.outcome(self.model, self.losses)
        for path, parameter in self.model.namedparams():
            for name, state in parameter.update_rule.state.items():
                result[f'{path}:{name}'] = state
        return result

    def session(self, **options):
        standard = {'memory_limit': '1GB', 'planner': 'swap-all'}
        standard['cross_iteration'] = 'all'
        return hybridmem.optimize(self.model, **{**standard, **options})


@functools.cache
def in_core(optimizer: str = 'momentum'):
    run = Run(optimizer)
    run.train()
    return run.outcome()


@functools.cache
def least_bytes(optimizer: str) -> dict[bool | str, int]:
    """The smallest limits of the model, by what may leave."""
    run = Run(optimizer)
    with run.session() as session:
        run.train(4)
    return {
        kind: least_memory(make_problem(session.profile, kind))[0]
        for kind in (False, 'states', 'all')
    }


def moved(session) -> set[str]:
    """Names of parameters and states that the plan swaps."""
    storages = session.profile.storages
    return {
        storages[entry.storage].label
        for entry in session.plan.maps
        if entry.action is Action.SWAP and storages[entry.storage].persistent
    }


class Tied(chainer.Chain):
    """One weight is also used transposed: a view of it stays in the graph."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.code = L.Linear(768, 32, nobias=True)
            self.last = L.Linear(768, 10)

    def forward(self, x, t):
        h = F.linear(F.tanh(self.code(x)), F.transpose(self.code.W))
        return F.softmax_cross_entropy(self.last(h), t)


def test_what_a_recording_says_about_them():
    run = Run('adam')
    with run.session(cross_iteration=False) as session:
        run.train(4)
    profile = session.profile
    by_name = {s.label: s for s in profile.persistent_storages()}
    weight, state = by_name['/one/W'], by_name['/one/W:m']
    update = len(profile.operations) - 1
    (reader,) = weight.forward_uses
    assert profile.operations[reader].function == 'LinearFunction'
    (backward,) = (op.index for op in profile.operations if op.forward == reader)
    assert weight.backward_uses == (backward, update)
    assert (weight.releasable_from, state.releasable_from) == (reader + 1, 0)
    assert (state.forward_uses, state.backward_uses) == ((), (update,))
    assert weight.nbytes == state.nbytes == run.model.one.W.array.nbytes
    assert '/conv/b' not in by_name  # too small
    assert len(make_problem(profile).maps) == len(profile.feature_maps())


def test_a_weight_that_is_viewed_by_the_graph_stays():
    outcomes = []
    for guided in (False, True):
        run = Run()
        run.model = Tied()
        run.optimizer = chainer.optimizers.MomentumSGD(0.01).setup(run.model)
        with run.session() if guided else contextlib.nullcontext() as session:
            run.train()
        outcomes.append(run.outcome())
    networks.assert_same(*outcomes)
    assert moved(session) == {'/code/W:v', '/last/W', '/last/W:v'}


def test_a_plan_needs_less():
    least = least_bytes('momentum')
    assert least['all'] < least['states'] < least[False]


@pytest.mark.parametrize('crossing', ['states', 'all'])
def test_states_leave_in_recorded_iterations_too(crossing):
    """The limit is less than anything needs that leaves them where they are."""
    least = least_bytes('momentum')
    limit = (least['states'] + least[False]) // 2
    run = Run()
    options = {'memory_limit': limit, 'planner': 'hybrid', 'arena': False}
    with run.session(cross_iteration=crossing, **options) as session:
        run.train()
    networks.assert_same(in_core(), run.outcome())
    figures = session.statistics()
    assert figures['guided_iterations'] == ITERATIONS - 3
    assert figures['peak_bytes'] <= limit
    assert figures['guided_peak_bytes'] == pytest.approx(
        figures['predicted_peak_bytes'], rel=0.01
    )


def test_what_leaves_while_recording_is_recorded_as_if_it_stayed():
    profiles = []
    for crossing in (False, 'all'):
        run = Run('adam')
        with run.session(cross_iteration=crossing) as session:
            run.train(4)
        profiles.append(session.profile)
    one, other = profiles
    assert one.storages == other.storages
    assert one.events == other.events
    assert one.initial_bytes == other.initial_bytes
    assert one.graph_end_event == other.graph_end_event


@pytest.fixture
def early(monkeypatch):
    """Planner ``early``: everything is swapped, and away for as long as possible."""

    def plan(problem, limit_bytes):
        return relaxed(problem, swap_all(problem, limit_bytes), margin=0)

    monkeypatch.setitem(planners.PLANNERS, 'early', plan)


def is_away(run) -> bool:
    """Whether the largest parameter and its state are away; nobody notices."""
    parameter = run.model.one.W
    state = parameter.__dict__['update_rule'].__dict__['_state']
    return parameter.__dict__['_data'][0] is None and state['v'] is None


@pytest.mark.matrix
@pytest.mark.parametrize('crossing', ['states', 'all'])
@pytest.mark.parametrize('optimizer', list(OPTIMIZERS))
def test_same_bits(optimizer, crossing, early):
    run = Run(optimizer)
    with run.session(planner='early', cross_iteration=crossing) as session:
        run.train()
    networks.assert_same(in_core(optimizer), run.outcome())
    figures = session.statistics()
    assert figures['deviations'] == figures['evictions'] == figures['restores'] == 0
    assert figures['guided_peak_bytes'] == pytest.approx(
        figures['predicted_peak_bytes'], rel=0.01
    )
    names = moved(session)
    states = {'/one/W:v', '/one/b:v', '/two/W:v'}
    if optimizer == 'adam':
        states |= {'/one/W:m', '/one/b:m', '/two/W:m'}
    assert {name for name in names if ':' in name} == states
    parameters = {'/one/W', '/one/b', '/two/W'} if crossing == 'all' else set()
    assert names - states == parameters


@pytest.mark.parametrize('crossing', ['states', 'all'])
def test_same_bits_under_less_memory(crossing, monkeypatch):
    """Under a plan for less than any plan needs that leaves them where they are."""
    least = least_bytes('momentum')
    tight = (least[crossing] + least[False]) // 2
    monkeypatch.setitem(
        planners.PLANNERS, 'tight', lambda problem, limit: hybrid(problem, tight)
    )
    run = Run()
    with run.session(planner='tight', cross_iteration=crossing) as session:
        run.train()
    networks.assert_same(in_core(), run.outcome())
    figures = session.statistics()
    assert figures['guided_iterations'] == ITERATIONS - 3
    assert figures['deviations'] == figures['evictions'] == figures['restores'] == 0
    assert figures['guided_peak_bytes'] <= tight < least[False]
    assert figures['guided_peak_bytes'] == pytest.approx(
        figures['predicted_peak_bytes'], rel=0.01
    )
    assert any(':' in name or crossing == 'all' for name in moved(session))


@pytest.mark.parametrize('arena', [True, False])
def test_poisoned_memory_and_late_copies_change_nothing(hostile, early, arena):
    run = Run('adam')
    with run.session(planner='early', arena=arena):
        run.train()
    networks.assert_same(in_core('adam'), run.outcome())


def test_a_return_that_is_left_out_is_noticed(hostile, early, monkeypatch):
    """The tests here would notice memory that nothing has been copied to."""

    def arrive_empty(self):
        if self.state is State.AWAY:
            self._arrived(self._device.memory.allocate(self.nbytes))
        return 0

    monkeypatch.setattr(PersistentMap, 'start_swap_in', arrive_empty)
    run = Run()
    with np.errstate(all='ignore'), run.session(planner='early'):
        run.train()
    with pytest.raises(AssertionError):
        networks.assert_same(in_core(), run.outcome())


def test_what_the_plan_forgets_comes_home_when_it_is_asked_for(monkeypatch):
    """Neither the update nor anybody else ever sees an array that is away."""
    monkeypatch.setattr(Mover, 'finish_swap_in', lambda *_: None)
    monkeypatch.setattr(Restorer, 'bring_back', bring_back_slowly)
    run = Run()
    with run.session() as session:
        run.train()
    networks.assert_same(in_core(), run.outcome())
    assert session.last_iteration()['restores'] > 0


def bring_back_slowly(self, live):
    self._mover.counters.count_restore()
    live.start_swap_in()
    live.finish_swap_in()


def look_at_parameters(model):
    return [float(parameter.array.sum()) for parameter in model.params()]


def look_at_states(model):
    states = [parameter.update_rule.state or {} for parameter in model.params()]
    return [float(value.sum()) for state in states for value in state.values()]


def evaluate(model):
    x, t = networks.batches(1, 5, 16)[0]
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        return [float(model(x, t).array)]


def save(model):
    target = chainer.serializers.DictionarySerializer()
    target.save(model)
    for path, parameter in model.namedparams():
        parameter.update_rule.serialize(target[f'rules{path}'])
    return [float(np.sum(v)) for v in target.target.values() if v is not None]


def copy_parameters(model):
    others = [copy.copy(parameter) for parameter in model.params()]
    assert {type(other) for other in others} == {chainer.Parameter}
    return look_at_parameters(copy.deepcopy(model.one)) + [
        float(other.array.sum()) for other in others
    ]


def copy_rules(model):
    others = [copy.copy(parameter.update_rule) for parameter in model.params()]
    return [float(o.state['v'].sum()) for o in others if o.state]


def put_another_array(model):
    model.one.W.array = model.one.W.array * 1
    return []


LOOKS = [look_at_parameters, look_at_states, evaluate, save]
LOOKS += [copy_parameters, copy_rules, put_another_array]


@pytest.mark.parametrize('look', LOOKS)
def test_whoever_looks_between_forward_and_backward_sees_everything(look, early):
    """Everything has left by then, and whoever looks gets what in-core training has."""
    seen: dict[bool, list] = {True: [], False: []}
    outcomes = []
    for guided in (False, True):
        run = Run()
        run.data = [(x[:16], t[:16]) for x, t in run.data]
        with run.session(planner='early') if guided else contextlib.nullcontext():
            for x, t in run.data:
                loss = run.forward(x, t)
                if guided and len(seen[guided]) >= 3 and look is not put_another_array:
                    assert is_away(run)
                seen[guided].append(look(run.model))
                run.update(loss)
                del loss
        outcomes.append(run.outcome())
    networks.assert_same(*outcomes)
    assert seen[False] == seen[True]


def test_an_array_that_somebody_holds_stays_the_same_one():
    run = Run()
    held = run.model.one.W.array
    with run.session() as session:
        run.train()
        assert np.shares_memory(held, run.model.one.W.array)
    networks.assert_same(in_core(), run.outcome())
    assert '/one/W' in moved(session)


def test_memory_to_which_there_are_no_weak_references():
    """The array tells whether anybody has its memory."""

    class Stand:
        def root(self, array):
            return (array.ctypes.data,)

    array = np.zeros(3)
    address = array.ctypes.data
    held = Arrays.track(Stand(), array)
    assert held() == (address,)
    del array
    assert held() is None


def test_a_changed_parameter_is_not_brought_back_as_it_was():
    """Clipping between forward and backward, while the copy is on its way."""
    outcomes = []
    for guided in (False, True):
        run = Run()
        run.data = [(x[:16], t[:16]) for x, t in run.data]
        slow = {'link_bandwidth': '20MB/s', 'arena': False}
        with run.session(**slow) if guided else contextlib.nullcontext():
            for x, t in run.data:
                loss = run.forward(x, t)
                for parameter in run.model.params():
                    np.clip(parameter.array, -0.03, 0.03, out=parameter.array)
                run.update(loss)
                del loss
        outcomes.append(run.outcome())
    networks.assert_same(*outcomes)


@pytest.mark.parametrize('when', ['forward', 'backward'])
def test_everything_is_there_after_an_error(when, early, monkeypatch):
    run, error = Run(), KeyboardInterrupt('now')

    def fail(*_):
        raise error

    with pytest.raises(KeyboardInterrupt), run.session(planner='early'):
        run.train(5)
        before = {key: value.copy() for key, value in run.outcome().items()}
        x, t = run.data[5]
        loss = run.forward(x, t)
        assert is_away(run)
        if when == 'forward':
            fail()
        monkeypatch.setattr(type(loss.creator), 'backward', fail)
        loss.backward()
    for key, value in run.outcome().items():
        if key in before and not key.endswith('.grad') and 'avg' not in key:
            assert np.array_equal(value, before[key]) or key in ('random', '/bn.N'), key
    assert all(type(p) is chainer.Parameter for p in run.model.params())


def test_another_shape_in_the_middle():
    """An iteration that leaves its plan, and one that is new."""
    outcomes = []
    for guided in (False, True):
        run = Run()
        run.data += [(x[:7], t[:7]) for x, t in run.data[:5]]
        run.data += run.data[:2]
        with run.session() if guided else contextlib.nullcontext():
            run.train(len(run.data))
        outcomes.append(run.outcome())
    networks.assert_same(*outcomes)


def test_two_iterations_without_an_update():
    """Gradients are accumulated; nothing is updated in between."""
    outcomes = []
    for guided in (False, True):
        run = Run()
        with run.session() if guided else contextlib.nullcontext():
            for i, (x, t) in enumerate(run.data):
                loss = run.model(x[:16], t[:16])
                if i % 2 == 0:
                    run.model.cleargrads()
                loss.backward()
                del loss
                if i % 2:
                    run.optimizer.update()
        outcomes.append(run.outcome())
    networks.assert_same(*outcomes)


def test_a_shared_parameter_stays():
    """Two models with one placeholder cannot know of each other."""
    run = Run()
    other = run.model.copy()
    with run.session():
        for x, t in run.data:
            loss = run.forward(x, t)
            assert other.one.W.array is run.model.one.W.array
            run.update(loss)
            del loss
    networks.assert_same(in_core(), run.outcome())


def test_what_cannot_be():
    with pytest.raises(OptionError, match="'yes'; False, True, 'states'"):
        hybridmem.optimize(Wide(), '1GB', cross_iteration='yes')
    with pytest.raises(OptionError, match='cross_iteration is 1'):
        hybridmem.HybridMemory('1GB', cross_iteration=1)
