"""``hybridmem report`` writes a page, or says in one line why not."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support import toys
from support.timelines import measured_like

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.simulation import simulate

LIMIT = 60 * 2**20


@pytest.fixture
def plans(profile):
    found = {name: make_plan(profile, LIMIT, name) for name in ('pooch', 'swap-all')}
    for name, plan in found.items():
        library.save(plan, f'{name}.json')
    return found


def test_two_plans_side_by_side(profile, plans, folder, hybridmem):
    status, out, err = hybridmem(
        'report', 'p.json', 'pooch.json', 'swap-all.json', '-o', 'r.html',
        '--json', 'r.json',
    )  # fmt: skip
    assert (status, err) == (0, '')
    assert 'pooch.json' in out and 'r.html' in out
    data = json.loads((folder / 'r.json').read_text())
    for run, plan in zip(data['runs'], plans.values(), strict=True):
        assert run['figures']['predicted_seconds'] == plan.predicted_seconds
        assert run['figures']['gap'] == plan.gap
    page = (folder / 'r.html').read_text()
    text = json.dumps(data, separators=(',', ':'))
    assert text.replace('<', '\\u003c').replace('>', '\\u003e') in page


def test_plain_chainer(profile, folder, hybridmem):
    status, out, _ = hybridmem('report', 'p.json', '-o', 'r.html', '--json', '-')
    data = json.loads(out)
    assert status == 0 and [run['name'] for run in data['runs']] == ['in-core']
    assert data['runs'][0]['figures']['overhead'] == 0
    assert data['bounds'][0]['overhead'] > data['bounds'][-1]['overhead']


def test_two_runs_of_one_plan(profile, plans, folder, hybridmem):
    timeline = simulate(profile, plans['pooch'])
    for name, factor in (('one', 1.25), ('two', 1.5)):
        library.save(measured_like(timeline, plans['pooch'], factor), f'{name}.json')
    status, out, _ = hybridmem(
        'report', 'p.json', 'pooch.json', '--measured', 'one.json',
        '--measured', 'two.json', '-o', 'r.html', '--json', '-',
    )  # fmt: skip
    data = json.loads(out)
    assert status == 0 and [run['name'] for run in data['runs']] == [
        'one.json',
        'two.json',
    ]
    seconds = [run['figures']['measured_seconds'] for run in data['runs']]
    total = timeline.total_seconds
    assert seconds == pytest.approx([1.25 * total, 1.5 * total])
    (found,) = data['differences']
    assert found['measured'] and found['maps'] == 0
    one, two = found['operations'][0]['seconds']
    assert two / one == pytest.approx(1.5 / 1.25)


def test_plans_of_one_name_in_two_folders(profile, plans, folder, hybridmem):
    for name in plans:
        (folder / name).mkdir()
        (folder / f'{name}.json').rename(folder / name / 'plan.json')
    paths = [f'{name}/plan.json' for name in plans]
    _, out, _ = hybridmem('report', 'p.json', *paths, '-o', 'r.html', '--json', '-')
    assert [run['name'] for run in json.loads(out)['runs']] == paths


def test_what_it_refuses(profile, plans, refused, folder):
    other = dataclasses.replace(toys.chain(7))
    library.save(make_plan(other, '90MiB', 'swap-all'), 'other.json')
    message = refused('report', 'p.json', 'other.json', '-o', 'r.html')
    assert 'other.json is not a plan for p.json' in message
    message = refused('report', 'p.json', '--measured', 'm.json', '-o', 'r.html')
    assert 'name the plan' in message
    message = refused('report', 'p.json', 'pooch.json', '-o', 'p.json')
    assert 'it is what the command reads' in message
    message = refused('report', 'p.json', 'pooch.json', '-o', 'no/r.html')
    assert 'there is no folder no' in message
    assert not (folder / 'r.html').exists()


def test_the_simulator_is_the_judge(profile, plans, folder, hybridmem):
    hybridmem('report', 'p.json', 'pooch.json', '-o', 'r.html', '--json', 'r.json')
    data = json.loads((folder / 'r.json').read_text())
    timeline = simulate(profile, plans['pooch'])
    assert data['runs'][0]['moments']['load_bytes'] == list(timeline.load_bytes)
