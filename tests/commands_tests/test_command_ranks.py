"""``hybridmem`` for processes that share one link."""

import itertools
import json

import pytest
from support import toys

from chainer_hybridmem.commands.figures import profile_figures
from chainer_hybridmem.commands.node_table import counts
from chainer_hybridmem.commands.profile import values
from chainer_hybridmem.forecasting.estimation import (
    all_reduce_bytes,
    all_reduce_seconds,
    with_all_reduce,
)
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.sharing import share_links
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.units import format_bytes, format_seconds

GPU = ('--gpu', 'v100-16gb-pcie3')
BATCH = ('--batchsize', '512', '--memory-limit', '60%')


@pytest.fixture
def saved(folder):
    library.save(toys.chain(8), 'p.json')
    return 'p.json'


def test_how_many_gpus_on_one_link_are_worth_it(network, hybridmem):
    arguments = ('estimate', *network, *BATCH, *GPU, '--ranks', '3')
    status, out, err = hybridmem(*arguments, '--json', 'e.json')
    assert status == 0, err
    with open('e.json') as file:
        rows = json.load(file)['ranks']
    assert [row['gpus'] for row in rows] == [1, 2, 3]
    assert [row['ranks_on_link'] for row in rows] == [1, 2, 3]
    for before, row in itertools.pairwise(rows):
        assert row['iteration_seconds'] >= before['iteration_seconds']
        assert row['lower_bound_seconds'] >= before['lower_bound_seconds'] * 0.999
        assert row['alone_plan_seconds'] >= row['iteration_seconds']
    for row in rows:
        assert row['images_per_second'] == pytest.approx(
            row['gpus'] * row['images_per_second_per_gpu']
        )
        assert row['all_reduce_seconds'] is None
        assert f'{row["images_per_second"]:.1f}' in out
    assert 'plan for a link alone' in out and 'all-reduce' not in out


def test_the_gpus_of_a_node(network, hybridmem):
    arguments = ('estimate', *network, *BATCH, '--node', 'switch-4', '--all-reduce')
    status, out, err = hybridmem(*arguments, '--json', '-')
    assert status == 0, err
    found = json.loads(out)
    assert found['gpu'] == 'gtx1080ti'
    assert [row['gpus'] for row in found['ranks']] == [1, 2, 4]
    summed = [row['all_reduce_seconds'] for row in found['ranks']]
    assert summed[0] == 0 < summed[1] < summed[2]
    assert 'KiB, ' in hybridmem(*arguments)[1]


def test_gradients_over_nvlink_take_no_time_on_the_link(network, hybridmem):
    arguments = ('estimate', *network, *BATCH, '--node', 'dgx-1', '--all-reduce')
    found = json.loads(hybridmem(*arguments, '--json', '-')[1])
    assert found['gpu'] == 'v100-16gb-pcie3'
    rows = found['ranks']
    assert [(row['gpus'], row['ranks_on_link']) for row in rows] == [
        *((1, 1), (2, 1), (4, 1), (8, 2)),
    ]
    assert all(row['all_reduce_seconds'] is None for row in rows)
    assert rows[3]['all_reduce_bytes'] > 0


def test_half_an_iteration_apart(network, hybridmem):
    arguments = ('estimate', *network, *BATCH, *GPU, '--ranks', '4')
    arguments = (*arguments, '--double-buffering')
    rows = json.loads(hybridmem(*arguments, '--json', '-')[1])['ranks']
    for row in rows:  # lockstep is one of the ways to begin
        assert row['half_apart_seconds'] <= row['iteration_seconds'] * (1 + 1e-9)
        assert row['half_apart_seconds'] >= row['any_start_bound_seconds'] * (1 - 1e-9)
        assert row['any_start_bound_seconds'] >= row['in_core_seconds'] * (1 - 1e-9)
    out = hybridmem(*arguments)[1]
    assert 'half an iteration apart' in out
    assert f'{rows[-1]["half_apart_overhead"]:+.1%}' in out


