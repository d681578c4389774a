"""A page's data: parts add up to the load, peaks stay, figures are the simulator's."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib

import numpy as np
import pytest
from support import toys
from support.drawn_plans import random_plan

from chainer_hybridmem import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.measured_timeline import Sample
from chainer_hybridmem.planning.records.plan import FOR_REPLAYS, Action
from chainer_hybridmem.planning.records.profile import Category, Profile, Storage
from chainer_hybridmem.planning.records.timeline import Interval
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.reporting import page
from chainer_hybridmem.reporting.page import (
    Run,
    embed,
    make_data,
    make_frame,
    make_page,
    make_text,
)
from chainer_hybridmem.reporting.page import prices as prices_module
from chainer_hybridmem.reporting.page.composition import REST, compose
from chainer_hybridmem.reporting.page.data import (
    thin_intervals,
    thin_operations,
    thin_samples,
)
from chainer_hybridmem.reporting.page.differences import PASSED
from chainer_hybridmem.reporting.page.prices import find_prices, sweep_bound
from chainer_hybridmem.reporting.rows import as_table
from chainer_hybridmem.units import parse_bytes

PUBLISHED = {
    'uPlot.iife.min.js': (
        '19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f'
    ),
    'uPlot.min.css': 'df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04',
}
MEGABYTE = 10**6
GOOGLENET = 'shipped:googlenet-b1024-v100-estimated'
RESNET = 'shipped:resnet50-b640-v100-estimated'


@pytest.mark.parametrize('planner', ['swap-all', 'superneurons', 'checkpoint-dp'])
@pytest.mark.parametrize('name', ['shipped:resnet50-b8-host', RESNET])
def test_parts_of_a_moment_add_up_to_the_load_of_the_checker(name, planner):
    profile = library.load_profile(name)
    problem = make_problem(profile)
    plan = make_plan(problem, int(0.6 * problem.in_core_peak_bytes), planner)
    found = compose(profile, plan)
    loads = simulate(problem, plan).load_bytes
    assert found.load_bytes.tolist() == list(loads)
    assert (sum(found.group_bytes.values()) == found.load_bytes).all()
    assert all((column >= 0).all() for column in found.group_bytes.values())
    named = sum(s.nbytes for s in profile.storages if s.allocated_at < 0)
    assert set(found.group_bytes[REST].tolist()) == {profile.initial_bytes - named}
    there = np.zeros_like(found.load_bytes)
    for presence in found.presences:
        for first, last in presence.stays:
            there[first:last] += profile.storages[presence.storage].nbytes
    assert (there + found.replay_bytes + found.group_bytes[REST] == loads).all()


@pytest.mark.parametrize('seed', range(6))
def test_parts_add_up_for_drawn_networks(seed):
    """Views, masks, maps made twice; parameters and states that leave."""
    profile = toys.with_persistent(toys.random_network(seed), seed)
    problem = make_problem(profile, 'all')
    least, _ = least_memory(problem)
    plan = make_plan(problem, (least + problem.in_core_peak_bytes) // 2, 'swap-all')
    found = compose(profile, plan)
    assert found.load_bytes.tolist() == list(simulate(problem, plan).load_bytes)
    assert (sum(found.group_bytes.values()) == found.load_bytes).all()
    assert all((column >= 0).all() for column in found.group_bytes.values())
    assert len(set(found.group_bytes[REST].tolist())) == 1


@pytest.mark.parametrize('seed', range(4))
def test_what_stays_for_replays_has_a_name(seed):
    profile = toys.random_network(seed, 12)
    problem = make_problem(profile)
    limit = 2 * problem.in_core_peak_bytes
    options = {'seed_of_plan': seed, 'weights': (0, 1, 9), 'late': 0.5}
    plain, plan = (
        random_plan(problem, limit, sources=share, **options) for share in (0, 1)
    )
    found = compose(profile, plan)
    assert found.load_bytes.tolist() == list(simulate(problem, plan).load_bytes)
    assert (sum(found.group_bytes.values()) == found.load_bytes).all()
    there = {p.storage: p.stays for p in found.presences if p.group == FOR_REPLAYS}
    assert {s.storage: s.drop_before for s in plan.sources} == {
        storage: last for storage, ((_, last),) in there.items()
    }
    data = make_data(profile, [Run('a', plan), Run('b', plain)], 'toy')
    figures = data['runs'][0]['figures']
    assert figures['sources'] == len(plan.sources) > 0
    sizes = [profile.storages[s.storage].nbytes for s in plan.sources]
    assert figures['source_bytes'] == sum(sizes)
    rows = [row for row in data['runs'][0]['maps'] if row[1] == FOR_REPLAYS]
    assert sorted(row[2] for row in rows) == sorted(s.drop_before for s in plan.sources)
    (difference,) = data['differences']
    treated = [row[1:] for row in difference['largest']]
    assert treated == [[FOR_REPLAYS, PASSED]] * len(plan.sources)
    table = as_table(profile, plan).splitlines()
    assert sum(line.endswith(f'-> {FOR_REPLAYS}') for line in table) == len(sizes)


def test_a_moment_is_the_highest_of_its_operation():
    """The chain's third backward: what is made in it, and what the plan keeps."""
    profile = toys.chain(4)
    problem = make_problem(profile)
    plan = make_plan(problem, problem.in_core_peak_bytes, 'in-core')
    found = compose(profile, plan)
    k = int(found.load_bytes.argmax())
    kept = sum(
        storage.nbytes for storage in profile.feature_maps()
        if storage.producer <= k
    )  # fmt: skip
    assert found.group_bytes[Action.KEEP.value][k] == kept
    assert found.load_bytes[k] == problem.in_core_peak_bytes


