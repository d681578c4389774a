"""Functions of the program: never run again unless they are declared."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F

from chainer_hybridmem.errors import OptionError, SessionError, VerificationError
from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access import graph, own_code
from chainer_hybridmem.training.recompute import effects, trust

ITERATIONS = 9
PLANNERS = ['checkpoint-speed', 'in-core']


class Function(chainer.FunctionNode):
    """Multiplies by what a callable gives, or by two."""

    def __init__(self, factor=None):
        self.factor = factor

    def forward(self, inputs):
        (x,) = inputs
        self.retain_outputs((0,))
        factor = 2 if self.factor is None else self.factor(x)
        return (x * np.asarray(factor).astype(x.dtype),)

    def backward(self, indexes, gradients):
        (y,) = self.get_retained_outputs()
        return (gradients[0] * F.sigmoid(y),)


class Program(networks.Ends):
    """A network with such a function; subclasses say what it multiplies by."""

    function = Function

    def __init__(self):
        super().__init__()
        self.own = np.random.RandomState(1)
        self.new = np.random.default_rng(2)
        self.average, self.count, self.history = 1.0, 0, []
        self.codebook = np.ones(3, np.float32)

    def forward(self, x, t):
        self.calls += 1
        h = F.sigmoid(self.conv(x))
        (h,) = self.function(self.factor).apply((h,))
        h = F.tanh(F.sigmoid(h))
        return F.softmax_cross_entropy(self.last(F.tanh(h)), t)


class OwnRandomState(Program):
    def factor(self, x):
        return self.own.rand(*x.shape)


class NewGenerator(Program):
    def factor(self, x):
        return self.new.random(x.shape)


class PythonsRandom(Program):
    def factor(self, x):
        return random.random()


class RunningAverage(Program):
    def factor(self, x):
        self.average = 0.9 * self.average + 0.1 * float(x.mean())
        return self.average


class Counting(Program):
    def factor(self, x):
        self.count += 1
        self.history.append(self.count)
        return 1 + 1 / self.count


class Codebook(Program):
    def factor(self, x):
        self.codebook *= 0.9
        self.codebook += float(x.mean())
        return self.codebook.mean()


class NoiseThatStartsLater(Program):
    def factor(self, x):
        return self.own.rand(*x.shape) if self.calls > 6 else 1.5


class SettingOfTheLink(Program):
    """Reads what is another number when backward runs."""

    def factor(self, x):
        return self.average

    def forward(self, x, t):
        self.average = 1.5
        loss = super().forward(x, t)
        self.average = 0.5
        return loss


class SettingOfChainer(Program):
    def factor(self, x):
        return 3 if chainer.config.train else 1


PROGRAMS = [
    *(OwnRandomState, NewGenerator, PythonsRandom, RunningAverage, Counting),
    *(Codebook, NoiseThatStartsLater, SettingOfTheLink, SettingOfChainer),
]


def run(program, data, **options):
    """What must be equal, with the state of everything that programs move."""
    random.seed(0)
    kept = []
    result, session = networks.train(
        program, data, before=lambda model, i: kept.append(model), **options
    )
    model = kept[0]
    moved = (random.random(), model.own.rand(), model.new.random(), model.average)
    result['moved'] = np.array([*moved, model.count, len(model.history)])
    result['codebook'] = model.codebook
    return result, session


@pytest.mark.matrix
@pytest.mark.parametrize('program', PROGRAMS)
@pytest.mark.parametrize('planner', PLANNERS)
def test_a_function_of_the_program_runs_once(program, planner, data):
    expected = run(program, data)[0]
    result, session = run(program, data, memory_limit='1GB', planner=planner)
    networks.assert_same(expected, result)
    assert session.statistics()['untrusted'] == ['Function']


class Handle(Function):
    """Gives something back when it goes, as a wrapper of a native library does."""

    living: list[int] = []

    def __init__(self, factor=None):
        super().__init__(factor)
        self.handle = len(Handle.living)
        Handle.living.append(1)

    def __del__(self):
        Handle.living[self.handle] -= 1


@pytest.mark.parametrize('planner', [None, *PLANNERS])
def test_nor_is_it_copied(planner, data):
    """A copy would give back what is not its own."""
    Handle.living.clear()
    run(type('Handling', (Program,), {'function': Handle, 'factor': None}), data,
        memory_limit='1GB', planner=planner)  # fmt: skip
    assert set(Handle.living) <= {0, 1} and Handle.living.count(0) > ITERATIONS - 2


def test_the_report_names_it(data):
    _, session = run(Counting, data, memory_limit='1GB', planner='checkpoint-speed')
    assert 'never recomputed (see recomputable)' in session.report()


@hybridmem.recomputable
class Declared(Function):
    """May be run again, as the program says."""


def declared(program):
    return type(program.__name__, (program,), {'function': Declared})


class Harmless(Program):
    factor = None


def test_what_is_declared_is_recomputed(data):
    network = declared(Harmless)
    expected = run(network, data)[0]
    options = {'memory_limit': '1GB', 'planner': 'checkpoint-speed', 'verify': True}
    result, session = run(network, data, **options)
    networks.assert_same(expected, result)
    assert session.statistics()['untrusted'] == []
    operations = session.profile.operations
    labels = [operations[replay.operation].label for replay in session.plan.replays]
    assert any(label.endswith('Declared') for label in labels)


@pytest.mark.parametrize(
    'program, what',
    [
        (OwnRandomState, 'own'),
        (NewGenerator, 'new'),
        (PythonsRandom, "Python's random state"),
        (RunningAverage, 'average'),
        (Counting, 'count'),
        (Codebook, 'codebook'),
    ],
)
def test_a_wrong_declaration_is_found_in_the_trial(program, what, data):
    class Wrong(program):
        def forward(self, x, t):
            h = F.sigmoid(self.conv(x))
            (h,) = Declared(self.factor).apply((h,))
            return F.softmax_cross_entropy(self.last(F.tanh(F.sigmoid(h))), t)

    with pytest.raises(SessionError, match=f'again has changed .*{what}'):
        run(Wrong, data, memory_limit='1GB', planner='checkpoint-speed')


@pytest.mark.parametrize('verify', [False, True])
@pytest.mark.parametrize('planner', ['checkpoint-sqrt', 'checkpoint-speed'])
def test_a_wrong_declaration_is_found_later(planner, verify, data):
    """One clear error before any wrong gradient is used."""
    options = {'memory_limit': '1GB', 'planner': planner, 'verify': 9 * verify}
    for program in map(declared, (NoiseThatStartsLater, SettingOfTheLink)):
        expected = run(program, data)[0]
        try:
            result, _ = run(program, data, **options)
        except (SessionError, VerificationError) as error:
            assert 'again' in str(error) or 'as forward has made it' in str(error)
        else:
            assert planner != 'checkpoint-speed'
            networks.assert_same(expected, result)


@pytest.mark.parametrize('planner', ['checkpoint-sqrt', 'checkpoint-speed', 'hybrid'])
def test_chainers_settings_are_those_of_forward(planner, data):
    """RReLU slopes by chance while it trains, and always alike in tests."""

    class Leaky(networks.Ends):
        def forward(self, x, t):
            h = F.rrelu(F.sigmoid(self.conv(x)) - 0.5)
            return F.softmax_cross_entropy(self.last(F.tanh(F.sigmoid(h))), t)

    def train(**options):
        np.random.seed(0)
        model = Leaky()
        optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
        losses = []
        with networks.session_for(model, options) as session:
            for batch in data:
                loss = model(*batch)
                model.cleargrads()
                with chainer.using_config('train', False):
                    loss.backward()
                losses.append(float(loss.array))
                del loss
                optimizer.update()
        return networks.outcome(model, losses), session

    expected = train()[0]
    result, session = train(memory_limit='1GB', planner=planner)
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] > 3


@pytest.mark.parametrize(
    'function',
    [
        F.noise.dropout.Dropout(0.5),
        F.activation.relu.ReLU(),
        F.connection.convolution_2d.Convolution2DFunction(),
        F.normalization.batch_normalization.BatchNormalization(2e-5, None, None, 0.9),
        F.array.get_item.GetItem((slice(None), ..., 3)),
        F.math.basic_math.PowVarConst(2),
        F.array.split_axis.SplitAxis(2, 1),
        F.math.tensordot.TensorDot(2),
        F.loss.hinge.Hinge(),
        F.rnn.tree_lstm.TreeLSTM(),
    ],
)
def test_chainers_own_functions_are_trusted(function):
    old_style = isinstance(function, chainer.Function)
    assert trust.may_replay(function.node if old_style else function)


def test_modules_are_not_looked_into():
    function = F.array.split_axis.SplitAxis(2, 1)
    function.forward((np.zeros((4, 4), 'f'),))
    reached = effects.surroundings([('SplitAxis', function)])
    assert 'SplitAxis/axis' in reached and len(reached) < 20


def test_what_calls_the_program_is_not():
    from chainer.functions.loss.negative_sampling import NegativeSamplingFunction
    from chainer.functions.util.forget import Forget

    def sampler(shape):
        return np.zeros(shape, 'i')

    assert not trust.may_replay(Forget(lambda x: x))
    assert not trust.may_replay(NegativeSamplingFunction(sampler, 3))
    relu = F.activation.relu.ReLU()
    relu.forward = lambda inputs: inputs
    assert not trust.may_replay(relu)


def test_a_method_that_the_program_has_replaced_is_not(monkeypatch):
    kind = F.activation.sigmoid.Sigmoid
    original = kind.forward_cpu
    assert trust.may_replay(kind())
    monkeypatch.setattr(kind, 'forward_cpu', lambda self, x: original(self, x))
    own_code.look_anew()
    assert not trust.may_replay(kind())


@pytest.mark.parametrize('since', [0, 6])
@pytest.mark.parametrize(
    'holder, name',
    [
        (F.activation.sigmoid.Sigmoid, 'forward_cpu'),
        (F.connection.convolution_2d.Convolution2DFunction, '_forward_cpu_core'),
        (chainer.utils, 'force_array'),
    ],
)
@pytest.mark.parametrize('options', [{'planner': 'checkpoint-speed'}, {}])
def test_code_that_is_replaced_runs_as_often_as_in_plain_chainer(
    options, holder, name, since, data, monkeypatch
):
    original, calls = getattr(holder, name), []

    def train(**options):
        own = np.random.RandomState(3)
        calls.clear()

        @functools.wraps(original)
        def noisy(*args):
            calls.append(1)
            made = original(*args)
            y = made[0] if isinstance(made, tuple) else made
            y += own.rand(*y.shape).astype(y.dtype)
            return made

        def before(model, i):
            if i == since:
                for place in (holder, F.activation.sigmoid.utils):
                    if hasattr(place, name):
                        monkeypatch.setattr(place, name, noisy)

        result, _ = networks.train(Harmless, data, before=before, **options)
        monkeypatch.undo()
        return result, len(calls)

    expected, often = train()
    result, how_often = train(memory_limit='1GB', **options)
    networks.assert_same(expected, result)
    assert how_often == often


@hybridmem.recomputable
class CountingInItsClass(Function):
    count = 0

    def forward(self, inputs):
        type(self).count += 1
        return super().forward(inputs)


def test_a_counter_of_the_class_is_found_in_the_trial(data):
    class Wrong(Harmless):
        function = CountingInItsClass

    with pytest.raises(SessionError, match='again has changed class .*count'):
        run(Wrong, data, memory_limit='1GB', planner='swap-all')


@hybridmem.recomputable
class Holding(Function):
    def __init__(self):
        super().__init__()
        self.mask = np.ones(2000, np.float32)
        self.masks = [np.ones(2000, np.float32), np.zeros(2000, np.float32)]


@pytest.mark.parametrize('key', ['mask', 'masks.1'])
@pytest.mark.parametrize('again', [False, True])
def test_an_attribute_that_leaves_in_a_trial_is_no_change(key, again):
    function = Holding()
    array = graph.read_attribute(function, key)
    slot = Slot(0, SlotKind.ATTRIBUTE, key)
    reference = graph.refer(slot, function, array)
    if again:
        reference.put(None)
    with trust.effects_refused(function):
        reference.put(array if again else None)
    reference.put(array)
    with pytest.raises(SessionError, match='has changed Holding/masks/0, and'):
        with trust.effects_refused(function):
            reference.put(None)
            reference.put(array)
            function.masks[0][5] = 3


class Derived(Declared):
    """Not declared with its base."""


@hybridmem.recomputable
class OldStyle(chainer.Function):
    def forward(self, inputs):
        return inputs


def test_a_declaration_is_for_one_class():
    assert trust.may_replay(Declared())
    assert not trust.may_replay(Derived())
    function = OldStyle()
    function(np.zeros(3, 'f'))
    assert trust.may_replay(function.node)


@pytest.mark.parametrize('kind', [networks.Ends, Declared(), 3])
def test_only_functions_can_be_declared(kind):
    with pytest.raises(OptionError, match='a class derived from'):
        hybridmem.recomputable(kind)
