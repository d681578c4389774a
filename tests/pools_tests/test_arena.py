"""Places from logs of two iterations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainer_hybridmem.planning.layouts import IterationLog, Trace, lay_out
from chainer_hybridmem.planning.layouts.arena import BESIDE, logs_of

SMALLEST = 100


def block_bytes(nbytes):
    return (nbytes + 63) // 64 * 64 if nbytes >= SMALLEST else 0


def arena_of(*logs, moves_in=True):
    return lay_out(logs, block_bytes, 64, moves_in)


def test_a_buffer_of_one_operation():
    log = IterationLog(((1, 200), (-1, 200), (2, 300), (-2, 300)), (0, 2), 1000)
    arena = arena_of(log, log)
    assert arena.entries == ((256, 0), (320, 0))
    assert arena.segments == (0, 1, 2)
    assert arena.slab_bytes == 320 and arena.layout.optimal
    assert arena.side_bytes == 1000 and arena.footprint_bytes == 1320


def test_small_buffers_lie_beside():
    log = IterationLog(((1, 99), (2, 200), (-1, 99), (-2, 200)), (0,), 10)
    arena = arena_of(log, log)
    assert arena.entries == ((256, 0),)
    assert arena.side_bytes == 109


def carried(old, new, freed_first):
    """Gradients: one iteration leaves them to the next one."""
    free, malloc = (-old, 512), (new, 512)
    events = (free, malloc) if freed_first else (malloc, free)
    return IterationLog(((new + 1, 640), *events, (-new - 1, 640)), (0, 1, 3), 5000)


def test_what_is_left_to_the_next_iteration_has_one_place():
    arena = arena_of(carried(5, 10, True), carried(10, 20, True))
    assert arena.placed == 2
    assert arena.slab_bytes == 1152  # both live together
    assert arena.side_bytes == 5000 - 512


def test_what_lives_longer_than_its_successor_lies_beside():
    arena = arena_of(carried(5, 10, False), carried(10, 20, False))
    assert arena.entries == ((640, 0), (512, BESIDE))
    assert arena.side_bytes == 5000 + 512


def test_an_arena_that_nothing_moves_into():
    arena = arena_of(carried(5, 10, True), carried(10, 20, True), moves_in=False)
    assert arena.entries == ((640, 0), (512, BESIDE))
    assert arena.side_bytes == 5000


def test_what_stays_lies_beside():
    first = IterationLog(((1, 512),), (0,), 0)
    arena = arena_of(first, IterationLog(((2, 512),), (0,), 512))
    assert arena.entries == ((512, BESIDE),)
    assert arena.side_bytes == 1024


@st.composite
def iterations(draw):
    """Slots ``(operation, bytes, operations later)``; beyond the end: carried."""
    n = draw(st.integers(1, 6))
    slot = st.tuples(
        st.integers(0, n - 1), st.sampled_from((50, 200, 500, 1000)), st.integers(0, 9)
    )
    return n, draw(st.lists(slot, max_size=25))


def play(n, slots, count):
    """Logs of ``count`` iterations, and when each slot's buffers live."""
    logs, alive, load, ident = [], {}, 0, 0
    for iteration in range(count):
        events, starts, initial = [], [], load
        for k in range(n):
            starts.append(len(events))
            now = iteration * n + k
            for buffer, (until, nbytes) in list(alive.items()):
                if until <= now:
                    events.append((-buffer, nbytes))
                    load -= nbytes
                    del alive[buffer]
            for operation, nbytes, length in slots:
                if operation == k:
                    ident += 1
                    events.append((ident, nbytes))
                    load += nbytes
                    alive[ident] = now + length, nbytes
        logs.append(IterationLog(tuple(events), tuple(starts), initial))
    return logs


@settings(max_examples=200, deadline=None)
@given(iterations(), st.booleans())
def test_nothing_overlaps_in_iterations_to_come(slots, moves_in):
    logs = play(*slots, 6)
    arena = lay_out((logs[3], logs[4]), block_bytes, 64, moves_in)
    assert arena.segments[-1] == len(arena.entries)
    alive, highest = {}, 0
    for log in logs[4:]:
        position = 0
        for event, nbytes in log.events:
            if event < 0:
                alive.pop(-event, None)
            elif block_bytes(nbytes):
                size, offset = arena.entries[position]
                position += 1
                assert size == block_bytes(nbytes)
                if offset != BESIDE:
                    for other, end in alive.values():
                        assert offset >= end or offset + size <= other
                    alive[event] = offset, offset + size
                    highest = max(highest, offset + size)
    assert highest == arena.slab_bytes


def test_a_trace_tells_what_a_log_does():
    """Two buffers of one iteration, a carried one, and one that only goes."""
    trace = Trace(
        sizes=(512, 512, 640, 768, 900),
        events=(-2, -4, 3, 1, -3),
        carried=((0, 1),),
        operation_starts=(0, 2),
    )
    arena = lay_out(logs_of(trace), block_bytes, 64)
    assert [size for size, _ in arena.entries] == [640, 512]
    assert arena.placed == 2 and arena.segments == (0, 0, 2)
    assert arena.slab_bytes == 1152
    assert arena.side_bytes == 768 + 900


def test_ids_that_differ_do_not_matter():
    first = arena_of(carried(5, 10, True), carried(10, 20, True))
    assert first == arena_of(carried(50, 100, True), carried(100, 200, True))


@pytest.mark.parametrize('extra', [0, 1])
def test_iterations_that_differ_are_laid_out_as_the_second(extra):
    before = carried(5, 10, True)
    log = carried(10, 20, True)
    events = (*log.events, *[(30, 256), (-30, 256)] * extra)
    arena = arena_of(before, IterationLog(events, log.starts, log.initial_bytes))
    assert arena.placed == 2 + extra
