"""``hybridmem compare``."""

import json

import pytest
import toys

from chainer_hybridmem import library
from chainer_hybridmem.planners import PLANNERS, make_plan
from chainer_hybridmem.simulation import make_problem
from chainer_hybridmem.units import format_seconds

KEYS = {
    'planner',
    'fits',
    'iteration_seconds',
    'in_core_seconds',
    'overhead',
    'peak_bytes',
    'host_bytes',
    'planning_seconds',
    'lower_bound_seconds',
    'gap',
    'keep',
    'swap',
    'recompute',
    'simulations',
}
LIMIT = ('--memory-limit', '60%')


def compare(hybridmem, *arguments):
    status, out, err = hybridmem('compare', *arguments, '--json', '-')
    assert (status, err) == (0, '')
    return json.loads(out)


def test_all_planners_by_default(profile, hybridmem):
    rows = compare(hybridmem, 'p.json', *LIMIT)
    assert [row['planner'] for row in rows] == list(PLANNERS)
    for row in rows:
        assert set(row) == KEYS | (set() if row['fits'] else {'reason'})


def test_figures_are_those_of_the_plans(profile, hybridmem):
    problem = make_problem(profile)
    limit_bytes = int(problem.in_core_peak_bytes * 0.6)
    for row in compare(hybridmem, 'p.json', *LIMIT):
        if not row['fits']:
            continue
        plan = make_plan(problem, limit_bytes, row['planner'])
        assert row['iteration_seconds'] == plan.predicted_seconds
        assert row['peak_bytes'] == plan.predicted_peak_bytes <= limit_bytes
        assert row['in_core_seconds'] == pytest.approx(profile.compute_seconds)
        assert row['keep'] + row['swap'] + row['recompute'] == len(plan.maps)


def test_a_planner_that_does_not_fit_is_a_row(profile, hybridmem):
    in_core, swap_all = compare(
        hybridmem, 'p.json', *LIMIT, '--planner', 'in-core', 'swap-all'
    )
    assert swap_all['fits'] and not in_core['fits']
    assert in_core['iteration_seconds'] is None
    assert in_core['in_core_seconds'] == swap_all['in_core_seconds']
    assert 'memory limit' in in_core['reason']
    status, out, _ = hybridmem('compare', 'p.json', *LIMIT)
    assert status == 0
    assert 'does not fit' in out and in_core['reason'] in out


def test_nothing_fits(profile, hybridmem):
    rows = compare(hybridmem, 'p.json', '--memory-limit', '1KiB')
    assert not any(row['fits'] for row in rows)
    _, out, _ = hybridmem('compare', 'p.json', '--memory-limit', '1KiB')
    assert out.count('The smallest limit that works') == 1  # one reason for all


def test_everything_fits(profile, hybridmem):
    for row in compare(hybridmem, 'p.json', '--memory-limit', '1TB'):
        assert row['fits']
        assert row['peak_bytes'] <= make_problem(profile).in_core_peak_bytes


def test_several_profiles(profile, hybridmem):
    library.save(toys.random_graph(3), 'q.json')
    rows = compare(
        hybridmem, 'p.json', 'q.json', *LIMIT, '--planner', 'in-core', 'swap-all'
    )
    found = [(row['profile'], row['planner']) for row in rows]
    assert found == [
        (path, planner)
        for path in ('p.json', 'q.json')
        for planner in ('in-core', 'swap-all')
    ]
    _, out, _ = hybridmem('compare', 'p.json', 'q.json', *LIMIT)
    assert 'p.json: ' in out and 'q.json: ' in out


def test_planners_once_each_in_the_order_given(profile, hybridmem):
    names = ('--planner', 'swap-all', 'pooch', '--planner', 'in-core', 'pooch')
    rows = compare(hybridmem, 'p.json', *LIMIT, *names)
    assert [row['planner'] for row in rows] == ['swap-all', 'pooch', 'in-core']


def test_json_beside_the_table(profile, hybridmem):
    _, out, _ = hybridmem('compare', 'p.json', *LIMIT, '--json', 'c.json')
    with open('c.json') as file:
        rows = json.load(file)
    assert all(row['planner'] in out for row in rows)


def test_unknown_planner(profile, refused):
    message = refused('compare', 'p.json', *LIMIT, '--planner', 'swap-all', 'nobody')
    assert "no planner 'nobody'" in message


def test_bound_and_gap_are_columns(profile, hybridmem):
    rows = compare(hybridmem, 'p.json', *LIMIT, '--planner', 'swap-all')
    _, out, _ = hybridmem('compare', 'p.json', *LIMIT, '--planner', 'swap-all')
    assert 'bound' in out and 'gap' in out
    assert format_seconds(rows[0]['lower_bound_seconds']) in out
    assert f'{rows[0]["gap"]:.1%}' in out


def test_time_budget_is_for_planners_that_have_one(profile, hybridmem, refused):
    names = ('--planner', 'swap-all', 'hybrid')
    budget = ('--time-budget', '9')
    rows = compare(hybridmem, 'p.json', *LIMIT, *names, *budget)
    assert [row['fits'] for row in rows] == [True, True]
    names = ('--planner', 'swap-all', 'pooch')
    message = refused('compare', 'p.json', *LIMIT, *names, *budget)
    assert "'swap-all' has no option 'time_budget'" in message


def test_one_bad_profile_stops_it(folder, profile, refused):
    (folder / 'q.json').write_text('{}')
    assert 'was expected' in refused('compare', 'p.json', 'q.json', *LIMIT)
