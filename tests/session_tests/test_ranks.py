"""Ranks that train together: one plans for all, and nobody waits for ever."""

from __future__ import annotations

import json
import pathlib

import pytest
from support.matrices import several
from support.mpi import needs_mpi, run_ranks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.units import format_bytes, parse_bytes

# isort: split
import chainer.links as L
from session_tests import ranks_program

pytestmark = needs_mpi
PROGRAM = pathlib.Path(__file__).with_name('ranks_program.py')
COUNT = 2
COUNTS = range(COUNT, COUNT + several(1, all_of_them=2))
# One after the other in the same processes: to start them takes as long as to train.
# What holds memory comes last.
WAYS = 'plain,apart,together,slow,after,limit,network,stop,replan,cache,hold-0,hold-all'
UNREAD = """
import chainer_hybridmem.training.session.setting.ranks as ranks, chainermn, time

communicator = chainermn.create_communicator('naive')
mailbox = ranks.mailbox_of(communicator)
if communicator.rank == 0:
    mailbox.send([1], 'key', 'value')
communicator.mpi_comm.Barrier()
communicator.mpi_comm.allgather('it has come')
if communicator.rank == 0:
    time.sleep(1)  # the other one ends first
    print('through', flush=True)
"""
LIMIT_BYTES = parse_bytes(ranks_program.LIMIT, 'limit')


def start(ways, folder, **options):
    """Runs all ranks; returns the process that has ended, or fails if it does not."""
    return run_ranks(PROGRAM, ways, folder, **options)


def said_by_all(result, folder):
    """The words of mpiexec and of all ranks."""
    texts = [file.read_text(encoding='utf-8') for file in folder.glob('rank-*.txt')]
    return '\n'.join([result.stdout, result.stderr, *texts])


def found_in(ways, folder, count=COUNT):
    """What the ranks have found in each way, once they have ended well."""
    result = start(ways, folder, count=count)
    assert result.returncode == 0, said_by_all(result, folder)
    return {
        way: [
            json.loads((folder / f'{way}-{rank}.json').read_text(encoding='utf-8'))
            for rank in range(count)
        ]
        for way in ways.split(',')
    }


@pytest.fixture(scope='module')
def found(tmp_path_factory):
    return found_in(WAYS, tmp_path_factory.mktemp('ranks'))


@pytest.fixture
def plain(found):
    return found['plain']


def check_same_plan(found):
    """All ranks have the plan of the first, or what they have said is the message."""
    lines = '\n'.join(line for one in found for line in ['', *one['lines']])
    assert {one['maps'] for one in found} == {found[0]['maps']}, lines


def test_each_may_plan_for_itself(found):
    apart = found['apart']
    for one in apart:
        assert one['kept'] == one['small'] == one['plain']
        assert one['peak_bytes'] <= one['limit_bytes'] < one['in_core_peak_bytes']
        assert one['guided_iterations'] > 0
        assert one['moved'] > 0
    # They exchange gradients, not pictures.
    first, second = (one['plain'] for one in apart)
    assert first[1] == second[1]
    assert first[0] != second[0]


def lines_with(found, what):
    return [line for line in found['lines'] if what in line]


@pytest.mark.parametrize('count', COUNTS)
def test_all_follow_the_plan_of_the_first(count, found, tmp_path):
    if count != COUNT:
        found = found_in('plain,together', tmp_path, count)
    together = found['together']
    check_same_plan(together)
    for one, other in zip(together, found['plain'], strict=True):
        assert one['parameters'] == other['parameters']
        assert one['state'] == 'guided'
        assert "'swap'" in one['maps']
        assert one['peak_bytes'] <= LIMIT_BYTES
        link = one['link']
        assert link['ranks'] == count
        rates = link['d2h_bytes_per_second'], link['h2d_bytes_per_second']
        assert all(rate < 1.05 * 400e6 for rate in rates)
        assert one['host_limit_bytes'] == 2**26 // count
        exchanged = 2 * (count - 1) * one['gradient_bytes'] // count
        assert f'each process sends {format_bytes(exchanged)}' in one['report']
        assert one['after_backward'] == [['all-reduce', exchanged], ['update', 0]]
        assert not lines_with(one, 'alone')


