"""``hybridmem compare``."""

import dataclasses
import itertools
import json
import re
import sys

import pytest
from support import toys

from chainer_hybridmem import shipped_profiles
from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.planning.planners import PLANNERS, make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.reporting.rows import times_rows
from chainer_hybridmem.units import format_bytes, format_seconds

KEYS = {
    *('sources', 'source_bytes', 'keep_bytes', 'swap_bytes', 'recompute_bytes'),
    'memory_limit_bytes',
    'planner',
    'fits',
    'iteration_seconds',
    'in_core_seconds',
    'overhead',
    'peak_bytes',
    'host_bytes',
    'disk_bytes',
    'planning_seconds',
    'lower_bound_seconds',
    'gap',
    'keep',
    'swap',
    'recompute',
    'simulations',
}
LIMIT = ('--memory-limit', '60%')
ESTIMATED = 'shipped:alexnet-b1920-v100-estimated'


def compare(hybridmem, *arguments):
    status, out, _ = hybridmem('compare', *arguments, '--json', '-')
    rows = json.loads(out)
    assert status == (0 if any(row['fits'] for row in rows) else 1)
    return rows


def test_some_planners_by_default(profile, hybridmem):
    usual = ['in-core', 'swap-all', 'pooch', 'checkpoint-dp', 'hybrid']
    rows = compare(hybridmem, 'p.json', *LIMIT)
    assert [row['planner'] for row in rows] == usual
    _, out, _ = hybridmem('compare', 'p.json', *LIMIT)
    left = len(PLANNERS) - len(usual) - len(('manual',))
    assert out.endswith(f'\n\n{left} other planners are not shown; --all adds them.\n')
    shown = [line.split()[0] for line in out.splitlines() if line.split()]
    assert [name for name in PLANNERS if name in shown] == usual
    assert 'over all' not in out  # of one case
    for others in (('--all',), ('--planner', *usual)):
        _, out, _ = hybridmem('compare', 'p.json', *LIMIT, *others)
        assert 'not shown' not in out


def test_all_or_named(profile, hybridmem):
    status, _, err = hybridmem('compare', 'p.json', *LIMIT, '--all', *QUICK)
    assert status == 2
    assert 'not allowed with argument --all' in err


def test_figures_of_all_planners_are_those_of_the_plans(profile, hybridmem):
    problem = make_problem(profile)
    limit_bytes = int(problem.in_core_peak_bytes * 0.6)
    rows = compare(hybridmem, 'p.json', *LIMIT, '--all')
    assert [row['planner'] for row in rows] == [n for n in PLANNERS if n != 'manual']
    for row in rows:
        assert set(row) == KEYS | (set() if row['fits'] else {'reason', 'failed'})
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
    limit = ('--memory-limit', '1KiB', '--all')
    rows = compare(hybridmem, 'p.json', *limit)
    assert not any(row['fits'] for row in rows)
    _, out, _ = hybridmem('compare', 'p.json', *limit)
    assert out.count('The least memory of any plan') == 1  # one reason for all


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
    budget = ('--time-budget', '1')
    rows = compare(hybridmem, 'p.json', *LIMIT, *names, *budget)
    assert [row['fits'] for row in rows] == [True, True]
    names = ('--planner', 'swap-all', 'pooch')
    message = refused('compare', 'p.json', *LIMIT, *names, *budget)
    assert "'swap-all' has no option --time-budget" in message


def test_one_bad_profile_stops_it(folder, profile, refused):
    (folder / 'q.json').write_text('{}')
    assert 'was expected' in refused('compare', 'p.json', 'q.json', *LIMIT)


QUICK = ('--planner', 'in-core', 'swap-all')


def test_several_limits(profile, hybridmem):
    peak = make_problem(profile).in_core_peak_bytes
    limits = ('--memory-limit', '80%', '60%', '60MiB', '80%')
    rows = compare(hybridmem, 'p.json', *limits, *QUICK)
    expected = [int(peak * 0.8), int(peak * 0.6), 60 * toys.MIB]
    assert [row['memory_limit_bytes'] for row in rows[::2]] == expected
    _, out, _ = hybridmem('compare', 'p.json', *limits, *QUICK)
    assert out.count('of the in-core peak') == 3
    assert 'over all 3, best first' in out


def test_a_sweep_is_told_by_one_table(profile, hybridmem):
    """Eight tables of twenty-one rows stood before the one that answers."""
    names = ('in-core', 'swap-all', 'hybrid')
    arguments = ('compare', 'p.json', '--sweep', '4', '--planner', *names)
    status, out, _ = hybridmem(*arguments, '--json', 'c.json')
    assert status == 0
    first, _, rest = out.partition('\n\nover all 4, best first\n\n')
    lines = first.splitlines()
    assert lines[0] == 'p.json' and lines[2].startswith('overhead at a limit of ')
    assert [line.split('  ')[0] for line in lines[4:-1]] == [
        'of the in-core peak', 'lower bound', *names,
    ]  # fmt: skip
    assert '-: does not fit' in lines[-1]
    cells = {line.split('  ')[0]: line.split()[-4:] for line in lines[2:]}
    assert cells['of the in-core peak'][-1] == '100%'
    assert cells['in-core'] == ['-', '-', '-', '+0.0%']
    with open('c.json') as file:
        rows = [row for row in json.load(file) if row['planner'] == 'swap-all']
    assert cells['swap-all'] == [f'{row["overhead"]:+.1%}' for row in rows]
    assert all(name in rest for name in names)


