"""One feature map that leaves and comes back."""

from __future__ import annotations

import chainer
import numpy as np

from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.execution.live_map import HostSide, LiveMap, State


def retained(device, array, live=None):
    """A node that has retained an array, and the map with it."""
    variable = chainer.Variable(array)
    variable.retain_data()
    live = live or LiveMap(device, device.arrays.allocation_id(array), array.nbytes)
    slot = Slot(0, SlotKind.INPUT, 0)
    reference = graph.refer(slot, variable.node, device.arrays.capture(array))
    live.add(reference)
    return variable.node, live


def go_and_return(live):
    """Returns the bytes copied to the host."""
    copied = live.start_swap_out()
    live.release()
    live.start_swap_in()
    live.finish_swap_in()
    return copied


def test_what_somebody_holds_stays(device):
    array = np.zeros(5000, np.float32)
    node, live = retained(device, array)
    assert live.start_swap_out() == 0
    live.release()
    assert live.state is State.RESIDENT and node._data is array
    array[...] = 7
    del array
    assert go_and_return(live) == live.nbytes
    assert (node._data == 7).all()


def test_what_is_let_go_of_while_it_is_held_comes_back_as_it_is_now(device):
    """No backward is expected to read it, and one does."""
    array = np.zeros(5000, np.float32)
    node, live = retained(device, array)
    live.drop()
    assert live.state is State.GONE
    array[...] = 7
    assert live.refill(device.arrays.root(np.zeros(5000, np.float32)), 'other ones')
    assert node._data is not array and np.shares_memory(node._data, array)


def test_what_nobody_holds_comes_back_from_its_copy(device):
    node, live = retained(device, np.ones(5000, np.float32))
    assert go_and_return(live) == live.nbytes
    assert go_and_return(live) == 0  # the copy is still right
    assert (node._data == 1).all()


def test_a_graph_may_die_when_its_map_is_about_to_leave(device, monkeypatch):
    """One in a cycle dies when Python's collector runs: at any moment."""
    node, live = retained(device, np.ones(5000, np.float32))
    nodes = [node]
    del node
    take_space = HostSide.take_space
    monkeypatch.setattr(
        HostSide, 'take_space', lambda self: nodes.clear() or take_space(self)
    )
    assert live.start_swap_out() == 0
    live.release()
    assert device.memory.used_bytes == 0


def test_a_map_may_be_forgotten_while_room_is_made_for_it(device, monkeypatch):
    """Its graph was part of a cycle, which is collected then."""
    _, live = retained(device, np.ones(5000, np.float32))
    live.start_swap_out()
    live.release()
    allocate = device.memory.allocate

    def forget_first(nbytes):
        live.forget()
        return allocate(nbytes)

    monkeypatch.setattr(device.memory, 'allocate', forget_first)
    assert live.start_swap_in() == 0
    live.finish_swap_in()
    assert device.memory.used_bytes == 0


def test_what_is_retained_again_may_have_changed(device):
    node, live = retained(device, np.ones(5000, np.float32))
    go_and_return(live)
    node._data[...] = 7
    other, _ = retained(device, node._data, live)
    assert go_and_return(live) == live.nbytes
    assert (node._data == 7).all() and (other._data == 7).all()
