"""The highest load of a run: the same byte each time, with the layers it is made of."""

from __future__ import annotations

import gc
import threading

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.planning.records.peak import IN_SESSION, OUTSIDE, Load, Peak
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.recording.peak_meter import PeakMeter

MIB = 1 << 20


def train(iterations=3, limit=None):
    """Trains a network in a meter, and in a session if there is a limit."""
    np.random.seed(0)
    with PeakMeter() as meter:
        model = networks.Everything()
        optimizer = chainer.optimizers.Adam().setup(model)
        (x, t), *_ = networks.batches(1)
        if limit is None:
            for _ in range(iterations):
                networks.iterate(model, optimizer, x, t)
        else:
            with hybridmem.optimize(model, limit) as session:
                for _ in range(iterations):
                    networks.iterate(model, optimizer, x, t)
            assert session.statistics()['peak_bytes'] <= limit
    return meter.peak()


def test_each_run_has_the_same_peak_made_of_the_same_parts():
    """Whatever else garbage collection has to do, and in another thread, too."""
    first = train()
    assert sum(first.parts.values()) == first.nbytes
    rubbish = [[] for _ in range(100_000)]
    found = [train(), train(5)]
    thread = threading.Thread(target=lambda: found.append(train()))
    thread.start()
    thread.join()
    del rubbish
    assert [peak.nbytes for peak in found] == [first.nbytes] * 3
    assert found[0] == found[2] == first


def test_layers_are_named_by_their_paths():
    class Block(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.first = L.Linear(8, 1024)
                self.second = L.Linear(1024, 8)

        def forward(self, x):
            return self.second(F.relu(self.first(x)))

    class Net(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.blocks = chainer.ChainList(Block(), Block())

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return F.sum(x)

    with PeakMeter() as meter:
        model = Net()
        optimizer = chainer.optimizers.MomentumSGD().setup(model)
        for _ in range(2):
            optimizer.update(model, np.ones((512, 8), 'f'))
    parts = meter.peak().parts
    map_bytes = 512 * 1024 * 4
    assert parts['blocks/0', 'ReLU'] == parts['blocks/1', 'ReLU'] == map_bytes
    assert parts['blocks/1/second', 'parameters'] == (1024 + 1) * 8 * 4
    assert parts['blocks/0/first', 'optimizer states'] == (8 + 1) * 1024 * 4
    assert sum(meter.peak().functions()['blocks/1'].values()) >= map_bytes


def test_cycles_of_the_program_are_freed_where_an_iteration_begins():
    """Their arrays add up no further, even with a collector that is off anyway."""
    link = L.Linear(4, 4)
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count()

    def leak():
        cycle = [np.empty(MIB, np.uint8)]
        cycle.append(cycle)
        loss = F.sum(link(np.ones((1, 4), 'f')))
        loss.backward()

    with PeakMeter() as meter:
        assert not gc.isenabled()
        for _ in range(10):
            leak()
    assert gc.isenabled() == was_enabled
    assert gc.get_freeze_count() <= was_frozen
    assert MIB < meter.peak().nbytes < 3 * MIB


def test_what_was_made_before_counts_from_its_first_use():
    link, x = L.Linear(1000, 10), np.ones((10, 1000), 'f')
    with PeakMeter() as meter:
        assert meter.peak().nbytes == 0
        link(x)
    layers = meter.peak().parts
    assert layers['Linear', 'arrays made before'] >= x.nbytes + link.W.array.nbytes


def test_arrays_of_the_program_and_a_link_that_fails():
    class Failing(chainer.Link):
        def forward(self, x):
            raise ValueError('no')

    with PeakMeter() as meter:
        with pytest.raises(ValueError, match='no'):
            Failing()(1)
        large = np.empty(5 * MIB, np.uint8)
        F.relu(np.ones(MIB, 'f'))
        del large
    assert (
        meter.peak().parts
        == {
            (OUTSIDE, 'own code'): 9 * MIB,
            (OUTSIDE, 'ReLU'): 4 * MIB,
        }
        or meter.peak().nbytes >= 13 * MIB
    )
    assert not numpy_memory.installed()
    assert not chainer.get_function_hooks()


class Breaks(chainer.FunctionNode):
    def forward(self, inputs):
        return inputs

    def backward(self, indexes, gradients):
        raise ValueError('no')


class Breaking(chainer.Link):
    def forward(self, x, backward):
        if not backward:
            raise ValueError('no')
        Breaks().apply((chainer.Variable(x),))[0].backward()


@pytest.mark.parametrize('backward', [False, True])
def test_what_has_failed_is_over(backward):
    with PeakMeter() as meter:
        with pytest.raises(ValueError, match='no'):
            Breaking()(np.ones((1, 1), 'f'), backward)
        outside = F.relu(np.ones(MIB, 'f'))
        layer = L.Linear(1, MIB)(np.ones((1, 1), 'f'))
        del outside, layer
    parts = meter.peak().parts
    assert parts[OUTSIDE, 'ReLU'] >= 4 * MIB
    assert 'Linear' in {layer for layer, _ in parts}


def test_in_a_session_its_own_peak_counts():
    in_core = train(6)
    limit = int(in_core.nbytes * 0.7)
    limited = train(6, limit)
    assert limited.nbytes <= limit < in_core.nbytes
    assert [layer for layer, _ in limited.parts] == [IN_SESSION]
    assert not numpy_memory.installed()


def test_arrays_of_a_gpu_are_an_error_instead_of_a_small_peak():
    class Ndarray:
        """As far as a hook looks at CuPy's."""

    Ndarray.__module__ = 'cupy._core.core'
    function = F.relu(chainer.Variable(np.ones(3, 'f'))).creator_node
    with PeakMeter() as meter:
        with pytest.raises(SessionError, match=r'reads a cupy.Ndarray.*on the CPU'):
            meter.start_forward(function, (np.ones(3, 'f'), Ndarray()))


def test_meters_do_not_nest():
    with PeakMeter():
        with pytest.raises(SessionError, match='once'):
            PeakMeter().__enter__()
        with hybridmem.profile_memory() as memory:
            np.empty(MIB, np.uint8)
            with pytest.raises(SessionError, match='already counts'):
                with hybridmem.profile_memory():
                    pass
    assert memory.summary()['peak_bytes'] == MIB
    assert not numpy_memory.installed()


def test_a_load_keeps_its_highest_moment():
    load = Load()
    load.add([(1, 10), (2, 5), (-1, 10)], ('a', 'x'))
    load.add([(3, 7), (-3, 7)], ('b', 'x'))
    assert load.peak == Peak(15, {('a', 'x'): 15})
    load.rename(2, ('c', 'y'))
    load.add([(4, 20), (-2, 5), (-99, 3)], ('b', 'z'))
    assert load.peak == Peak(25, {('c', 'y'): 5, ('b', 'z'): 20})


def test_growth_is_that_of_layers():
    peak = Peak(100, {('a', 'x'): 60, ('a', 'y'): 30, ('b', 'x'): 10})
    functions = {'a': {'x': 60, 'y': 20}, 'b': {'x': 10}, 'c': {'z': 5}}
    (line,) = peak.describe_growth(functions)
    assert (
        line == 'a grew by 10 B (y: 10 B): 80 B before, 90 B now'
    )  # not x, the largest
    assert peak.functions() == {'a': {'x': 60, 'y': 30}, 'b': {'x': 10}}
    assert peak.describe(1) == ['        60 B  a: x', '        40 B  2 others']
