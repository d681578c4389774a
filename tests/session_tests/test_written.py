"""The program writes into feature maps, and lets go of them before backward."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from support import networks
from support.drawn_plans import random_plan

# isort: split
import chainer
import chainer.functions as F

from chainer_hybridmem.errors import SessionError, VerificationError
from chainer_hybridmem.planning import planners
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.execution import graph_slots
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.execution.mover import Mover

ITERATIONS = 10
LATE = 6


class Writing(networks.Ends):
    """Subclasses write somewhere between two functions, or when forward is over."""

    begins_at = 0

    def forward(self, x, t):
        self.calls += 1
        writes = self.calls > self.begins_at
        h = F.sigmoid(self.conv(x))
        y = F.tanh(h)
        z = F.sigmoid(F.max_pooling_2d(y, 2))
        if writes:
            self.amid(h, y)
        loss = F.softmax_cross_entropy(self.last(z), t)
        if writes:
            self.afterwards(h, y)
        return loss

    def amid(self, h, y):
        pass

    def afterwards(self, h, y):
        pass


class AfterForward(Writing):
    def afterwards(self, h, y):
        a = h.array
        a[:, ::2] = 0


class RightAfterReading(Writing):
    """And lets go of it before the next function begins."""

    def forward(self, x, t):
        self.calls += 1
        y = self.both(x)
        return F.softmax_cross_entropy(self.last(F.max_pooling_2d(y, 2)), t)

    def both(self, x):
        h = F.sigmoid(self.conv(x))
        y = F.tanh(h)
        if self.calls > self.begins_at:
            h.array[:, ::2] *= 0.5
        return y


class BetweenFunctions(Writing):
    def amid(self, h, y):
        h.array[0] *= 0.5


class OneElement(Writing):
    def afterwards(self, h, y):
        y.array[0, 0, 3, 5] += 1


class ThroughAView(Writing):
    def afterwards(self, h, y):
        view = y.array[1:, :, ::3]
        del y
        np.multiply(view, 0.5, out=view)


class Flat(Writing):
    """Its map is contiguous, as what others take for a buffer has to be."""

    def forward(self, x, t):
        self.calls += 1
        y = F.tanh(F.reshape(self.conv(x), (len(x), -1)))
        z = F.sigmoid(y)
        if self.calls > self.begins_at:
            kept = self.keep(y.array)
        del y
        loss = F.softmax_cross_entropy(self.last(z), t)
        if self.calls > self.begins_at:
            kept[3:9] = [2] * 6
        return loss


class AMemoryview(Flat):
    def keep(self, array):
        return np.asarray(memoryview(array))[1]


class ABuffer(Flat):
    def keep(self, array):
        return np.frombuffer(array, np.float32)


class CTypes(Flat):
    def keep(self, array):
        return (ctypes.c_float * array.size).from_buffer(array)


class Interface:
    """What another library makes of an array."""

    def __init__(self, array):
        self.kept = array
        self.__array_interface__ = array.__array_interface__


class AnotherLibrary(Flat):
    def keep(self, array):
        return np.asarray(Interface(array))[1]


class DLPack(Flat):
    def keep(self, array):
        return np.from_dlpack(array)[-1]


class InAThread(Writing):
    def amid(self, h, y):
        self.begun = threading.Event()
        self.thread = threading.Thread(target=self.write, args=(h.array, y.array))
        self.thread.start()

    def write(self, *arrays):
        self.begun.wait()
        for array in arrays:
            array[:, ::2] *= 0.5

    def afterwards(self, h, y):
        del h, y
        self.begun.set()
        self.thread.join()


class Keep(chainer.FunctionHook):
    """A hook that keeps what functions read, such as one that looks for NaN."""

    name = 'keep'

    def __init__(self):
        self.arrays = []

    def forward_postprocess(self, function, in_data):
        self.arrays += in_data


class ThroughAHook(Writing):
    def forward(self, x, t):
        with Keep() as keep:
            loss = super().forward(x, t)
        if self.calls > self.begins_at:
            for array in keep.arrays:
                if array.ndim == 4 and array.shape[1] == 8:
                    array[0] *= 0.5
        return loss


class IntoAReshapedMap(Writing):
    """The graph has two arrays in one memory, and the program has a third."""

    def forward(self, x, t):
        self.calls += 1
        h = F.sigmoid(self.conv(x))
        flat = F.tanh(F.reshape(h, (len(x), -1)))
        view = F.reshape(flat, h.shape)
        z = F.max_pooling_2d(F.sigmoid(view), 2)
        kept = view.array[:, 1:]
        del h, flat, view
        loss = F.softmax_cross_entropy(self.last(z), t)
        if self.calls > self.begins_at:
            kept[...] = 0
        return loss


class Doubled(chainer.FunctionNode):
    """Writes into what it reads, and retains it."""

    def forward(self, inputs):
        (x,) = inputs
        x *= 2
        self.retain_inputs((0,))
        return (x + 1,)

    def backward(self, indexes, grads):
        (x,) = self.get_retained_inputs()
        return (2 * grads[0] * (x.array > 1),)


class ByAFunction(Writing):
    def forward(self, x, t):
        self.calls += 1
        h = F.sigmoid(self.conv(x))
        y = Doubled().apply((h,))[0] if self.calls > self.begins_at else h * 2
        z = F.max_pooling_2d(F.tanh(y), 2)
        del h, y
        return F.softmax_cross_entropy(self.last(z), t)


class UntilBackward(Writing):
    """Holds them until backward has begun, and writes just before."""

    def forward(self, x, t):
        loss = super().forward(x, t)
        for array in self.kept:
            array[1] = 0
        self.kept = ()
        return F.identity(loss)

    kept: Any = ()

    def afterwards(self, h, y):
        self.kept = h.array, y.array[:, 2:]


class Both(AfterForward):
    def amid(self, h, y):
        y.array[...] = -y.array


class AnotherArray(Writing):
    """Writes nothing: the variable gets another array, and chainer passes it on."""

    def afterwards(self, h, y):
        h.array = h.array * np.float32(0.5)


class AnotherArrayForTheNode(Writing):
    def amid(self, h, y):
        h.data = h.data * np.float32(0.5)

    def afterwards(self, h, y):
        y.node.data = y.array * np.float32(0.5)


REPLACED = [AnotherArray, AnotherArrayForTheNode]
PROGRAMS = [
    AfterForward, RightAfterReading, BetweenFunctions, OneElement, ThroughAView, Both,
    ThroughAHook, InAThread, IntoAReshapedMap, ByAFunction, UntilBackward,
]  # fmt: skip
ON_THE_HOST = [AMemoryview, ABuffer, CTypes, AnotherLibrary, DLPack]
PLANNERS = ['in-core', 'swap-all', 'hybrid', 'checkpoint-speed']


@pytest.mark.matrix
@pytest.mark.parametrize('program', PROGRAMS + ON_THE_HOST)
@pytest.mark.parametrize('planner', PLANNERS)
def test_what_the_program_writes_is_what_backward_reads(
    program, planner, data, hostile
):
    expected = networks.plain(program, data)
    limit = '1GB' if planner in networks.BLIND else 1_700_000
    result, session = networks.train(
        program, data, memory_limit=limit, planner=planner, verify=True
    )
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] > 5


@pytest.mark.gpu
@pytest.mark.matrix
@pytest.mark.parametrize('program', PROGRAMS)
@pytest.mark.parametrize('planner', PLANNERS)
def test_what_the_program_writes_on_a_gpu(program, planner, data):
    """From the start; what begins under a plan is told later."""
    expected = networks.train_on_gpu(program, data)[0]
    limit = '1GB' if planner in networks.BLIND else 2_000_000
    result, session = networks.train_on_gpu(
        program, data, memory_limit=limit, planner=planner
    )
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] > 3


@pytest.mark.matrix
@pytest.mark.parametrize('program', REPLACED)
@pytest.mark.parametrize('begins_at', [0, LATE])
@pytest.mark.parametrize('planner', [*PLANNERS, 'checkpoint-sqrt'])
def test_another_array_is_what_backward_reads(
    program, begins_at, planner, data, hostile
):
    """Or there is one clear error, where a map was to be recomputed from it."""

    class Late(program):
        pass

    Late.begins_at = begins_at
    expected = networks.train(Late, data)[0]
    limit = '1GB' if planner in networks.BLIND else 1_700_000
    options = {'memory_limit': limit, 'planner': planner, 'verify': True}
    try:
        result, _ = networks.train(Late, data, **options)
    except (SessionError, VerificationError) as error:
        assert planner.startswith('checkpoint')
        told = 'has been changed in place', 'not as forward has made it'
        assert any(part in str(error) for part in told)
    else:
        networks.assert_same(expected, result)


@pytest.mark.parametrize('program', PROGRAMS)
def test_also_from_the_disk(program, data, tmp_path):
    expected = networks.plain(program, data)
    result, _ = networks.train(
        program,
        data,
        memory_limit=1_700_000,
        planner='swap-all',
        swap_dir=str(tmp_path),
    )
    networks.assert_same(expected, result)


@pytest.mark.parametrize('program', PROGRAMS)
def test_also_where_the_host_has_no_room(program, data):
    """Recordings then move maps on the device instead."""
    expected = networks.plain(program, data)
    result, _ = networks.train(
        program, data, memory_limit='1GB', planner='hybrid', host_limit='16KiB'
    )
    networks.assert_same(expected, result)


@pytest.mark.matrix
@pytest.mark.parametrize('program', PROGRAMS + ON_THE_HOST)
@pytest.mark.parametrize('planner', ['swap-all', 'checkpoint-sqrt', 'checkpoint-speed'])
def test_writing_that_begins_after_the_recording(program, planner, data):
    """The same bits, or one clear error where it would have been recomputed."""

    class Late(program):
        begins_at = LATE

    expected = networks.train(Late, data)[0]
    options = {'memory_limit': '1GB', 'planner': planner}
    try:
        result, _ = networks.train(Late, data, **options)
    except SessionError as error:
        assert planner.startswith('checkpoint')
        assert 'has been changed in place' in str(error)
    else:
        assert planner != 'checkpoint-speed'
        networks.assert_same(expected, result)


@pytest.mark.gpu
@pytest.mark.matrix
@pytest.mark.parametrize('program', PROGRAMS)
@pytest.mark.parametrize('planner', ['swap-all', 'checkpoint-sqrt', 'checkpoint-speed'])
def test_a_gpu_tells_later_of_writing_that_begins_after_the_recording(
    program, planner, data
):
    class Late(program):
        begins_at = LATE

    expected = networks.train_on_gpu(Late, data)[0]
    options = {'memory_limit': '1GB', 'planner': planner}
    try:
        result, _ = networks.train_on_gpu(Late, data, **options)
    except SessionError as error:
        assert f'since iteration {LATE + 1} are wrong' in str(error)
        told = 'has been changed in place', 'has written into a feature map'
        assert any(part in str(error) for part in told)
    else:
        assert planner != 'checkpoint-speed'
        networks.assert_same(expected, result)


@pytest.mark.gpu
def test_a_gpu_tells_at_the_end_of_what_the_last_iteration_has_written(data):
    class Last(AfterForward):
        begins_at = ITERATIONS - 1

    with pytest.raises(SessionError, match=f'since iteration {ITERATIONS} are wrong'):
        networks.train_on_gpu(
            Last, data, memory_limit='1GB', planner='checkpoint-speed'
        )


@pytest.mark.gpu
def test_a_gpu_warns_where_another_error_ends_the_session(data):
    class Last(AfterForward):
        begins_at = ITERATIONS - 1

        def forward(self, x, t):
            if self.calls == ITERATIONS:
                raise KeyError('the program is broken')
            return super().forward(x, t)

    with (
        pytest.warns(UserWarning, match=f'since iteration {ITERATIONS} are wrong'),
        pytest.raises(KeyError, match='the program is broken'),
    ):
        networks.train_on_gpu(
            Last, [*data, data[0]], memory_limit='1GB', planner='checkpoint-speed'
        )


class IntoASource(Writing):
    """Backward never reads what the convolution makes; it may stay for replays."""

    def forward(self, x, t):
        self.calls += 1
        h = self.conv(x)
        y = F.sigmoid(h)
        if self.calls > self.begins_at:
            h.array[:, ::2] *= 0.5
        del h
        return F.softmax_cross_entropy(self.last(F.max_pooling_2d(y, 2)), t)


class IntoASourceAfterForward(IntoASource):
    """And lets go of it when forward returns."""

    def forward(self, x, t):
        self.calls += 1
        h = self.conv(x)
        y = F.max_pooling_2d(F.sigmoid(h), 2)
        loss = F.softmax_cross_entropy(self.last(y), t)
        if self.calls > self.begins_at:
            h.array[:, ::2] *= 0.5
        return loss


class IntoASourceMadeOfTwo(IntoASource):
    """A sum of which no backward reads the parts."""

    def forward(self, x, t):
        self.calls += 1
        h = self.conv(x) * 2
        y = F.sigmoid(h + self.conv(-x))
        loss = F.softmax_cross_entropy(self.last(F.max_pooling_2d(y, 2)), t)
        if self.calls > self.begins_at:
            h.array[:, ::2] *= 0.5
        return loss


class IntoASourceLate(IntoASource):
    begins_at = LATE


INTO_SOURCES = [
    IntoASource, IntoASourceAfterForward, IntoASourceMadeOfTwo, IntoASourceLate
]  # fmt: skip


def stays(problem, limit_bytes):
    """A planner: recomputes all it can, and keeps whatever replays read."""
    return random_plan(problem, limit_bytes, weights=(0, 0, 1), sources=1)


@pytest.mark.parametrize('verify', [False, True])
@pytest.mark.parametrize('program', INTO_SOURCES)
def test_what_the_program_writes_into_is_no_source(program, verify, data, monkeypatch):
    """Replays make it again, which is what they would do without sources."""
    monkeypatch.setitem(planners.PLANNERS, 'stays', stays)
    expected = networks.train(program, data)[0]
    options = {'memory_limit': '1GB', 'planner': 'stays', 'verify': verify}
    result, session = networks.train(program, data, **options)
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] > 5
    assert bool(session.plan.sources) == (program.begins_at > 0)


@pytest.mark.gpu
@pytest.mark.parametrize('program', INTO_SOURCES)
def test_a_gpu_tells_later_of_writing_into_a_source(program, data, monkeypatch):
    monkeypatch.setitem(planners.PLANNERS, 'stays', stays)
    expected = networks.train_on_gpu(program, data)[0]
    options = {'memory_limit': '1GB', 'planner': 'stays'}
    try:
        result, session = networks.train_on_gpu(program, data, **options)
    except SessionError as error:
        assert program is IntoASourceLate
        assert f'since iteration {LATE + 1} are wrong' in str(error)
    else:
        networks.assert_same(expected, result)
        assert session.statistics()['guided_iterations'] > 3


class AfterBackward(Writing):
    """What it has kept it writes into when nothing reads it any more."""

    kept: Any = ()

    def amid(self, h, y):
        for array in self.kept:
            array[...] = 0
        self.kept = ()

    def afterwards(self, h, y):
        if self.calls % 2:
            self.kept = h.array, y.array


@pytest.mark.gpu
@pytest.mark.parametrize('planner', ['swap-all', 'checkpoint-speed', 'hybrid'])
def test_a_gpu_says_nothing_of_writes_that_backward_need_not_see(planner, data):
    expected = networks.train_on_gpu(AfterBackward, data)[0]
    limit = '1GB' if planner in networks.BLIND else 2_000_000
    options = {'memory_limit': limit, 'planner': planner}
    result, session = networks.train_on_gpu(AfterBackward, data, **options)
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] > 3


def retained(device, array):
    """A node that has retained an array, and the map with it."""
    variable = chainer.Variable(array)
    variable.retain_data()
    live = LiveMap(device, device.arrays.allocation_id(array), array.nbytes)
    live.expect_read(1)  # backward will read it
    reference = graph.refer(
        Slot(0, SlotKind.INPUT, 0), variable.node, device.arrays.capture(array)
    )
    live.add(reference)
    return variable.node, live


@pytest.mark.parametrize('leave', ['start_swap_out', 'drop'])
def test_what_was_held_when_it_was_to_leave_is_copied_as_it_is_later(device, leave):
    array = np.ones(5000, np.float32)
    node, live = retained(device, array)
    getattr(live, leave)()
    assert live.state is State.RESIDENT and node._data is array
    array[7] = 2
    del array
    live.drop()
    assert live.state is State.RESIDENT  # a replay would not make this
    assert live.start_swap_out() == live.nbytes
    live.release()
    assert live.state is State.AWAY
    live.start_swap_in()
    live.finish_swap_in()
    assert node._data[7] == 2 and (node._data[8:] == 1).all()


@pytest.mark.parametrize('leaves', [False, True])
@pytest.mark.parametrize('how', ['hand_out', 'relocate'])
def test_what_is_written_into_other_memory_than_forwards_is_noted(device, how, leaves):
    """A recording looks at the memory that a function has read, and it is free."""
    array = np.ones(5000, np.float32)
    node, live = retained(device, array)
    del array
    getattr(live, how)()
    assert not live.prints.is_rewritten()
    node._data[7] = 2
    if leaves:
        live.start_swap_out()
        live.release()
        assert live.state is State.AWAY
    assert live.prints.is_rewritten()


class HoldsMore(Writing):
    """After the recording it holds a map for two functions more, and writes into it."""

    def forward(self, x, t):
        self.calls += 1
        h = F.sigmoid(self.conv(x))
        y = F.tanh(h)
        kept = h.array if self.calls > self.begins_at else None
        del h
        y = F.sigmoid(F.tanh(y))
        if kept is not None:
            kept[:, ::2] *= 0.5
            del kept
        y = F.tanh(F.sigmoid(y))
        return F.softmax_cross_entropy(self.last(F.max_pooling_2d(y, 2)), t)


class HoldsMoreLate(HoldsMore):
    begins_at = LATE


class HoldsMoreNever(HoldsMore):
    begins_at = ITERATIONS


def test_what_is_held_longer_than_recorded_leaves_when_it_is_let_go_of(
    data, monkeypatch
):
    waited: list[LiveMap] = []
    move = Mover._move

    def moving(self, k, table):
        before = list(self.waiting)
        move(self, k, table)
        left = [live for live in before if live not in self.waiting]
        assert all(live.state is not State.RESIDENT for live in left)
        waited.extend(left)

    monkeypatch.setattr(Mover, '_move', moving)
    expected = networks.train(HoldsMoreLate, data)[0]
    options = {'memory_limit': '1GB', 'planner': 'swap-all'}
    result, session = networks.train(HoldsMoreLate, data, **options)
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] > 5
    late = len(waited)
    networks.train(HoldsMoreNever, data, **options)
    recorded = len(waited) - late
    assert late == recorded + ITERATIONS - LATE


def test_what_is_swapped_is_not_hashed(data, monkeypatch):
    """But for what is verified."""
    hashed: list[Any] = []
    find = graph_slots.fingerprint
    monkeypatch.setattr(
        graph_slots, 'fingerprint', lambda array: hashed.append(array) or find(array)
    )
    options = {'memory_limit': '1GB', 'planner': 'swap-all'}
    _, session = networks.train(networks.Everything, data, **options)
    assert session.plan.count(Action.SWAP) > 5
    assert not hashed


def test_other_contents_are_refused(device):
    node, live = retained(device, np.ones(5000, np.float32))
    live.drop()
    assert not live.refill(
        device.arrays.root(np.full(5000, 2, np.float32)), 'other ones'
    )
    assert node is not None


def test_who_holds_the_memory_is_counted(device):
    array = np.ones(5000, np.float32)
    node, live = retained(device, array)
    assert not live.slots.is_exclusive()
    view = array[3:]
    del array
    assert not live.slots.is_exclusive()
    del view
    assert live.slots.is_exclusive()
    variable = chainer.Variable(node._data)
    assert not live.slots.is_exclusive()
    del variable
    assert live.slots.is_exclusive()


def test_a_copy_under_way_is_no_holder():
    with contextlib.closing(HostDevice(1 << 24, 1e6)) as slow, slow.memory.counting():
        node, live = retained(slow, np.ones(5000, np.float32))
        live.start_swap_out()
        assert live.state is State.LEAVING and node._data is None
        live.finish_and_stay()
        assert live.slots.is_exclusive()
        live.release()
        assert node._data is None
