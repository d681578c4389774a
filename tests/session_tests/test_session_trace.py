"""Measured timelines: what they hold, and that tracing changes nothing."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re

import chainer
import numpy as np
import pytest
from support import networks, trace_format

import chainer_hybridmem as hybridmem
from chainer_hybridmem.commands import main
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.measured_timeline import (
    OPERATIONS,
    parse_timeline,
    serialise_timeline,
)
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.reporting.chrome_trace import chrome_trace
from chainer_hybridmem.reporting.memory_viz import measured_snapshot

LIMIT = 3_800_000  # bytes; Everything needs 5.2 MB in-core, 3.6 MB at least


def run(planner, traced, limit=LIMIT, iterations=8):
    np.random.seed(0)
    model = networks.Everything()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    (x, t), *_ = networks.batches(1)
    with hybridmem.optimize(
        model, limit, planner=planner, link_bandwidth='500MB/s'
    ) as session:
        if traced:
            session.trace_iteration()
        for _ in range(iterations):
            networks.iterate(model, optimizer, x, t)
    return session, [p.array for p in model.params()]


@pytest.fixture(scope='module', params=['swap-all', 'superneurons'])
def traced(request):
    session, _ = run(request.param, True)
    assert session.timeline is not None
    return session


def test_without_a_request_nothing_is_traced():
    session, _ = run('swap-all', False, iterations=5)
    assert session.timeline is None


@pytest.mark.parametrize('traced', [(), (5,), (5, 6)], ids=str)
def test_what_is_traced_is_not_timed(traced):
    model = networks.Everything()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    (x, t), *_ = networks.batches(1)
    settled = []
    with hybridmem.optimize(
        model, LIMIT, planner='swap-all', link_bandwidth='500MB/s', arena=False
    ) as session:
        for i in range(12):
            if i in traced:
                session.trace_iteration()
            networks.iterate(model, optimizer, x, t)
            session.finish_iteration()
            settled.append(session.settled)
    learning, first_in_place, timed = 3, 1, 3
    assert settled.index(True) + 1 == learning + first_in_place + timed + len(traced)


def test_one_interval_for_every_operation_in_order(traced):
    operations = [i for i in traced.timeline.intervals if i.kind in OPERATIONS]
    recorded = traced.profile.operations
    assert [i.label for i in operations] == [op.label for op in recorded]
    assert [i.kind for i in operations] == [op.phase.value for op in recorded]
    assert traced.timeline.total_seconds == operations[-1].end_seconds


def embedded(page):
    """The data of a page."""
    _, rest = page.split('<script type="application/json" id="hybridmem-data">')
    return json.loads(rest.split('</script>')[0])


def test_the_report_as_a_page(traced, tmp_path):
    path = tmp_path / 'run.html'
    text = traced.report(html=path)
    assert text == traced.report()
    data = embedded(path.read_text())
    (shown,), statistics = data['runs'], traced.statistics()
    figures = shown['figures']
    assert data['report'] == text
    model_and_date = r'[A-Z]\w+( of \w+)?, 20\d\d-\d\d-\d\d \d\d:\d\d'
    assert re.fullmatch(model_and_date, data['profile']['name'])
    assert figures['memory_limit_bytes'] == traced.limit_bytes  # that of the user
    planned = figures.get('planned_limit_bytes', traced.limit_bytes)
    assert planned == traced.plan.memory_limit_bytes
    assert figures['measured_seconds'] == statistics['iteration_seconds']
    assert figures['measured_peak_bytes'] == statistics['guided_peak_bytes']
    assert figures['predicted_seconds'] == statistics['predicted_seconds']
    assert len(shown['measured']['lanes']['kind']) == len(traced.timeline.intervals)
    cell = traced._repr_html_()
    assert cell.startswith('<iframe') and 'hybridmem-data' in cell
    with pytest.raises(FormatError, match='cannot be written'):
        traced.report(html=tmp_path / 'missing' / 'run.html')


def test_the_report_as_a_page_without_a_plan(tmp_path):
    path = tmp_path / 'run.html'
    session, _ = run(None, False, limit=50_000_000, iterations=2)
    text = session.report(html=str(path))
    assert 'nothing is planned' in text and text in path.read_text()
    assert text in session._repr_html_()


def test_every_action_of_the_plan_has_run(traced):
    timeline, plan = traced.timeline, traced.plan
    swapped = [m.storage for m in plan.maps if m.action is Action.SWAP]
    for kind in ('swap-out', 'swap-in'):
        copies = {i.storage for i in timeline.intervals if i.kind == kind}
        assert copies.issuperset(swapped)
        # What no replay makes again is copied out when it is dropped for good.
        rest = copies.difference(swapped)
        assert rest <= {m.storage for m in plan.maps if m.action is Action.KEEP}
        assert kind == 'swap-out' or not rest
    uses = {m.storage: m.needed_before for m in plan.maps if m.action is Action.SWAP}
    assert dict(timeline.uses) == uses
    replays = [i.label for i in timeline.intervals if i.kind == 'recompute']
    operations = traced.profile.operations
    assert replays == [operations[r.operation].label for r in plan.replays]
    assert swapped or replays


def test_loads_are_the_predicted_ones(traced):
    """Predicted and measured load of each operation, up to what is not planned for."""
    predicted = hybridmem.simulate(traced.profile, traced.plan).load_bytes
    measured = traced.timeline.load_bytes
    assert len(predicted) == len(measured)
    differences = [abs(a - b) for a, b in zip(predicted, measured, strict=True)]
    assert max(differences) <= 0.01 * max(predicted)
    assert max(measured) <= traced.limit_bytes
    samples = traced.timeline.samples
    assert max(s.peak_bytes for s in samples) == max(measured)


def test_events_add_up_to_the_loads(traced):
    timeline = traced.timeline
    load = highest = timeline.samples[0].occupied_bytes
    for event in timeline.events:
        load += event.nbytes if event.block > 0 else -event.nbytes
        highest = max(highest, load)
    assert highest == max(timeline.load_bytes)
    brought = {e.storage for e in timeline.events if e.storage >= 0}
    assert brought == {s for s, _ in timeline.uses}
    for event in timeline.events:
        if event.storage >= 0:
            nbytes = traced.profile.storages[event.storage].nbytes
            assert event.nbytes == nbytes


def test_a_round_trip_through_a_file(traced, tmp_path):
    path = str(tmp_path / 't.json')
    library.save(traced.timeline, path)
    assert library.load_timeline(path) == traced.timeline


def test_the_trace_of_both(traced):
    plan = traced.plan
    predicted = hybridmem.simulate(traced.profile, plan)
    trace = chrome_trace(predicted, plan, traced.timeline)
    trace_format.check_trace(trace)
    events = trace['traceEvents']
    assert {e['pid'] for e in events} == {1, 2}
    arrows = [e for e in events if e['ph'] == 's' and e['pid'] == 2]
    assert len(arrows) == 2 * plan.count(Action.SWAP)
    counters = {e['name'] for e in events if e['ph'] == 'C' and e['pid'] == 2}
    assert counters >= {
        'memory load',
        'memory limit',
        'pool: occupied',
        'pool: free',
        'pool: from the pool',
        'pool: from the device API',
    }


def test_the_commands(traced, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    library.save(traced.profile, 'p.json')
    library.save(traced.plan, 'plan.json')
    library.save(traced.timeline, 't.json')
    arguments = ['p.json', 'plan.json', '--measured', 't.json']
    more = ['-o', 'trace.json', '--snapshot', 's.pickle']
    assert main(['trace', *arguments, *more]) == 0
    out = capsys.readouterr().out
    assert 'measured' in out and 'memory_viz' in out
    with open('trace.json') as file:
        trace_format.check_trace(json.load(file))
    snapshot = measured_snapshot(traced.timeline, traced.profile)
    contents = (tmp_path / 's.pickle').read_bytes()
    assert pickle.loads(contents) == snapshot
    other = dataclasses.replace(traced.timeline, profile_fingerprint='other')
    library.save(other, 't.json')
    assert main(['trace', *arguments, '-o', 'trace.json']) == 1
    assert 'measured with a plan for profile other' in capsys.readouterr().err
    assert main(['trace', *arguments, '-o', 'x.json', '--snapshot', 't.json']) == 1
    assert 'it is what the command reads' in capsys.readouterr().err


def test_tracing_changes_no_number():
    _, plain = run('superneurons', False)
    _, traced = run('superneurons', True)
    for one, two in zip(plain, traced, strict=True):
        np.testing.assert_array_equal(one, two)


def test_an_iteration_that_leaves_its_plan_is_not_taken():
    np.random.seed(0)
    model = networks.Everything()
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with hybridmem.optimize(model, LIMIT, planner='swap-all') as session:
        for _ in range(5):
            networks.iterate(model, optimizer, x, t)
        session.trace_iteration()
        loss = chainer.functions.sum(model(x, t) * 2)  # another end
        model.cleargrads()
        loss.backward()
        del loss
        networks.iterate(model, optimizer, x, t)
        assert session.deviations and session.timeline is None
        for _ in range(5):
            networks.iterate(model, optimizer, x, t)
    assert session.timeline is not None


def test_left_in_the_middle():
    np.random.seed(0)
    model = networks.Everything()
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with pytest.raises(KeyError):
        with hybridmem.optimize(model, LIMIT, planner='swap-all') as session:
            session.trace_iteration()
            for _ in range(3):
                networks.iterate(model, optimizer, x, t)
            loss = model(x, t)
            raise KeyError
    del loss
    assert session.timeline is None


DAMAGE = {
    'a lane': lambda b: b['intervals'][0].__setitem__(0, 'h2d'),
    'a kind': lambda b: b['intervals'][0].__setitem__(1, 'sleep'),
    'backwards': lambda b: b['intervals'][0].__setitem__(4, -1.0),
    'not a number': lambda b: b['intervals'][0].__setitem__(3, float('nan')),
    'a storage': lambda b: b['intervals'][0].__setitem__(5, -7),
    'loads': lambda b: b['load_bytes'].pop(),
    'a load': lambda b: b['load_bytes'].__setitem__(0, -1),
    'no operation': lambda b: b.update(intervals=[], load_bytes=[]),
    'a use': lambda b: b['uses'].append([0, 10**6]),
    'samples': lambda b: b['samples'].reverse(),
    'a sample': lambda b: b['samples'][0].__setitem__(2, -4),
    'a block': lambda b: b['events'].append(b['events'][0]),
    'a size': lambda b: b['events'][0].__setitem__(1, 2**60),
    'an operation': lambda b: b['events'][0].__setitem__(2, -1),
    'seconds': lambda b: b.update(total_seconds=float('inf')),
    'text': lambda b: b.update(memory_limit_bytes='many'),
    'a row': lambda b: b['samples'][0].pop(),
    'missing': lambda b: b.pop('events'),
    'a version': lambda b: b.update(version=99),
    'a format': lambda b: b.update(format='chainer_hybridmem/plan'),
}


@pytest.mark.parametrize('what', DAMAGE)
def test_damaged_files_are_refused(traced, what):
    body = json.loads(serialise_timeline(traced.timeline))
    DAMAGE[what](body)
    with pytest.raises(FormatError):
        parse_timeline(json.dumps(body))
