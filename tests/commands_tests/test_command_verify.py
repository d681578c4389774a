"""``hybridmem verify``."""

import json

import pytest

from chainer_hybridmem.commands.arguments import Limit
from chainer_hybridmem.commands.networks import Network
from chainer_hybridmem.commands.training import Training
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.execution.live_map import LiveMap
from chainer_hybridmem.training.session.session import optimize
from chainer_hybridmem.training.session.setting.options import Options


@pytest.fixture
def arguments(trained):
    """A command line that verifies a tiny network; the last option given counts."""
    return (
        *('verify', '--arch', 'trained_networks:Tiny', '--batchsize', '16'),
        *('--n-class', '10', '--device', 'cpu', '--memory-limit', '250KiB'),
        *('--planner', 'swap-all', '--iterations', '6'),
    )


def figures_of(path='v.json'):
    with open(path) as file:
        return json.load(file)


def test_every_bit_is_the_same(arguments, hybridmem):
    status, out, err = hybridmem(*arguments, '--json', 'v.json')
    assert status == 0, err
    title = 'trained_networks:Tiny, 16 pictures of 8x8: swap-all in 250.0 KiB'
    assert out.startswith(title)
    assert '6 iterations, 3 of them guided: every bit the same' in out
    assert 'DIFFERS' not in out
    figures = figures_of()
    assert figures['same'] and figures['against'] == 'in-core'
    assert figures['peak_bytes'] <= figures['memory_limit_bytes'] == 250 * 1024
    rows = figures['iterations']
    assert [row['guided'] for row in rows] == [False] * 3 + [True] * 3
    assert all(all(row['same'].values()) for row in rows)
    kinds = set(rows[0]['same'])
    assert kinds >= {'loss', 'gradients', 'parameters', 'random state'}
    assert figures['verdict']['iterations'] == 3
    assert figures['verdict']['maps'] > 15


def test_a_share_of_its_own_peak(arguments, hybridmem):
    """The network is recorded first; the share is that of the plan of its profile."""
    status, out, err = hybridmem(
        *arguments, '--memory-limit', '80%', '--json', 'v.json'
    )
    assert status == 0, err
    figures = figures_of()
    assert figures['swapped_maps'] > 0 and 'Warning' not in out
    profiled = ['profile', *arguments[1:-4], '--memory-limit', '80%', '-o', 'p.json']
    assert hybridmem(*profiled)[0] == 0
    problem = make_problem(library.load_profile('p.json'))
    limit_bytes = Limit('80%').bytes_for(problem)
    assert figures['memory_limit_bytes'] == pytest.approx(limit_bytes, rel=0.01)


def test_a_plan_that_moves_nothing_checks_nothing(arguments, hybridmem):
    status, out, err = hybridmem(
        *arguments, '--memory-limit', '1G', '--planner', 'hybrid', '--json', 'v.json'
    )
    assert status == 0, err
    assert 'every bit the same' in out
    assert 'Warning: the plan keeps every feature map' in out.splitlines()[-1]
    figures = figures_of()
    assert figures['swapped_maps'] == figures['recomputed_maps'] == 0
    assert figures['memory_limit_bytes'] == 2**30


def test_against_a_second_planner(arguments, hybridmem):
    status, out, err = hybridmem(
        *arguments, '--planner', 'checkpoint-sqrt', '--against', 'swap-opt'
    )
    assert status == 0, err
    assert 'checkpoint-sqrt in 250.0 KiB' in out and 'against swap-opt' in out
    assert err.count('iteration 6 (guided)') == 2
    assert ' 0 replays' not in out


def test_what_differs_is_named_and_the_status_tells(arguments, hybridmem):
    """Behind the second iteration of the second training."""
    status, out, _ = hybridmem(
        *arguments, '--arch', 'trained_networks:Unlike', '--json', 'v.json'
    )
    assert status == 1
    assert 'DIFFERENT from iteration 2 on: persistent arrays, /norm/avg_mean' in out
    figures = figures_of()
    assert not figures['same']
    row = figures['iterations'][1]
    assert row['first_difference'] == ['persistent arrays', '/norm/avg_mean']
    assert not row['same']['persistent arrays'] and row['same']['gradients']
    assert figures['iterations'][0]['first_difference'] is None


def test_a_wrong_swap_in_is_an_error(arguments, refused_late, monkeypatch):
    arrived = LiveMap._arrived

    def wrong(self, root):
        if root.dtype == 'u1':  # what a swap-in has filled
            root[0] ^= 1
        arrived(self, root)

    monkeypatch.setattr(LiveMap, '_arrived', wrong)
    assert 'not as forward has made it' in refused_late(*arguments)


@pytest.fixture
def refused_late(hybridmem):
    """Runs a command line that fails after telling how it goes on."""

    def run(*arguments):
        status, out, err = hybridmem(*arguments)
        assert status == 1 and out == ''
        return err.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (('--against', 'swap-all'), 'would be compared with itself'),
        (('--against', 'swap-al'), 'swap-al'),
        (('--json', 'missing/v.json'), 'there is no folder'),
    ],
)
def test_what_cannot_be_is_refused_at_once(arguments, refused, more, message):
    assert message in refused(*arguments, *more)


def test_nothing_guided_is_no_verdict(arguments, refused_late):
    message = refused_late(*arguments, '--arch', 'trained_networks:Restless')
    assert 'None of 6 iterations has followed a plan of swap-all' in message
    assert '--iterations' in message


def test_errors_of_the_network_are_told_in_one_line(arguments, refused_late):
    message = refused_late(*arguments, '--insize', '9')
    assert 'trained_networks:Tiny cannot be run on 16 pictures' in message


def test_options_that_errors_name(arguments, hybridmem, monkeypatch):
    told = []
    check = Options.__post_init__

    def note(options):
        check(options)
        told.append((options.splitting, options.cross_iteration))

    monkeypatch.setattr(Options, '__post_init__', note)
    more = ('--planner', 'hybrid', '--splitting', 'true', '--cross-iteration', 'all')
    status, out, err = hybridmem(*arguments, *more)
    assert status == 0, err
    assert told[-1] == (True, 'all') and 'every bit the same' in out


def test_rules(arguments, hybridmem):
    status, out, err = hybridmem(*arguments, '--rule', 'ReLU=keep', '--json', 'v.json')
    assert status == 0, err
    assert '3 of them guided: every bit the same' in out
    assert ': 1 keep, ' in err
    status, _, err = hybridmem(*arguments, '--rule', 'ReLU=recompute')
    assert status == 1 and "'swap-all' cannot obey the rules" in err


def test_in_core_as_the_planner_is_a_plan_like_others(arguments, hybridmem):
    more = ('--planner', 'in-core', '--against', 'swap-all', '--memory-limit', '1G')
    status, _, err = hybridmem(*arguments, *more, '--json', 'v.json')
    assert status == 0, err
    figures = figures_of()
    assert figures['verdict']['iterations'] == 3
    assert any(row['guided'] for row in figures['iterations'])


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def test_the_first_batch_of_a_network_counts_once(trained, device):
    """As with a session around the loop."""
    network = Network('trained_networks:Tiny', 16, 8, 10, device)
    options = {'memory_limit': 2**30, 'planner': 'in-core'}
    run = network.ask('ProgramVerifier', options=options, iterations=4)
    training = Training('trained_networks:Tiny', (16, 3, 8, 8), 10, device)
    with optimize(training.model, **options) as session:
        for _ in range(4):
            training.step()
    peak_bytes = session.statistics()['peak_bytes']
    assert abs(run.peak_bytes - peak_bytes) < 16 * 3 * 8 * 8  # a quarter of a batch