def test_a_message_that_nobody_has_read_ends_no_process(tmp_path):
    program = tmp_path / 'unread.py'
    program.write_text(UNREAD, encoding='utf-8')
    result = run_ranks(program)
    assert (result.returncode, result.stdout) == (0, 'through\n')


@pytest.mark.parametrize('way', ['together', 'slow', 'after', 'stop'])
@pytest.mark.parametrize('rank', range(COUNT))
def test_they_measure_the_link_together(rank, way, found):
    """What that says of its rate: see ``test_link_users.py``."""
    one = found[way][rank]
    assert one['link']['ranks'] == COUNT
    assert one['others'] == [COUNT - 1]


def test_one_session_after_the_other(found, plain):
    check_same_plan(found['after'])
    for one in found['after']:
        assert one['parameters'] == plain[0]['parameters']
        assert not lines_with(one, 'alone')


def test_a_planner_that_all_ask_for_plans_once(found, plain):
    check_same_plan(found['replan'])
    first, second = found['replan']
    assert "'swap'" in first['maps'] and "'keep'" not in first['maps']
    assert first['parameters'] == second['parameters'] == plain[0]['parameters']
    assert not lines_with(second, 'alone')


def test_all_follow_plans_of_earlier_runs(found, plain):
    check_same_plan(found['cache'])
    for one in found['cache']:
        assert one['parameters'] == plain[0]['parameters']
        assert one['guided'] == ranks_program.ITERATIONS
        assert not lines_with(one, 'alone')


def test_all_follow_when_the_plan_of_the_first_changes(found):
    check_same_plan(found['hold-0'])
    first, second = found['hold-0']
    assert lines_with(first, 'arena: ')  # has no place any more
    assert lines_with(second, 'the plan of the node has changed')
    assert not lines_with(second, 'alone')
    assert first['parameters'] == second['parameters']


def test_all_follow_though_the_first_finds_no_plan(found):
    """What all hold leaves none; what comes after that is common again."""
    check_same_plan(found['hold-all'])
    first, second = found['hold-all']
    for one in (first, second):
        assert lines_with(one, 'no plan fits beside them')
        assert not lines_with(one, 'alone')
    assert first['parameters'] == second['parameters']


@pytest.mark.parametrize('way', ['limit', 'network'])
def test_a_rank_that_differs_plans_alone(way, found, plain):
    first, second = found[way]
    assert first['state'] == second['state'] == 'guided'
    assert lines_with(second, 'rank 1 goes on alone (plan): rank 0 has another')
    assert not lines_with(first, 'alone')
    assert first['maps'] != second['maps']
    assert first['parameters'] == second['parameters']
    if way == 'limit':
        assert first['parameters'] == plain[0]['parameters']


def test_a_rank_that_stops_for_a_while_keeps_the_others_waiting(found, plain):
    stopped = found['stop']
    assert stopped[0]['parameters'] == plain[0]['parameters']
    assert min(one['seconds'] for one in stopped) > 1.5
    assert [one['state'] for one in stopped] == ['guided'] * COUNT


@pytest.mark.parametrize(
    ('way', 'said'),
    [
        ('raise', 'ValueError: rank 1 is broken'),
        ('absent', 'Ranks 1 of 2 have not called optimize()'),
        ('kill', ''),  # it has no time for words
    ],
)
def test_a_rank_that_fails_ends_all(way, said, tmp_path):
    result = start(way, tmp_path, timeout=60)
    told = said_by_all(result, tmp_path)
    assert result.returncode != 0
    assert said in told, f'exit status {result.returncode}: {told}'
    assert not list(tmp_path.glob('*.json'))


def test_other_communicators_are_refused():
    with pytest.raises(hybridmem.OptionError, match='chainermn.create_communicator'):
        hybridmem.optimize(L.Linear(2, 2), '1GiB', communicator='naive')


def test_one_process_needs_nobody():
    import chainermn

    communicator = chainermn.create_communicator('naive')
    with pytest.raises(hybridmem.OptionError, match='another size for each rank'):
        hybridmem.optimize(L.Linear(2, 2), 'free', communicator=communicator)
    model = L.Linear(2, 2)
    with hybridmem.optimize(model, '1GiB', communicator=communicator) as session:
        assert session.options.ranks_per_node == 1
