"""Timelines as Chrome traces: what Perfetto needs to show them right."""

import dataclasses
import itertools
import json

import pytest
from support import toys, trace_format

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.reporting.chrome_trace import (
    STREAMS,
    chrome_trace,
)

PROFILES = [toys.chain(), *(toys.random_graph(seed, 12) for seed in range(8))]
PLANNERS = ['swap-all-unscheduled', 'pooch', 'superneurons']


def made(profile, planner):
    problem = make_problem(profile)
    least, _ = least_memory(problem)
    plan = make_plan(problem, (least + problem.in_core_peak_bytes) // 2, planner)
    return plan, simulate(problem, plan)


@pytest.fixture(params=PLANNERS)
def planner(request):
    return request.param


@pytest.fixture(params=range(len(PROFILES)))
def trace(request, planner):
    plan, timeline = made(PROFILES[request.param], planner)
    return plan, timeline, chrome_trace(timeline, plan)['traceEvents']


def of(events, kind):
    return [event for event in events if event['ph'] == kind]


def test_every_interval_is_a_slice_of_its_stream(trace):
    _, timeline, events = trace
    slices = of(events, 'X')
    assert len(slices) == len(timeline.intervals)
    for event, interval in zip(slices, timeline.intervals, strict=True):
        assert event['tid'] == STREAMS[interval.lane]
        assert event['name'] == interval.label
        assert event['ts'] == pytest.approx(interval.start_seconds * 1e6, abs=0.07)
        end = event['ts'] + event['dur']
        assert end == pytest.approx(interval.end_seconds * 1e6, abs=0.07)


def test_slices_of_a_stream_do_not_overlap(trace):
    _, _, events = trace
    for stream in STREAMS.values():
        slices = [e for e in of(events, 'X') if e['tid'] == stream]
        slices.sort(key=lambda e: (e['ts'], e['dur']))
        for first, second in itertools.pairwise(slices):
            assert first['ts'] + first['dur'] <= second['ts']


def test_names_of_process_and_streams(trace):
    _, _, events = trace
    names = {
        e.get('tid'): e['args']['name'] for e in of(events, 'M') if 'name' in e['args']
    }
    assert names[None] == 'predicted'
    assert set(names) == {None, *STREAMS.values()}


def test_the_rules_of_the_format(trace, planner):
    plan, timeline, _ = trace
    trace_format.check_trace(chrome_trace(timeline, plan))


def test_the_limit_is_a_line_beside_the_load(trace):
    plan, timeline, events = trace
    limit = [e for e in of(events, 'C') if e['name'] == 'memory limit']
    assert [e['args']['bytes'] for e in limit] == 2 * [plan.memory_limit_bytes]
    assert limit[1]['ts'] == pytest.approx(timeline.total_seconds * 1e6, abs=0.07)


def test_arrows_lead_from_swap_out_over_swap_in_to_the_first_use(trace):
    plan, _, events = trace
    starts = {e['id']: e for e in of(events, 's')}
    ends = {e['id']: e for e in of(events, 'f')}
    assert set(starts) == set(ends)
    assert len(starts) == 2 * plan.count(Action.SWAP)
    for number, start in starts.items():
        end = ends[number]
        assert start['ts'] <= end['ts']
        assert end['bp'] == 'e'
        way = (start['tid'], end['tid'])
        assert way in {
            (STREAMS['d2h'], STREAMS['h2d']),
            (STREAMS['h2d'], STREAMS['compute']),
        }


def test_what_takes_no_time_is_left_out():
    """An arrow to it leads to the operation after it."""
    plan, timeline = made(PROFILES[0], 'swap-all-unscheduled')
    kinds = ('forward', 'backward', 'update')
    places = [k for k, i in enumerate(timeline.intervals) if i.kind in kinds]
    use = next(m.needed_before for m in plan.maps if m.action is Action.SWAP)
    intervals = list(timeline.intervals)
    user, after = intervals[places[use]], intervals[places[use + 1]]
    intervals[places[use]] = dataclasses.replace(
        user, end_seconds=user.start_seconds + 1e-9
    )
    timeline = dataclasses.replace(timeline, intervals=tuple(intervals))
    trace_format.check_trace(chrome_trace(timeline, plan))
    events = chrome_trace(timeline, plan)['traceEvents']
    assert len(of(events, 'X')) == len(intervals) - 1
    ends = [e['ts'] for e in of(events, 'f') if e['tid'] == STREAMS['compute']]
    assert pytest.approx(after.start_seconds * 1e6, abs=0.2) in ends


def test_arrows_start_and_end_inside_one_slice(trace):
    """Also in milliseconds, where sums of start and duration are rounded."""
    _, _, events = trace
    slices = [e for e in of(events, 'X') if e['dur'] > 0]
    for event in of(events, 's') + of(events, 'f'):
        moment = event['ts'] / 1e3
        hit = [
            e['name']
            for e in slices
            if e['tid'] == event['tid']
            and e['ts'] / 1e3 <= moment <= e['ts'] / 1e3 + e['dur'] / 1e3
        ]
        assert len(hit) == 1


def test_times_are_exact(trace):
    _, _, events = trace
    for event in events:
        for key in ('ts', 'dur'):
            assert event.get(key, 0) % 0.125 == 0


def test_use_is_the_operation_that_needs_the_map(planner):
    plan, timeline = made(PROFILES[0], planner)
    events = chrome_trace(timeline, plan)['traceEvents']
    operations = [e for e in of(events, 'X') if e['cat'] in ('forward', 'backward')]
    uses = [e['ts'] for e in of(events, 'f') if e['tid'] == STREAMS['compute']]
    needed = [m.needed_before for m in plan.maps if m.action is Action.SWAP]
    starts = [operations[k]['ts'] for k in needed]
    assert uses == pytest.approx(starts, abs=0.2)


def test_load_of_every_operation(trace):
    _, timeline, events = trace
    counters = [e for e in of(events, 'C') if e['name'] == 'memory load']
    assert [e['args']['bytes'] for e in counters] == list(timeline.load_bytes)
    assert [e['ts'] for e in counters] == sorted(e['ts'] for e in counters)


def test_a_whole_file(planner):
    plan, timeline = made(PROFILES[0], planner)
    trace = json.loads(json.dumps(chrome_trace(timeline, plan), allow_nan=False))
    assert trace['otherData']['planner'] == planner
    assert trace['otherData']['lower_bound_seconds'] == plan.lower_bound_seconds
    assert trace['otherData']['gap'] == plan.gap
