"""Snapshots as the viewer at pytorch.org/memory_viz reads them.

What the viewer does (``torch/utils/viz/MemoryViz.js``) is restated: the opcodes of its
unpickler, the keys it reads, the walk back through the events, the sums it draws.
"""

from __future__ import annotations

import itertools
import pickle
import pickletools

import pytest
from support import toys
from support.drawn_plans import random_plan

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.reporting import memory_viz
from chainer_hybridmem.reporting.memory_viz import Event, make_snapshot

MIB = 1 << 20
OPCODES = {
    'APPENDS', 'BINGET', 'BININT', 'BININT1', 'BININT2', 'EMPTY_DICT', 'EMPTY_LIST',
    'FRAME', 'LONG1', 'LONG_BINGET', 'MARK', 'MEMOIZE', 'PROTO', 'SETITEMS',
    'SHORT_BINUNICODE', 'STOP', 'TUPLE2', 'APPEND', 'NEWFALSE', 'BINPUT', 'BINUNICODE',
    'EMPTY_TUPLE', 'NEWTRUE', 'NONE', 'BINFLOAT', 'TUPLE', 'TUPLE1', 'TUPLE3',
    'LONG_BINPUT', 'LIST', 'DICT', 'SETITEM',
}  # fmt: skip
ACTIONS = {
    'alloc', 'free_requested', 'free_completed', 'segment_alloc', 'segment_free',
    'segment_map', 'segment_unmap', 'oom', 'snapshot',
}  # fmt: skip


def check_file(contents):
    """What the viewer's unpickler takes."""
    for opcode, argument, _ in pickletools.genops(contents):
        assert opcode.name in OPCODES, opcode.name
        if opcode.name == 'PROTO':
            assert 2 <= argument <= 4
        if opcode.name == 'LONG1':
            assert abs(argument) < 2**53  # beyond, the viewer makes a BigInt
    return pickle.loads(contents)


def check_snapshot(snapshot):
    """Returns the bytes active after each event."""
    segments, (trace,) = snapshot['segments'], snapshot['device_traces']
    for segment in segments:
        assert segment['device'] == 0
        for key in ('address', 'total_size', 'stream'):
            assert type(segment[key]) is int
        assert segment['segment_pool_id'] == (0, 0)
        _check_frames(segment['frames'])
        sizes = [block['size'] for block in segment['blocks']]
        assert sum(sizes) == segment['total_size']
        assert all(size > 0 for size in sizes)
        for block in segment['blocks']:
            assert block['state'] in (
                'active_allocated', 'active_pending_free', 'inactive',
            )  # fmt: skip
            assert 0 <= block['requested_size'] <= block['size']
            _check_frames(block['frames'])
    categories = {event['category'] for event in trace if 'category' in event}
    assert not categories or 'unknown' in categories
    for event in trace:
        assert event['action'] in ACTIONS
        for key in ('addr', 'size', 'stream'):
            assert type(event[key]) is int
        assert event['frames']  # else the viewer guesses why there are none
        _check_frames(event['frames'])
        if event['action'] in ('alloc', 'free_requested', 'free_completed'):
            assert event['timestamp'] is None  # else it shows an invalid date
    _walk_back(segments, trace)
    return _active(segments, trace)


def _check_frames(frames):
    for frame in frames:
        assert isinstance(frame['name'], str) and isinstance(frame['filename'], str)
        assert type(frame['line']) is int


def _live(segments):
    live = {}
    for segment in segments:
        address = segment['address']
        for block in segment['blocks']:
            if block['state'] == 'active_allocated':
                live[address] = block['requested_size']
            address += block['size']
    return live


def _walk_back(segments, trace):
    """From the end to the first event, as the view of segments does: every block lies
    in a segment, no two overlap, and what was allocated is what is taken back."""
    live = _live(segments)
    for event in reversed(trace[1:]):
        address, size = event['addr'], event['size']
        if event['action'] == 'free_completed':
            assert address not in live
            live[address] = size
        elif event['action'] == 'alloc':
            assert live.pop(address) == size
        spans = sorted((a, a + n) for a, n in live.items())
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start
        if spans:
            (segment,) = segments
            assert segment['address'] <= spans[0][0]
            assert spans[-1][1] <= segment['address'] + segment['total_size']


def _active(segments, trace):
    """Bytes as the timeline of active memory adds them up."""
    made = {e['addr'] for e in trace if e['action'] == 'alloc'}
    seen, before = set(), 0
    for event in trace:
        if event['action'] == 'alloc':
            seen.add(event['addr'])
        elif event['action'] == 'free_completed' and event['addr'] not in seen:
            before += event['size']
    before += sum(n for a, n in _live(segments).items() if a not in made)
    load, loads = before, [before]
    for event in trace:
        if event['action'] == 'alloc':
            load += event['size']
        elif event['action'] == 'free_completed':
            load -= event['size']
        loads.append(load)
    return loads


def test_a_small_one():
    frames = [{'filename': 'f', 'line': 1, 'name': 'n'}]
    events = [
        Event(1, 1000, frames),
        Event(2, 3000, frames, 'x'),
        Event(-1, 1000, frames),
        Event(-9, 4096, frames),  # there before
        Event(3, 700, frames),
        Event(-2, 3000, frames),
    ]
    snapshot = check_file(memory_viz.dumps(make_snapshot(events, 10_000)))
    loads = check_snapshot(snapshot)
    assert max(loads) == 14_000
    assert loads[-1] == 10_000 - 4096 + 700
    assert snapshot['device_traces'][0][0]['action'] == 'segment_alloc'


def test_nothing_happens():
    loads = check_snapshot(make_snapshot([], 512))
    assert set(loads) == {512}


@pytest.mark.parametrize('planner', ['swap-all-unscheduled', 'pooch', 'superneurons'])
@pytest.mark.parametrize('seed', range(6))
def test_plans(planner, seed):
    """The viewer shows the load that the plan is predicted to have."""
    profile = toys.random_graph(seed, 12) if seed else toys.chain()
    problem = make_problem(profile)
    least, _ = least_memory(problem)
    limit = (least + problem.in_core_peak_bytes) // 2
    plan = make_plan(problem, limit, planner)
    contents = memory_viz.dumps(memory_viz.planned_snapshot(profile, plan))
    loads = check_snapshot(check_file(contents))
    assert max(loads) <= simulate(profile, plan).peak_bytes
    assert max(loads) >= 0.7 * simulate(profile, plan).peak_bytes
    assert loads[0] == profile.initial_bytes


@pytest.mark.parametrize('seed', range(4))
def test_what_stays_for_replays_is_there_until_it_is_dropped(seed):
    profile = toys.random_network(seed, 12)
    problem = make_problem(profile)
    limit = problem.in_core_peak_bytes * 2
    options = {'seed_of_plan': seed, 'weights': (0, 1, 9), 'late': 0.5}
    plain, plan = (
        random_plan(problem, limit, sources=share, **options) for share in (0, 1)
    )
    assert plan.sources
    loads, without = (
        check_snapshot(memory_viz.planned_snapshot(profile, one))
        for one in (plan, plain)
    )
    assert loads[-1] == without[-1]
    assert without[-1] < max(loads) <= simulate(profile, plan).peak_bytes
