"""The program writes into feature maps, and lets go of them before backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import networks
from support.drawn_plans import random_plan

# isort: split
import chainer
import chainer.functions as F

from chainer_hybridmem.errors import SessionError, SwapStoreError, VerificationError
from chainer_hybridmem.planning import planners
from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.execution.live_map import LiveMap, State

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
    AfterForward, RightAfterReading, BetweenFunctions, OneElement, ThroughAView, Both
]  # fmt: skip
PLANNERS = ['in-core', 'swap-all', 'hybrid', 'checkpoint-speed']


@pytest.mark.matrix
@pytest.mark.parametrize('program', PROGRAMS)
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
@pytest.mark.parametrize('program', PROGRAMS)
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
    live.uses.add(1)  # backward will read it
    reference = graph.SlotRef(
        Slot(0, SlotKind.INPUT, 0), variable.node, device.arrays.capture(array)
    )
    live.add(reference, array)
    return variable.node, live


def test_a_write_is_taken_in_when_the_array_dies(device):
    array = np.ones(5000, np.float32)
    node, live = retained(device, array)
    assert not live.slots.is_exclusive()
    live.start_swap_out()
    live.release()
    array[7] = 2
    del array
    assert live.prints.rewritten
    live.start_swap_in()
    live.finish_swap_in()
    assert node._data[7] == 2 and (node._data[8:] == 1).all()


def test_a_write_while_it_is_copied_is_copied_once_more(device):
    device.throttle(1e6)
    array = np.ones(5000, np.float32)
    node, live = retained(device, array)
    live.start_swap_out()
    array[...] = np.arange(5000)
    del array
    live.release()
    device.throttle(None)
    live.start_swap_in()
    live.finish_swap_in()
    assert (node._data == np.arange(5000)).all()


def test_a_write_into_what_was_dropped_is_kept(device):
    array = np.ones(5000, np.float32)
    node, live = retained(device, array)
    live.drop()
    assert live.state is State.GONE
    array[7] = 2
    del array
    assert live.state is State.AWAY
    assert live.refill(device.arrays.root(np.ones(5000, np.float32)), 'other ones')
    assert node._data[7] == 2


def test_a_write_while_it_comes_back_wins(device):
    array = np.ones(5000, np.float32)
    node, live = retained(device, array)
    live.drop()
    other, kept = live.host.copy, np.ones(5000, np.float32)
    assert other is None
    array[7] = 2
    del array
    live.start_swap_in()
    live.finish_swap_in()
    assert node._data[7] == 2 and kept[7] == 1


def test_other_contents_are_refused(device):
    node, live = retained(device, np.ones(5000, np.float32))
    live.drop()
    assert not live.refill(
        device.arrays.root(np.full(5000, 2, np.float32)), 'other ones'
    )
    assert node is not None


def test_what_cannot_be_kept_is_an_error_when_it_is_asked_for(device, monkeypatch):
    array = np.ones(5000, np.float32)
    _node, live = retained(device, array)
    live.drop()

    def full(nbytes, tier=None):
        raise SwapStoreError('no room')

    monkeypatch.setattr(device.copies, 'host_copy', full)
    array[7] = 2
    del array
    with pytest.raises(SwapStoreError, match='no room'):
        live.refill(device.arrays.root(np.ones(5000, np.float32)), 'other ones')


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


def test_a_copy_under_way_is_no_holder(device):
    device.throttle(1e6)
    node, live = retained(device, np.ones(5000, np.float32))
    live.start_swap_out()
    assert live.state is State.LEAVING and node._data is None
    live.stay()
    assert live.slots.is_exclusive()
    live.release()
    assert node._data is None