def test_nothing_fits_for_any_number(network, hybridmem):
    limit = ('--batchsize', '8', '--memory-limit', '20KiB')
    arguments = ('estimate', *network, *limit, *GPU, '--ranks', '2')
    found = json.loads(hybridmem(*arguments, '--json', '-')[1])
    assert [row['fits'] for row in found['ranks']] == [False, False]
    assert found['ranks'][0]['reason'] in hybridmem(*arguments)[1]


def test_numbers_of_gpus():
    assert counts(1) == [1]
    assert counts(2) == [1, 2]
    assert counts(6) == [1, 2, 4, 6]
    assert counts(8) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        (('--ranks', '0'), 'not a whole number above zero'),
        (('--ranks', '2000'), 'a whole number from 1 to 1024'),
        (('--node', 'dgx'), "Did you mean 'dgx-1'"),
        (('--node', 'dgx-1', '--ranks', '9'), 'Node dgx-1 has 8 GPUs, not 9'),
        (('--all-reduce',), 'say how many with --ranks'),
        (('--double-buffering',), 'say how many with --ranks'),
        (
            ('--ranks', '2', '--all-reduce', '--double-buffering'),
            'ask for one of both',
        ),
        (('--ranks', '2', '--shared-by', '2'), 'leave out --shared-by'),
    ],
)
def test_wrong_values(network, hybridmem, arguments, says):
    status, out, err = hybridmem('estimate', *network, *BATCH, *GPU, *arguments)
    assert status != 0 and not out
    assert says in err


def test_an_estimate_for_a_shared_link(network, hybridmem):
    arguments = ('estimate', *network, *BATCH, *GPU, '--shared-by', '4')
    status, out, err = hybridmem(*arguments, '-o', 'shared.json')
    assert status == 0, err
    assert 'link shared by  4 processes' in out
    assert library.load_profile('shared.json').link.ranks == 4


def test_a_plan_for_a_shared_link(saved, hybridmem):
    limit = ('--memory-limit', '60MiB', '--json', '-')
    alone = json.loads(hybridmem('plan', saved, *limit)[1])
    shared = json.loads(hybridmem('plan', saved, *limit, '--shared-by', '4')[1])
    assert shared['lower_bound_seconds'] > alone['lower_bound_seconds']
    four = json.loads(hybridmem('compare', saved, *limit, '--shared-by', '4')[1])
    rows = {row['planner']: row for row in four}
    assert rows['hybrid']['iteration_seconds'] == shared['iteration_seconds']


def test_the_largest_batch_on_a_shared_link(network, hybridmem):
    limit = ('--memory-limit', '20MiB', *GPU, '--min-speed', '95%', '--json', '-')
    found = [
        json.loads(hybridmem('batch', *network, *limit, '--shared-by', n)[1])
        for n in ('1', '64')
    ]
    assert found[0]['batchsize'] >= found[1]['batchsize'] > 0


def test_who_shares_the_link_is_shown():
    profile = toys.chain(3)
    for n, told in ((1, False), (4, True)):
        found = profile_figures(make_problem(share_links(profile, n)))
        assert found['link']['ranks'] == n
        rows = [value for _, value in values(found)]
        assert any('4 processes' in value for value in rows) == told


def test_what_the_sum_of_gradients_takes_is_shown():
    profile = toys.with_persistent(toys.chain(3), 1)
    alone = values(profile_figures(make_problem(profile)))
    assert 'sum of gradients' not in dict(alone)
    summed = with_all_reduce(share_links(profile, 4), 4)
    figures = profile_figures(make_problem(summed))
    nbytes = figures['exchanged_bytes']
    assert nbytes == all_reduce_bytes(profile, 4) > 0
    assert figures['operations']['all-reduce'] == 1
    expected = format_seconds(all_reduce_seconds(summed, 4))
    said = dict(values(figures))['sum of gradients']
    assert said == f'{expected}, each process sends {format_bytes(nbytes)}'