def test_thinning_keeps_peaks_and_time():
    loads = np.random.default_rng(0).integers(0, 1000, 997)
    firsts, highest = thin_operations(loads, 50)
    ends = [*firsts[1:], len(loads)]
    assert len(firsts) == 50 and firsts[0] == 0
    for first, end, top in zip(firsts, ends, highest, strict=True):
        assert first <= top < end and loads[top] == loads[first:end].max()
    samples = [Sample(k / 8, 0, 0, 0, 0, int(load)) for k, load in enumerate(loads)]
    thinned = thin_samples(samples, 50)
    assert max(load for _, load in thinned) == loads.max() and len(thinned) == 50
    rows = [
        Interval(lane, kind, f'{kind} {k}', k / 8, k / 8 + 1 / 16)
        for k in range(2000)
        for lane, kind in (('compute', 'forward'), ('d2h', 'swap-out'))
    ]
    rows[7] = Interval('d2h', 'swap-out', 'long', 3 / 8, 3 / 8 + 9)
    spans = thin_intervals(rows, 100)
    assert len(spans) <= 100
    assert sum(span.count for span in spans) == len(rows)
    for lane in ('compute', 'd2h'):
        mine = [s.interval for s in spans if s.interval.lane == lane]
        of_all = [i for i in rows if i.lane == lane]
        assert mine[0].start_seconds == of_all[0].start_seconds
        assert max(i.end_seconds for i in mine) == max(i.end_seconds for i in of_all)
    assert any(span.interval.label == 'long' for span in spans)


def test_the_price_of_memory_bounds_what_more_of_it_saves():
    problem = make_problem(library.load_profile(GOOGLENET))
    limit = int(0.6 * problem.in_core_peak_bytes)
    prices = find_prices(problem, limit)
    price = prices.seconds_per_byte.sum()
    assert price > 0 and 0 < prices.more_bytes <= limit / 10
    saved = prices.bound_seconds - prices.bound_with_more_seconds
    assert 0 < saved <= price * prices.more_bytes * 1.1
    advice = prices.advise(limit, 100 * saved)
    assert (advice['bytes'], advice['seconds']) == (prices.more_bytes, saved)
    assert parse_bytes(advice['limit']) >= limit + prices.more_bytes
    assert prices.advise(limit, 300 * saved) is None
    curve = sweep_bound(problem, 5, 60)
    limits, seconds = zip(*curve, strict=True)
    assert len(limits) == 5 + 2 and limits[-1] == problem.in_core_peak_bytes
    assert all(a >= b for a, b in itertools.pairwise(seconds))
    assert seconds[-1] == pytest.approx(problem.in_core_seconds)
    assert seconds[1] >= lower_bound(problem, limits[1]).seconds


def test_what_the_solver_leaves_over_is_no_price(monkeypatch):
    """The page said that the bound falls by 0.000 s, and had columns of zeros."""
    problem = make_problem(toys.chain(6))
    limit = int(0.8 * problem.in_core_peak_bytes)
    found = lower_bound(problem, limit)
    least = prices_module.LEAST_SHARE * found.seconds / limit
    prices = np.array([least / 2] * (len(found.prices) - 1) + [least * 2])

    def noisy(problem, limit_bytes):
        seconds = found.seconds * (1 - 1e-7 * (limit_bytes > limit))
        return dataclasses.replace(found, seconds=seconds, prices=prices)

    monkeypatch.setattr(prices_module, 'lower_bound', noisy)
    shown = find_prices(problem, limit)
    assert shown.bound_with_more_seconds == shown.bound_seconds
    assert np.count_nonzero(shown.seconds_per_byte) == 1


def test_prices_of_layers_are_those_of_what_they_hold():
    profile = library.load_profile(GOOGLENET)
    problem = make_problem(profile)
    plan = make_plan(problem, int(0.6 * problem.in_core_peak_bytes), 'swap-all')
    data = make_data(profile, [Run('plan', plan)], 'p', sweep_seconds=0)
    (run,), held = data['runs'], {}
    for presence in run['presences']:
        label = data['names'][data['storages']['name'][presence['storage']]]
        layer = label.rpartition('/')[0] or label
        held[layer] = held.get(layer, 0.0) + presence['seconds']
    layers = run['prices']['layers']
    assert layers[0]['seconds'] > 0
    for row in layers:
        assert row['seconds'] == pytest.approx(held[data['names'][row['name']]])
    operations = run['prices']['operations']
    price = sum(row['seconds_per_gibibyte'] for row in operations)
    assert price == pytest.approx(run['prices']['seconds_per_gibibyte'])
    limits = [row['memory_limit_bytes'] for row in data['bounds']]
    assert plan.memory_limit_bytes in limits and limits == sorted(limits)


