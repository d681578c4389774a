"""One feature map that leaves and comes back."""

from __future__ import annotations

import chainer
import numpy as np

from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.execution.fingerprints import Fingerprints
from chainer_hybridmem.training.execution.live_map import LiveMap


def retained(device, array, live=None):
    """A node that has retained an array, and the map with it."""
    variable = chainer.Variable(array)
    variable.retain_data()
    live = live or LiveMap(device, device.arrays.allocation_id(array), array.nbytes)
    slot = Slot(0, SlotKind.INPUT, 0)
    reference = graph.SlotRef(slot, variable.node, device.arrays.capture(array))
    live.add(reference, array)
    return variable.node, live


def go_and_return(live):
    """Returns the bytes copied to the host."""
    copied = live.start_swap_out()
    live.release()
    live.start_swap_in()
    live.finish_swap_in()
    return copied


def test_what_somebody_holds_comes_back_as_it_is_now(device):
    array = np.zeros(5000, np.float32)
    node, live = retained(device, array)
    live.start_swap_out()
    live.release()
    array[...] = 7
    assert live.start_swap_in() == 0  # nothing is copied
    assert node._data is not array and np.shares_memory(node._data, array)
    del array
    assert go_and_return(live) == live.nbytes  # the former copy is not right any more
    assert (node._data == 7).all()


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
    monkeypatch.setattr(Fingerprints, 'take_before_copy', lambda self: nodes.clear())
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


def test_a_copy_under_way_is_called_off_when_it_is_retained_again(device):
    device.throttle(1e6)
    array = np.ones(5000, np.float32)
    _, live = retained(device, array)
    live.start_swap_out()
    array[...] = 7
    node, _ = retained(device, array, live)
    del array
    assert go_and_return(live) == live.nbytes
    assert (node._data == 7).all()
