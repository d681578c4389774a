"""How far a run is: a bar on a terminal, else a line for what takes long."""

import io
import json
import sys
import time

import pytest

from chainer_hybridmem import timing
from chainer_hybridmem.commands import progress
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library

GPU = ('--gpu', 'v100-16gb-pcie3')
LIMIT = ('--memory-limit', '70%')


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_long_run_tells_how_far_it_is(monkeypatch):
    monkeypatch.setattr(progress, 'EVERY_SECONDS', 5.0)
    clock = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    monkeypatch.setattr(timing, 'now', lambda: next(clock))
    stream = io.StringIO()
    steps = progress.Progress(4, stream)
    for name in 'abcd':
        steps.step(name)
    assert stream.getvalue() == 'hybridmem: 2 of 4: b\nhybridmem: 4 of 4: d\n'


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    pytest.importorskip('tqdm')
    stream = Terminal()
    with progress.Progress(3, stream) as steps:
        steps.step('a')
        steps.step('b\x1b')
    assert '0 of 3' in stream.getvalue() and ' a' in stream.getvalue()
    assert '\x1b' not in stream.getvalue().replace('\x1b[A', '')
    monkeypatch.setitem(sys.modules, 'tqdm', None)
    without = Terminal()
    with progress.Progress(3, without) as steps:
        steps.step('a')
    assert not without.getvalue()


def wait_for(condition):
    """Gives the other thread its turn, however busy the machine is."""
    until = time.monotonic() + 120
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_a_step_that_takes_long_has_one_line(monkeypatch):
    monkeypatch.setattr(progress, 'TICK_SECONDS', 0.01)
    monkeypatch.setattr(progress, 'LATE_SECONDS', 3.0)
    now = [0.0]
    monkeypatch.setattr(timing, 'now', lambda: now[0])
    stream = io.StringIO()
    with progress.Progress(4, stream) as steps:
        steps.step('quick')
        steps.step('slow')
        now[0] += progress.LATE_SECONDS
        assert wait_for(stream.getvalue) == 'hybridmem: 2 of 4: slow\n'
        steps.step('slow')
        now[0] += progress.LATE_SECONDS
        steps.detail('never shown')
        time.sleep(0.1)
        steps.step('recording', at_once=True)
    assert stream.getvalue() == (
        'hybridmem: 2 of 4: slow\nhybridmem: 4 of 4: recording\n'
    )


def test_lines_stand_above_the_bar(monkeypatch):
    pytest.importorskip('tqdm')
    monkeypatch.setattr(progress, 'TICK_SECONDS', 0.01)
    stream = Terminal()
    with progress.Progress(3, stream) as steps:
        steps.step('training')
        progress.print_line('compiling', stream)
        steps.detail('training, iteration 2')
        drawn = stream.getvalue().count('\r')
        assert wait_for(lambda: stream.getvalue().count('\r') > drawn)  # time goes on
    text = stream.getvalue()
    lines = {line.rpartition('\r')[2] for line in text.split('\n')}
    assert 'compiling' in lines
    assert 'training, iteration 2' in text
    progress.print_line('later', stream)
    assert stream.getvalue().endswith('later\n')


def test_ctrl_c_leaves_no_bar(profile, hybridmem):
    """Wherever it comes while one is entered or left."""
    watched = {
        progress.Progress.__enter__.__code__,
        progress.Progress.__exit__.__code__,
    }
    moment = 0
    while True:
        moment += 1
        left = moment

        def interrupt(frame, event, argument):
            nonlocal left
            if frame.f_code not in watched or not left:
                return None
            left -= 1
            if not left:
                raise KeyboardInterrupt
            return interrupt

        former = sys.gettrace()
        sys.settrace(interrupt)
        try:
            status, _, err = hybridmem('compare', 'p.json', '--memory-limit', '60%')
        finally:
            sys.settrace(former)
        assert not progress._entered
        if left:
            break
        assert (status, err) == (130, 'hybridmem: error: interrupted\n')
    assert status == 0 and moment > 10


@pytest.fixture
def on_terminal(profile, folder, network, hybridmem, monkeypatch):
    """Runs a command whose standard error is a terminal; returns what is there."""
    plan = make_plan(profile, profile.initial_bytes + 2**30, 'swap-all')
    library.save(plan, str(folder / 'plan.json'))
    terminal = Terminal()

    def run(*arguments):
        monkeypatch.setattr(sys, 'stderr', terminal)
        status, out, _ = hybridmem(*arguments, '--json', '-')
        assert status == 0, terminal.getvalue()
        json.loads(out)
        return terminal.getvalue()

    return run


NETWORK = ('--arch', 'own_networks:Tiny', '--n-class', '10')


@pytest.mark.parametrize(
    ('arguments', 'shown'),
    [
        (('plan', 'p.json', *LIMIT), ['0 of 1 |', 'planning with hybrid']),
        (('plan', 'p.json', *LIMIT, '--rule', '*=no swap'), ['1 of 2', 'each of the']),
        (
            ('compare', 'p.json', *LIMIT, '--planner', 'swap-all'),
            ['0 of 1', 'swap-all'],
        ),
        (('layout', 'p.json', '--pool', 'cupy', 'exact'), ['1 of 2', 'pool exact']),
        (
            ('estimate', *NETWORK, *GPU, '--batchsize', '64'),
            ['0 of 5', 'Tiny, 4 pictures', 'planning with hybrid'],
        ),
        (
            ('batch', *NETWORK, *GPU, '--memory-limit', '64MiB'),
            ['2 of 3', 'recording own', 'largest batch of hybrid: batch size 1'],
        ),
        (
            ('inference', *NETWORK, '--batchsize', '64', '--pool', 'cupy'),
            ['1 of 2', '4 pictures', 'pool cupy'],
        ),
        (('doctor',), ['0 of', 'training on the CPU']),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else '',
)
def test_a_long_command_has_a_bar(arguments, shown, on_terminal):
    pytest.importorskip('tqdm')
    text = on_terminal(*arguments)
    for part in shown:
        assert part in text
    assert text.endswith('\r')  # the bar is gone