def test_figures_are_those_of_plan_and_simulator():
    profile = toys.chain(6)
    plans = [make_plan(profile, '60MiB', name) for name in ('swap-all', 'pooch')]
    data = make_data(profile, [Run(p.planner, p) for p in plans], 'chain')
    for plan, run in zip(plans, data['runs'], strict=True):
        figures, timeline = run['figures'], simulate(profile, plan)
        assert figures['predicted_seconds'] == timeline.total_seconds
        assert figures['peak_bytes'] == max(run['moments']['load_bytes'])
        assert figures['stall_seconds'] == timeline.stall_seconds
        assert figures['swap_maps'] == plan.count(Action.SWAP)
        assert run['moments']['load_bytes'] == list(timeline.load_bytes)
        assert len(run['lanes']['kind']) == len(timeline.intervals)
    one, two = ({m.storage: m.action for m in plan.maps} for plan in plans)
    differing = [s for s in one if one[s] is not two[s]]
    assert data['differences'][0]['maps'] == len(differing) > 0
    rows = data['differences'][0]['operations']
    assert rows[0]['seconds'][0] != rows[0]['seconds'][1]
    assert json.loads(embed(data).split('>', 1)[1].rsplit('<', 1)[0]) == data


def test_the_drawing_library_is_the_one_that_was_published():
    """Version 1.6.32 of the package uplot, not edited."""
    folder = pathlib.Path(page.__file__).parent / 'assets'
    for name, digest in PUBLISHED.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_no_name_ends_the_data():
    data = {'name': '</script><!--<script>', 'other': '\u2028\ud800'}
    text = embed(data)
    assert text.count('<') == 2 and text.isascii()
    assert '&lt;' in make_text('<b>') and '"' not in make_frame('"')[60:-60]


def crowded(profile: Profile, pairs: int) -> Profile:
    """The same iteration with so many more allocations in each operation."""
    events: list[int] = []
    moved, firsts = {}, []
    storages = list(profile.storages)
    for op in profile.operations:
        firsts.append(len(events))
        for position in range(*profile.span_of(op.index)):
            moved[position] = len(events)
            events.append(profile.events[position])
        for _ in range(pairs):
            storages.append(
                Storage(
                    len(storages), 8 + op.index, Category.WORKSPACE, f'{op.index}',
                    op.index, len(events), len(events) + 1,
                )
            )  # fmt: skip
            events += [len(storages), -len(storages)]
    moved |= {-1: -1, len(profile.events): len(events)}
    return dataclasses.replace(
        profile,
        events=tuple(events),
        graph_end_event=moved[profile.graph_end_event],
        operations=tuple(
            dataclasses.replace(op, first_event=first)
            for op, first in zip(profile.operations, firsts, strict=True)
        ),
        storages=tuple(
            dataclasses.replace(
                s, allocated_at=moved[s.allocated_at], freed_at=moved[s.freed_at]
            )
            if s.id < len(profile.storages)
            else s
            for s in storages
        ),
    )


def test_pages_are_small():
    """ResNet-50, and an iteration of 100,000 events."""
    profile = library.load_profile(RESNET)
    plan = make_plan(profile, '30GiB', 'superneurons')
    page = make_page(make_data(profile, [Run('plan', plan)], RESNET, sweep_seconds=0))
    assert len(page) < 500_000
    profile = crowded(toys.chain(1050), 24)
    assert len(profile.events) > 100_000
    problem = make_problem(profile)
    plan = make_plan(problem, problem.in_core_peak_bytes, 'in-core')
    data = make_data(profile, [Run('plan', plan)], 'long', sweep_seconds=0)
    assert len(make_page(data)) < MEGABYTE
    assert max(data['runs'][0]['moments']['load_bytes']) == problem.in_core_peak_bytes
    assert len(data['runs'][0]['moments']['load_bytes']) < len(profile.operations)


def test_gradients_from_before_are_no_inputs():
    """A profile that names them no better: they get the name of their kind."""
    profile = library.load_profile('shipped:resnet50-b8-host')
    unnamed = {s.id for s in profile.storages if s.label == 'input'}
    kinds = {i: profile.storages[i].category for i in unnamed}
    assert Category.GRADIENT in kinds.values() and Category.INPUT in kinds.values()
    problem = make_problem(profile)
    limit = int(0.6 * problem.in_core_peak_bytes)
    plan = make_plan(problem, limit, 'swap-all')
    data = make_data(profile, [Run('plan', plan)], 'p', sweep_seconds=0)
    storages, names = data['storages'], data['names']
    shown = dict(zip(storages['id'], storages['name'], strict=True))
    assert all(names[shown[i]] == kinds[i].value for i in unnamed & shown.keys())
    layers = [names[row['name']] for row in data['runs'][0]['prices']['layers']]
    assert 'gradient' in layers
