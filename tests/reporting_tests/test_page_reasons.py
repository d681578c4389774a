"""Why two plans differ: the page tells all of it, to the byte."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from support import toys

from chainer_hybridmem import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import Category
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.reporting.page import Run, make_data

RESNET = 'shipped:resnet50-b640-v100-estimated'


def compare(profile, *plans):
    runs = [Run(f'plan {number}', plan) for number, plan in enumerate(plans)]
    data = make_data(profile, runs, 'p', sweep_seconds=0)
    return data, data['differences'][0]['reasons']


def bring_back_earlier(profile, plan):
    """The same decisions, with one swap-in an operation earlier."""
    maps = [
        dataclasses.replace(entry, swap_in_before=entry.swap_in_before - 1)
        if entry.action is Action.SWAP and entry.swap_in_before > profile.first_backward
        else entry
        for entry in plan.maps
    ]
    return dataclasses.replace(plan, maps=tuple(maps), memory_limit_bytes=2**40)


def test_the_same_decisions_at_other_operations():
    profile = toys.chain(8)
    plan = make_plan(profile, '60MiB', 'swap-all')
    other = bring_back_earlier(profile, plan)
    peaks = [simulate(profile, p).peak_bytes for p in (plan, other)]
    assert peaks[0] != peaks[1]
    data, reasons = compare(profile, plan, other)
    assert data['differences'][0]['maps'] == 0
    (limit,) = reasons['settings']
    assert limit == {
        'name': 'memory limit',
        'unit': 'bytes',
        'values': [60 << 20, 2**40],
    }
    moved = [
        (one.storage, one.swap_in_before, two.swap_in_before)
        for one, two in zip(plan.maps, other.maps, strict=True)
        if one != two
    ]
    rows = [
        (data['storages']['id'][place], before, after)
        for place, what, unit, before, after in reasons['moved']['largest']
        if what == 'swap-in starts' and unit == 'count'
    ]
    assert sorted(rows) == sorted(moved) and reasons['moved']['maps'] == len(moved) > 0
    assert reasons['replays'] == {'count': [0, 0], 'alone': [0, 0], 'same': True}
    loads = [peak['load_bytes'] for peak in reasons['peaks']]
    assert loads[0][0] == peaks[0] and max(two for _, two in loads) == peaks[1]


@pytest.mark.parametrize(
    'planners',
    [*itertools.combinations(['swap-all', 'pooch', 'superneurons'], 2)],
)
def test_what_is_there_explains_the_difference_of_loads(planners):
    """Storages, replays and nothing else: the difference adds up to the byte."""
    profile = library.load_profile(RESNET)
    problem = make_problem(profile)
    limit = int(0.6 * problem.in_core_peak_bytes)
    plans = [make_plan(profile, limit, planner) for planner in planners]
    data, reasons = compare(profile, *plans)
    assert reasons['settings'][0]['values'] == list(planners)
    assert len(reasons['settings']) == 1, 'options of other planners say nothing'
    for peak in reasons['peaks']:
        run = data['runs'][peak['run']]
        assert peak['load_bytes'][peak['run']] == run['figures']['peak_bytes']
        differences = [
            peak[key][0] - peak[key][1] for key in ('replay_bytes', 'others_bytes')
        ]
        held = sum(one - two for _, one, two in peak['largest'])
        loads = peak['load_bytes']
        assert held + sum(differences) == loads[0] - loads[1]
        assert peak['storages'] >= len(peak['largest'])
    counts = [len(plan.replays) for plan in plans]
    assert reasons['replays']['count'] == counts


def test_a_plan_beside_itself():
    profile = toys.chain(6)
    plan = make_plan(profile, '60MiB', 'pooch')
    _, reasons = compare(profile, plan, plan)
    assert reasons['settings'] == reasons['parts'] == []
    assert reasons['moved'] == {'maps': 0, 'bytes': 0, 'largest': []}
    assert reasons['replays']['same']
    assert [peak['largest'] for peak in reasons['peaks']] == [[]]


def test_options_rules_and_tiers():
    profile = toys.chain(6)
    plan = make_plan(profile, '60MiB', 'swap-all')
    changed = dataclasses.replace(
        plan,
        options={'lead': 3},
        rules=(('*', 'no recompute'),),
        host_limit_bytes=2**30,
    )
    _, reasons = compare(profile, plan, changed)
    values = {row['name']: row['values'] for row in reasons['settings']}
    assert values['option lead'] == [None, '3']
    assert values['rules'] == [None, '*: no recompute']
    assert values['host limit'] == [None, 2**30]


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
