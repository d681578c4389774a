"""``--splitting`` of the commands that plan, on what ``hybridmem profile`` records."""

import json

import pytest

from chainer_hybridmem import commands
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.units import format_bytes


@pytest.fixture(scope='module')
def recorded(tmp_path_factory):
    """A recorded iteration of a small network."""
    path = tmp_path_factory.mktemp('parts') / 'p.json'
    arguments = [
        'profile',
        '--arch',
        'support.networks:Everything',
        '--batchsize',
        8,
        '--insize',
        24,
    ]
    arguments += ['--n-class', 10, '--memory-limit', '2GB', '-o', path]
    assert commands.main([str(a) for a in arguments]) == 0
    return path


@pytest.fixture
def limits(recorded):
    """Least memory by what may run in parts."""
    profile = library.load_profile(str(recorded))
    assert profile.splits
    return {
        text: least_memory(make_problem(profile, splitting=splitting))[0]
        for text, splitting in (('false', False), ('exact', 'exact'), ('true', True))
    }


def test_a_profile_of_a_percentage_is_planned_at_percentages_of_the_same(
    hybridmem, folder
):
    network = ('--arch', 'support.networks:Everything', '--batchsize', '8')
    picture = ('--insize', '24', '--n-class', '10')
    status, out, err = hybridmem(
        'profile', *network, *picture, '--memory-limit', '55%', '-o', 'p', '--json', 'f'
    )
    assert status == 0, err
    profile = library.load_profile('p')
    assert profile.functions_in_parts
    with open('f') as file:
        figures = json.load(file)
    peak, in_parts = (
        figures[f'in_core_peak{parts}_bytes'] for parts in ('', '_in_parts')
    )
    assert in_parts < peak == profile.plain_peak_bytes
    status, out, err = hybridmem('plan', 'p', '--memory-limit', '90%', '--json', 'f')
    assert status == 0, err
    assert f'90% of the in-core peak of {format_bytes(peak)}' in out
    with open('f') as file:
        assert json.load(file)['memory_limit_bytes'] == int(0.9 * peak)


def test_plan_takes_functions_in_parts(recorded, limits, hybridmem, refused, folder):
    assert limits['false'] > limits['exact'] >= limits['true']
    limit = ('--memory-limit', limits['exact'], '--planner', 'swap-all')
    status, out, _ = hybridmem('plan', recorded, *limit, '-o', 'q', '--json', 'f')
    assert status == 0 and 'run in parts, of these not exact' in out
    plan = library.load_plan('q')
    assert plan.parts
    check_plan(library.load_profile(str(recorded)), plan, limits['exact'])
    with open('f') as file:
        parts = json.load(file)['parts']
    assert [part['operation'] for part in parts] == [p.operation for p in plan.parts]
    assert all(part['label'] and part['exact'] for part in parts)
    error = refused('plan', recorded, *limit, '--splitting', 'false')
    assert f'{limits["false"]} bytes' in error


def test_plan_up_to_rounding(recorded, limits, hybridmem):
    limit = ('--memory-limit', limits['true'], '--planner', 'swap-all')
    status, _, _ = hybridmem('plan', recorded, *limit, '--splitting', 'true')
    assert status == 0
    assert limits['true'] < limits['exact']
    status, _, _ = hybridmem('plan', recorded, *limit)
    assert status == 1


def test_compare_and_show_with_parts(recorded, limits, hybridmem, folder):
    compare = ('compare', recorded, '--memory-limit', limits['exact'], '--json', 'f')
    for splitting, fits in (('exact', True), ('false', False)):
        status, _, _ = hybridmem(
            *compare, '--planner', 'swap-all', '--splitting', splitting
        )
        with open('f') as file:
            rows = json.load(file)
        assert [row['fits'] for row in rows] == [fits]
    hybridmem(
        'plan',
        recorded,
        '--memory-limit',
        limits['exact'],
        '--planner',
        'swap-all',
        '-o',
        'q',
    )
    for arguments in (
        ('trace', recorded, 'q', '-o', 't.json'),
        ('layout', recorded, '--plan', 'q'),
    ):
        status, _, err = hybridmem(*arguments)
        assert (status, err) == (0, '')


def test_other_values_are_refused(recorded, hybridmem):
    status, _, err = hybridmem(
        'plan', recorded, '--memory-limit', '1GB', '--splitting', 'some'
    )
    assert status == 2
    assert "'some' is not one of exact, true, false" in err


def test_estimate_with_parts(hybridmem, folder):
    estimate = (
        'estimate',
        '--arch',
        'support.networks:Everything',
        '--insize',
        24,
        '--n-class',
        10,
        '--sample-batches',
        4,
        8,
        '--samples',
        's',
        '--batchsize',
        64,
        '--memory-limit',
        '1GB',
        '--planner',
        'swap-all',
        '--json',
        'f',
    )
    least = {}
    for splitting in ('false', 'exact', 'true'):
        status, _, _ = hybridmem(*estimate, '--splitting', splitting, '-o', 'p')
        assert status == 0
        profile = library.load_profile('p')
        value = {'false': False, 'true': True}.get(splitting, splitting)
        least[splitting] = least_memory(make_problem(profile, splitting=value))[0]
    assert least['true'] < least['false']