def test_a_sweep_goes_from_the_least_memory_to_the_in_core_peak(profile, hybridmem):
    problem = make_problem(profile)
    rows = compare(hybridmem, 'p.json', '--sweep', '4', '--planner', 'swap-all')
    limits = [row['memory_limit_bytes'] for row in rows]
    assert limits[0] == least_memory(problem)[0]
    assert limits[-1] == problem.in_core_peak_bytes
    assert len({b - a for a, b in itertools.pairwise(limits)}) <= 2
    assert all(row['fits'] for row in rows)


def test_a_limit_is_marked_in_a_sweep(profile, hybridmem):
    peak = make_problem(profile).in_core_peak_bytes
    limits = ('--sweep', '3', '--memory-limit', '90%')
    status, out, _ = hybridmem('compare', 'p.json', *limits, '--planner', 'swap-all')
    assert status == 0
    heads, _, shares, *_ = out.split('\n')[2:]
    assert f'{format_bytes(int(0.9 * peak))} *' in heads and heads.count('*') == 1
    assert '90%' in shares and '100%' in shares
    assert '*: the limit of --memory-limit' in out


@pytest.mark.parametrize(
    'arguments',
    [
        ('p.json',),
        ('p.json', '--sweep', '1'),
    ],
)
def test_limits_that_make_no_sense(profile, hybridmem, arguments):
    status, _, err = hybridmem('compare', *arguments)
    assert status == 2
    assert '--sweep' in err


def test_over_all_the_best_comes_first(profile, hybridmem):
    library.save(toys.random_graph(3), 'q.json')
    names = ('--planner', 'in-core', 'swap-all', 'hybrid')
    _, out, _ = hybridmem('compare', 'p.json', 'q.json', '--sweep', '3', *names)
    table = out.partition('over all 6, best first')[2].split('\n')
    lines = [line.split() for line in table if ' of 6' in line]
    assert [line[0] for line in lines] == ['hybrid', 'swap-all', 'in-core']
    assert [line[1] for line in lines] == ['6', '6', '2']
    assert lines[0][5] == '6'  # the fastest everywhere


def test_a_planner_that_fails_is_a_row(profile, hybridmem, monkeypatch):
    def wrong(problem, limit_bytes):
        raise PlanError('map 3 is swapped in before it is out')

    monkeypatch.setitem(PLANNERS, 'swap-all', wrong)
    in_core, swap_all = compare(hybridmem, 'p.json', '--memory-limit', '1GB', *QUICK)
    assert in_core['fits'] and not swap_all['fits']
    assert swap_all['failed']
    assert swap_all['reason'] == 'swap-all: map 3 is swapped in before it is out'


def test_what_must_be_told_something_is_left_out(profile, hybridmem, monkeypatch):
    lazy = dataclasses.replace(PLANNERS['swap-all'], needs_options=True)
    monkeypatch.setitem(PLANNERS, 'manual', lazy)
    rows = compare(hybridmem, 'p.json', *LIMIT, '--all')
    assert 'manual' not in {row['planner'] for row in rows}
    rows = compare(hybridmem, 'p.json', *LIMIT, '--planner', 'manual')
    assert len(rows) == 1


@pytest.mark.parametrize('ending', ['png', 'pdf', 'svg'])
def test_a_picture(folder, profile, hybridmem, ending):
    library.save(toys.random_graph(3), 'q.json')
    line = ('p.json', 'q.json', '--sweep', '3', *QUICK, '-o', f'c.{ending}')
    status, _, _ = hybridmem('compare', *line)
    assert status == 0
    assert (folder / f'c.{ending}').stat().st_size > 1000


def test_a_picture_that_cannot_be_drawn_stops_it_at_once(profile, refused, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError('something was planned')

    monkeypatch.setitem(PLANNERS, 'swap-all', never)
    line = ('compare', 'p.json', *LIMIT, '--planner', 'swap-all', '-o')
    assert 'name it picture.png' in refused(*line, 'picture')
    assert '.quark is none of' in refused(*line, 'picture.quark')
    assert 'it is what the command reads' in refused(*line, 'p.json')
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    assert 'pip install' in refused(*line, 'picture.png')


def test_shipped_profiles_are_listed(folder, hybridmem):
    _, out, _ = hybridmem('compare', '--help')
    _, _, err = hybridmem('compare', *LIMIT)
    for told in (out, err):
        words = re.sub(r'-\s+', '-', told)  # argparse breaks lines at hyphens
        assert all(name in words for name in shipped_profiles())


def test_a_shipped_profile(folder, hybridmem):
    rows = compare(hybridmem, ESTIMATED, '--memory-limit', '16GB', *QUICK)
    assert [row['fits'] for row in rows] == [False, True]


def test_assumptions_of_estimated_times_stand_above_their_table(folder, hybridmem):
    line = 'compare', 'shipped:lstm-b128-host', ESTIMATED, '--memory-limit', '80%'
    _, out, _ = hybridmem(*line, '--planner', 'swap-all')

    host, estimated = out.partition(f'{ESTIMATED}: ')[::2]
    assert 'times: ' not in host
    assert (
        'times: device model v100-16gb-pcie3, convolution cudnn, recompute whole, x 0.9'
        in estimated
    )
    _, out, _ = hybridmem('plan', ESTIMATED, '--memory-limit', '80%')
    assert 'recompute whole, x 0.9' in out


@pytest.mark.parametrize('calibration', [None, 3, {}, {'images_per_second': 'many'}])
def test_a_foreign_calibration_is_left_out(calibration):
    device = {'model': 'mine\n', 'recompute': 'pass', 'calibration': calibration}

    ((name, text),) = times_rows({**device, 'compute_factor': 1.0})

    assert name == 'times'
    assert text == 'device model mine\\n, convolution None, recompute pass'


def test_no_profile(folder, hybridmem):
    status, _, err = hybridmem('compare', *LIMIT)
    assert status == 2
    assert 'name a PROFILE' in err
