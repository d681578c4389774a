"""Blocks of a slab never overlap, and free space is found again."""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainer_hybridmem.training.devices import slab
from chainer_hybridmem.training.devices.cuda.block_pool import ArenaMemory

UNIT = 64
SIZE = 400 * UNIT
BASE = 1 << 20


class Model:
    """The same with sets of units; which are free, which have pages."""

    def __init__(self):
        self.words = (ctypes.c_int64 * (slab.SLAB_BYTES // 8))()
        self.holes = (ctypes.c_int64 * (3 * slab.MOST_HOLES))()
        self.at = ctypes.addressof(self.words)
        self.words[slab.HOLES // 8] = ctypes.addressof(self.holes)
        slab.begin(self.at, BASE, SIZE)
        self.blocks = {}
        self.touched = set()

    def word(self, field):
        return self.words[field // 8]

    def units(self, address, extent):
        assert (address - BASE) % UNIT == 0 and address >= BASE
        assert address + extent <= BASE + SIZE
        return set(range((address - BASE) // UNIT, (address + extent - BASE) // UNIT))

    def used(self):
        return set().union(*(self.units(a, e) for a, e in self.blocks.items()))

    def held(self):
        nbytes = max(0, self.word(slab.TOUCHED) - self.word(slab.TOP))
        for i in range(self.word(slab.HOLE_COUNT)):
            assert 0 <= self.holes[3 * i + 2] <= self.holes[3 * i + 1]
            nbytes += self.holes[3 * i + 2]
        return nbytes

    def took(self, address, total):
        extent = self.word(slab.EXTENT)
        units = self.units(address, extent)
        assert extent >= total and not units & self.used()
        # What may never have been touched counts as held all the same.
        assert self.word(slab.FRESH) <= UNIT * len(units - self.touched)
        self.touched |= units
        self.blocks[address] = extent

    def give(self, index):
        address = list(self.blocks)[index % len(self.blocks)]
        slab.join(self.at, address, self.blocks.pop(address))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(('cut', 'cut_at', 'join')),
        st.integers(1, 60),
        st.integers(0, 400),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_blocks_never_overlap(actions):
    model = Model()
    for action, units, where in actions:
        total = units * UNIT
        if action == 'cut':
            address = slab.cut(model.at, total)
            if address:
                model.took(address, total)
        elif action == 'cut_at':
            address = BASE + where * UNIT
            free = address + total <= BASE + SIZE and not (
                set(range(where, where + units)) & model.used()
            )
            assert slab.cut_at(model.at, address, total) == free
            if free:
                assert model.word(slab.EXTENT) == total
                model.took(address, total)
        elif model.blocks:
            model.give(where)
        assert model.word(slab.BLOCKS) == len(model.blocks)
        free_units = set(range(400)) - model.used()
        assert model.word(slab.HELD) >= UNIT * len(free_units & model.touched)
        assert model.word(slab.HELD) == model.held()
    while model.blocks:
        model.give(0)
    assert model.word(slab.TOP) == model.word(slab.HOLE_COUNT) == 0
    assert slab.cut(model.at, SIZE) == BASE


class Memory:
    """Stands for what another allocator has given."""

    ptr = BASE


class Places:
    """Stands for an arena."""

    entries = ((512, 0), (1024, 512), (512, -1), (512, 1536))
    segments = (0, 2, 4)
    slab_bytes = 2048


@pytest.fixture
def places():
    made = ArenaMemory(Memory(), 2048)
    made.table.expect(Places())
    return made


def test_each_malloc_gets_its_place(places):
    places.table.seek(0)
    first, second = places.place(512), places.place(1024)
    places.table.seek(1)
    assert (first.ptr, second.ptr) == (BASE, BASE + 512)
    assert places.place(512) is None  # expected, and has no place
    third = places.place(512)
    assert third.ptr == BASE + 1536
    assert places.table.figures() == (3, 0, 0)
    assert places.cut(512) is None  # everything is taken
    del second
    assert places.cut(512).ptr == BASE + 512


def test_what_does_not_come_is_skipped(places):
    places.table.seek(0)
    assert places.place(1024).ptr == BASE + 512
    assert places.table.figures() == (1, 0, 0)


def test_what_is_not_expected_has_no_place(places):
    places.table.seek(0)
    assert places.place(2048) is None
    assert places.table.figures() == (0, 1, 0)
    assert places.place(512).ptr == BASE  # the plan goes on


def test_a_place_that_is_taken_is_not_given(places):
    somebody = places.cut(512)
    places.table.seek(0)
    assert places.place(512) is None
    assert places.table.figures() == (0, 0, 1)
    del somebody
    places.table.seek(0)
    assert places.place(512).ptr == BASE


def test_without_an_operation_nothing_is_planned(places):
    places.table.seek(0)
    places.table.seek(-1)
    assert places.place(512) is None
    assert places.table.figures() == (0, 0, 0)
