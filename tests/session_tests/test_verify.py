"""Sessions that check whether backward reads what forward has made."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F

from chainer_hybridmem.errors import OptionError, SessionError, VerificationError
from chainer_hybridmem.planning import planners
from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.execution import verifier
from chainer_hybridmem.training.execution.executor import Executor
from chainer_hybridmem.training.execution.live_map import LiveMap
from chainer_hybridmem.training.session.extension import HybridMemory
from chainer_hybridmem.training.session.session import active_session

LIMIT = 3_700_000  # bytes; Everything needs 5.2 MB in-core
ITERATIONS = 7
RECORDED = 3


def run(data, planner='swap-all', **options):
    options = {'memory_limit': LIMIT, 'verify': True, 'planner': planner, **options}
    if planner in networks.BLIND:
        options['memory_limit'] = '1GB'
    options |= networks.OPTIONS.get(planner, {})
    return networks.train(networks.Everything, data, **options)


def while_guided(action):
    """Acts when a guided iteration has come to backward, and then never again."""
    done = []

    def act(*args):
        session = active_session()
        if (
            not done
            and session.state == 'guided'
            and session._loop.iteration.backward_seen
        ):
            done.append(action(*args))

    return act


@pytest.mark.matrix(every=4)  # test_zoo.py compares bits under every planner
@pytest.mark.parametrize(
    'planner', [p for p in planners.PLANNERS if p not in ('exact', 'autoswap-bo')]
)
def test_every_planner_is_right(planner, data):
    _, session = run(data[:5], planner)
    verdict = session.verdict
    assert verdict.iterations == session.statistics()['verified_iterations'] == 2
    maps = len(session.profile.feature_maps())
    assert 2 * (maps - 2) <= verdict.maps <= 2 * (maps + 2)
    assert verdict.compared_bytes > 2_000_000 and verdict.seconds > 0
    assert bool(verdict.replays) == bool(session.statistics()['recompute'])
    assert f'2 iterations, {verdict.maps} maps, ' in session.report()
    assert 'every bit as forward made it' in session.report()


def test_nothing_is_looked_at_where_nobody_asks(data, monkeypatch):
    looks = []
    monkeypatch.setattr(verifier.Verifier, '_prints', looks.append)
    _, session = run(data, verify=False)
    assert not looks
    assert session.verdict is None and 'verified' not in session.report()
    assert session.statistics()['verified_iterations'] == 0


def test_only_so_many_are_verified_and_none_of_them_is_timed(data):
    _, session = run(data, verify=2, arena=False)  # times wait for an arena
    entries = networks.entries_of(session)
    verified = [bool(entry['verified']) for entry in entries]
    assert verified == [False] * RECORDED + [True] * 2 + [False] * 2
    assert (
        len(session._loop.iteration.following.guide.pace.timings) == 1
    )  # nobody has ended the last one
    seconds = [entry['seconds'] for entry in entries[RECORDED + 2 :]]
    assert session.iteration_times() == seconds
    assert session.statistics()['iteration_seconds'] == pytest.approx(np.mean(seconds))


def test_the_arena_is_laid_out_meanwhile(data, in_core):
    result, session = run(data, verify=4, memory_limit=4_400_000)
    networks.assert_same(in_core, result)
    assert session.last_iteration()['placed'] > 50
    assert session.verdict.iterations == 4


def test_a_wrong_bit_in_a_swap_in_is_found(data, monkeypatch):
    """At once, with all that is needed to find it."""
    arrived = LiveMap._arrived

    @while_guided
    def flip(root):
        root[len(root) // 2] ^= 1

    def wrong(self, root):
        if root.dtype == 'u1':  # what a swap-in has filled
            flip(root)
        arrived(self, root)

    monkeypatch.setattr(LiveMap, '_arrived', wrong)
    with pytest.raises(VerificationError) as raised:
        run(data)
    message = str(raised.value)
    for part in ('Feature map', 'operation', 'planned: swap', 'as forward has made it'):
        assert part in message
    assert "planner='in-core'" in message and "'swap-all'" in message


def test_without_verification_nobody_finds_it(data, in_core, monkeypatch):
    arrived = LiveMap._arrived

    def wrong(self, root):
        if root.dtype == 'u1':
            root[len(root) // 2] ^= 64
        arrived(self, root)

    monkeypatch.setattr(LiveMap, '_arrived', wrong)
    result, _ = run(data, verify=False)
    with pytest.raises(AssertionError):
        networks.assert_same(in_core, result)


def test_a_wrong_bit_in_a_replay_is_found(data, monkeypatch):
    refill = LiveMap.refill

    @while_guided
    def flip(root):
        root.reshape(-1).view(np.uint8)[7] ^= 1

    def wrong(self, root, what):
        flip(root)
        refill(self, root, what)

    monkeypatch.setattr(LiveMap, 'refill', wrong)
    with pytest.raises(VerificationError, match='planned: recompute'):
        run(data, 'checkpoint-sqrt')


def test_a_map_that_is_overwritten_before_it_is_read_is_found(data, monkeypatch):
    """One that has never left: what lands in it is not its own."""
    before = Executor.before_backward

    @while_guided
    def spoil(executor, k, function):
        maps = executor.maps
        live = next(m for m in maps if m.uses and m.storage >= 0 and not m.host.valid)
        array = live.slots.find_array()
        array[...] = 0

    def wrong(self, k, function):
        before(self, k, function)
        spoil(self, k, function)

    monkeypatch.setattr(Executor, 'before_backward', wrong)
    with pytest.raises(VerificationError, match='planned: keep.*is about to be read'):
        run(data, 'in-core')


def test_a_map_that_is_overwritten_while_it_is_read_is_found(data, monkeypatch):
    after = Executor.after_backward
    done = []

    def wrong(self, k, function):
        maps = [
            live
            for live in self.maps.find(function)
            if live.slots.name_all()[0].kind.value != 'attribute'
        ]
        if self.observers.judge and maps and not done:
            done.append(maps[0].slots.find_array().fill(0))
        after(self, k, function)

    monkeypatch.setattr(Executor, 'after_backward', wrong)
    with pytest.raises(VerificationError, match='has changed while it was read'):
        run(data)


def test_memory_handed_out_too_early_is_found(hostile, hasty, data):
    """While the copy of its contents still runs."""
    with pytest.raises(VerificationError):
        run(data)


def replayed(effect):
    """Every replay has an effect."""
    replay = graph.replay

    def wrong(before, *args):
        result = replay(before, *args)
        if active_session().state == 'guided':
            effect()
        return result

    return mock.patch.object(graph, 'replay', wrong)


def test_a_replay_that_draws_random_numbers_is_found(data):
    with (
        replayed(np.random.rand),
        pytest.raises(VerificationError, match="again has changed NumPy's random"),
    ):
        run(data, 'checkpoint-sqrt')


def test_a_replay_that_moves_statistics_is_found(data):
    def move():
        active_session().model.block1.b1.avg_mean += 1

    with (
        replayed(move),
        pytest.raises(VerificationError, match='changed /block1/b1/avg_mean'),
    ):
        run(data, 'checkpoint-sqrt')


def test_a_replay_that_changes_a_parameter_is_found(data):
    def move():
        model = active_session().model
        for parameter in model.params():
            parameter.array += 1

    with (
        replayed(move),
        pytest.raises(VerificationError, match='parameter 1 of Convolution2D'),
    ):
        run(data, 'checkpoint-sqrt')


@hybridmem.recomputable
class Negate(chainer.Function):
    """Writes into its input and returns it."""

    def forward(self, inputs):
        (x,) = inputs
        self.retain_inputs(())
        np.negative(x, out=x)
        return (x,)

    def backward(self, inputs, grads):
        return (-grads[0],)


@hybridmem.recomputable
class Spoiler(chainer.Function):
    """Its backward writes over an array of its own."""

    def forward(self, inputs):
        self.retain_inputs(())
        self.factor = inputs[0] * 0 + 2
        return (inputs[0] * self.factor,)

    def backward(self, inputs, grads):
        self.factor *= grads[0]
        return (self.factor,)


class Changing(networks.Ends):
    """The program writes into what forward has left."""

    def forward(self, x, t):
        h = F.sigmoid(self.conv(x))
        h = Negate()(h)
        h = F.tanh(h)
        self.held = h = F.sigmoid(h)
        h.array[...] *= 0.5
        h = F.sigmoid(F.tanh(F.tanh(h)))
        h = Spoiler()(h)
        self.held.array[...] *= 0.5
        return F.softmax_cross_entropy(self.last(h), t)


@pytest.mark.parametrize(
    'planner', ['in-core', 'swap-all', 'swap-opt', 'hybrid', 'checkpoint-sqrt']
)
def test_what_the_program_changes_itself_is_no_mismatch(planner, data):
    expected = networks.train(Changing, data)[0]
    limit = '1GB' if planner == 'in-core' else 2_600_000
    result, session = networks.train(
        Changing, data, memory_limit=limit, planner=planner, verify=True
    )
    networks.assert_same(expected, result)
    assert session.verdict.iterations == 3 and session.verdict.maps > 9


class ChangingLate(networks.Ends):
    """Begins to write into what functions have read once a plan rests on that."""

    late = 6  # iterations

    def forward(self, x, t):
        self.calls += 1
        variable = chainer.Variable(x)  # one for both
        h = self.conv(variable) + self.conv(F.tanh(variable))
        self.held = h = F.sigmoid(h)
        h = F.tanh(F.sigmoid(F.tanh(h)))
        if self.calls > self.late:
            self.write(x)
        return F.softmax_cross_entropy(self.last(h), t)


class HeldChangesLate(ChangingLate):
    def write(self, x):
        self.held.array[...] *= 0.5


class InputChangesLate(ChangingLate):
    def write(self, x):
        x[0, 0] = x[0, 0, ::-1].copy()  # the same numbers in another order


class InputOfTheSession(InputChangesLate):
    def forward(self, x, t):
        return super().forward(x * np.float32(1), t)


@pytest.mark.parametrize(
    'network', [HeldChangesLate, InputChangesLate, InputOfTheSession]
)
def test_nothing_is_recomputed_from_what_the_program_has_changed(network, data):
    class Steady(network):
        late = 10**9

    options = {'memory_limit': '1GB', 'planner': 'checkpoint-speed'}
    data = [(x.copy(), t) for x, t in data]
    session = networks.train(Steady, data, **options)[1]
    assert session.plan.replays
    with pytest.raises(SessionError, match='has been changed in place'):
        networks.train(network, data, **options)


def test_iterations_that_leave_their_plan_are_not_counted(data):

    class Restless(networks.Everything):
        calls = 0

        def forward(self, x, t):
            loss = super().forward(x, t)
            self.calls += 1
            return F.tanh(loss) if self.calls == 5 else loss

    expected = networks.train(Restless, data)[0]
    result, session = networks.train(
        Restless, data, memory_limit=LIMIT, planner='swap-all', verify=9
    )
    networks.assert_same(expected, result)
    assert session.statistics()['deviations'] == 1
    guided = session.statistics()['guided_iterations']
    assert session.verdict.iterations == guided == ITERATIONS - RECORDED - 1


@pytest.mark.parametrize('verify', [-1, 1.5, 'yes', None])
def test_what_is_no_number_is_refused(verify):
    with pytest.raises(OptionError, match='verify is'):
        hybridmem.optimize(networks.Everything(), LIMIT, verify=verify)
    with pytest.raises(OptionError, match='verify is'):
        HybridMemory(LIMIT, verify=verify)


def test_the_extension_verifies(data, tmp_path):
    np.random.seed(0)
    model = networks.Everything()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    x, t = data[0]
    iterator = chainer.iterators.SerialIterator(list(zip(x, t, strict=True)), 8)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (7, 'iteration'), out=str(tmp_path))
    extension = HybridMemory(LIMIT, planner='swap-all', verify=True)
    trainer.extend(extension)
    trainer.run()
    assert extension.session.verdict.iterations == 3


def retained(device, array):
    """A Variable with an array of the graph, the map, and who verifies it."""
    variable = chainer.Variable(array)
    variable.retain_data()
    live = LiveMap(device, device.arrays.allocation_id(array), array.nbytes)
    slot = Slot(0, SlotKind.INPUT, 0)
    reference = graph.refer(slot, variable.node, device.arrays.capture(array))
    live.add(reference)
    checks = verifier.Verifier(chainer.Chain(), lambda: verifier.Followed(None, None))
    return variable, live, checks


def test_what_a_variable_holds_may_change_between_two_backwards(device):
    array = np.ones(5000, np.float32)
    variable, live, checks = retained(device, array)
    checks.backward_runs([live])
    array[...] = 2  # the program's right
    checks.reads(1, Negate(), [live])
    checks.has_read(1, Negate(), [live])
    node = variable.node
    del variable
    checks.reads(2, Negate(), [live])
    node._data[...] = 3  # nobody has it any more
    with pytest.raises(VerificationError, match='is about to be read'):
        checks.reads(3, Negate(), [live])


def test_what_was_found_held_when_it_left_may_change(device):
    array = np.ones(5000, np.float32)
    variable, live, checks = retained(device, array)
    node = variable.node  # keeps the graph
    del variable
    checks.backward_runs([live])
    live.start_swap_out()
    live.release()
    array[...] = 2
    live.start_swap_in()
    checks.reads(1, Negate(), [live])
    assert (node._data == 2).all()


def test_what_is_copied_is_no_allocation_of_the_session(device):
    """A fingerprint of an array with gaps needs a copy, which does not count."""
    _variable, live, checks = retained(device, np.ones((500, 10), np.float32)[:, ::2])
    device.memory.reset_peak()
    before = device.memory.used_bytes
    checks.backward_runs([live])
    assert checks._final and device.memory.peak_bytes == before


def test_what_could_not_leave_may_change_until_it_does(device):
    """The host had no room for it the first time."""
    array = np.ones(5000, np.float32)
    variable, live, checks = retained(device, array)
    node = variable.node  # keeps the graph
    del variable
    checks.leaves(live)
    array[...] = 2
    checks.leaves(live)
    checks.backward_runs([live])
    checks.reads(1, Negate(), [live])
    assert live in checks._compared and (node._data == 2).all()
