"""``hybridmem plan``."""

import json
import re

import pytest
from support import toys

from chainer_hybridmem.planning.planners import PLANNERS
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import Category
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.units import format_bound, format_bytes

LIMIT = ('--memory-limit', '60%')


def test_writes_a_plan_that_keeps_the_limit(profile, hybridmem):
    status, out, err = hybridmem(
        'plan', 'p.json', *LIMIT, '--planner', 'swap-all', '-o', 'plan.json'
    )
    assert (status, err) == (0, '')
    plan = library.load_plan('plan.json')
    limit_bytes = int(make_problem(profile).in_core_peak_bytes * 0.6)
    assert plan.planner == 'swap-all'
    assert plan.memory_limit_bytes == limit_bytes
    check_plan(profile, plan, limit_bytes)
    assert out.startswith('swap-all: ')
    assert '6 feature maps, 60.0 MiB' in out


def test_json_has_the_figures_of_the_plan(profile, hybridmem):
    status, out, _ = hybridmem(
        'plan',
        'p.json',
        *LIMIT,
        '--planner',
        'swap-all',
        '-o',
        'plan.json',
        '--json',
        'f',
    )
    assert status == 0
    rows = dict(re.split('  +', line) for line in out.splitlines() if '  ' in line)
    assert rows['s / iteration, predicted'].endswith('%)')
    assert '%' not in rows['s / iteration, in-core']
    with open('f') as file:
        figures = json.load(file)
    plan = library.load_plan('plan.json')
    timeline = simulate(profile, plan)
    assert figures['iteration_seconds'] == plan.predicted_seconds
    assert figures['overhead'] == plan.overhead
    assert figures['gap'] == plan.gap
    assert figures['peak_bytes'] == plan.predicted_peak_bytes
    assert figures['swap'] == plan.count(Action.SWAP)
    assert figures['swap_bytes'] == figures['host_bytes'] == 60 * 2**20
    assert figures['stall_seconds'] == timeline.stall_seconds
    assert figures['simulations'] == plan.simulations


@pytest.mark.parametrize('crossing', ['states', 'all'])
def test_parameters_and_states_may_leave(crossing, folder, hybridmem):
    profile = toys.with_persistent(toys.chain(), 1)
    library.save(profile, 'p.json')
    common = ('plan', 'p.json', *LIMIT, '--planner', 'swap-all')
    arguments = (*common, '--cross-iteration', crossing)
    status, out, err = hybridmem(*arguments, '-o', 'plan.json', '--json', 'f')
    assert (status, err) == (0, '')
    nbytes = sum(
        s.nbytes
        for s in profile.persistent_storages()
        if crossing == 'all' or s.category is Category.OPTIMIZER_STATE
    )
    with open('f') as file:
        assert json.load(file)['crossing_bytes'] == nbytes
    assert f'{format_bytes(nbytes)} of what is swapped' in out
    assert simulate(profile, library.load_plan('plan.json')).total_seconds > 0
    assert 'parameters and states' not in hybridmem(*common)[1]


def test_output_is_optional(folder, profile, hybridmem):
    assert hybridmem('plan', 'p.json', *LIMIT)[0] == 0
    assert [p.name for p in folder.iterdir()] == ['p.json']


def test_options_reach_the_planner(profile, hybridmem):
    status, out, _ = hybridmem(
        'plan', 'p.json', *LIMIT, '--planner', 'pooch', '--option', 'node-budget=7'
    )
    assert status == 0
    assert 'node_budget=7' in out


@pytest.mark.parametrize(
    'option, expected',
    [
        ('node_budget=many', "node_budget is 'many'; a whole number is needed"),
        ('node_budget=1.5', 'node_budget is 1.5; a whole number is needed'),
        ('node_budget=0', 'node_budget must be above zero; 0 was given'),
        ('node_budget=none', 'node_budget is None; a whole number is needed'),
        ('depth=3', "has no option 'depth'"),
        ('time-budget=3', 'has no option --time-budget'),
    ],
)
def test_options_that_cannot_be_used(option, expected, profile, refused):
    arguments = ('--planner', 'pooch', '--option', option)
    assert expected in refused('plan', 'p.json', *LIMIT, *arguments)


@pytest.mark.parametrize(
    'arguments',
    [('--time-budget', '0.5'), ('--option', 'time-budget=0.5')],
)
def test_time_budget_reaches_the_planner(arguments, profile, hybridmem):
    _, out, _ = hybridmem('plan', 'p.json', *LIMIT, *arguments, '--json', '-')
    assert json.loads(out)['options']['time_budget'] == 0.5


def test_an_option_may_be_none(profile, hybridmem):
    arguments = ('--option', 'time_budget=none', '--option', 'steps=10')
    _, out, _ = hybridmem('plan', 'p.json', *LIMIT, *arguments, '--json', '-')
    options = json.loads(out)['options']
    assert (options['time_budget'], options['steps']) == (None, 10)


def test_time_budget_that_cannot_be_used(profile, refused):
    message = refused(
        'plan', 'p.json', *LIMIT, '--planner', 'pooch', '--time-budget', '5'
    )
    assert "'pooch' has no option --time-budget" in message
    assert 'Planners with it: exact, hybrid' in message
    message = refused('plan', 'p.json', *LIMIT, '--option', 'time_budget=soon')
    assert "--time-budget is 'soon'; a number or None is needed" in message
    message = refused('plan', 'p.json', *LIMIT, '--option', 'time_budget=inf')
    assert '--time-budget must be below 1e+09; inf was given' in message


def test_bound_and_gap_are_printed(profile, hybridmem):
    arguments = ('plan', 'p.json', *LIMIT, '--planner', 'swap-all')
    _, text, _ = hybridmem(*arguments)
    _, out, _ = hybridmem(*arguments, '--json', '-')
    figures = json.loads(out)
    bound = figures['lower_bound_seconds']
    assert 0 < bound <= figures['iteration_seconds']
    assert figures['gap'] == pytest.approx(figures['iteration_seconds'] / bound - 1)
    assert format_bound(bound, figures['gap']) in text


def test_unknown_planner(profile, refused):
    message = refused('plan', 'p.json', *LIMIT, '--planner', 'poch')
    assert "Did you mean 'pooch'?" in message
    assert all(name in message for name in PLANNERS)


def test_infeasible_limit_names_the_smallest(profile, refused):
    least, _ = least_memory(make_problem(profile))
    limit = ('--memory-limit', least - 1, '-o', 'plan.json')
    assert f'{least} bytes' in refused('plan', 'p.json', *limit)
