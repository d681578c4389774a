"""Ctrl-C at drawn moments of every command: one line, and status 130."""

import json
import pathlib
import random
import signal
import sys
import time
import traceback

import pytest
from support import foreign
from support.matrices import several

from chainer_hybridmem import commands
from chainer_hybridmem.lab.contest.instances import FORMAT, VERSION
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.simulation import make_problem

MOMENTS, MOST_MOMENTS = several(1, all_of_them=5), 50
NETWORK = ('--arch', 'own_networks:Tiny', '--n-class', '10')
TRAINING = (*NETWORK, '--batchsize', '8', '--device', 'cpu', '--memory-limit', '600KiB')
GPU = ('--gpu', 'v100-16gb-pcie3')
ARGUMENTS = {
    'profile': (*TRAINING, '-o', 'q.json'),
    'estimate': (*NETWORK, '--samples', 's.json', '--batchsize', '4096', *GPU),
    'batch': (*NETWORK, '--samples', 's.json', *GPU),
    'plan': ('p.json', '--memory-limit', '60%'),
    'compare': ('p.json', '--memory-limit', '60%'),
    'layout': ('p.json',),
    'inference': (*NETWORK, '--batchsize', '8'),
    'trace': ('p.json', 'plan.json', '-o', 't.json'),
    'show': ('p.json', 'plan.json', '-o', 'p.png'),
    'report': ('p.json', '-o', 'r.html'),
    'verify': (*TRAINING, '--planner', 'swap-all', '--iterations', '6'),
    'repair': (),
    'import': ('simrd', 'l.log', '-o', 'q.json'),
    'arena': ('run', '--held', 'held.json', '--instance', 'held', '-o', 'r.json'),
    'doctor': (),
}


@pytest.fixture
def files(profile, network):
    """The files that the arguments name."""
    limit_bytes = 6 * make_problem(profile).in_core_peak_bytes // 10
    plan = make_plan(profile, limit_bytes, 'swap-all')
    library.save(plan, 'plan.json')
    pathlib.Path('l.log').write_bytes(foreign.small_log())
    pathlib.Path('l.csv').write_text('id,lower,upper,size\n0,0,1,4\n')
    entry = {'name': 'x/l', 'task': 'layout', 'file': 'l.csv'}
    held = {'format': FORMAT, 'version': VERSION}
    held['instances'] = [{**entry, 'limits': [{'limit': '4'}]}]
    pathlib.Path('held.json').write_text(json.dumps(held))


def test_every_command_is_tried():
    """``run`` ends as the program does, which test_command_run.py tries."""
    assert {command.name for command in commands.COMMANDS} == {'run', *ARGUMENTS}


@pytest.mark.parametrize('name', ARGUMENTS)
def test_ctrl_c_ends_a_command(name, files, hybridmem, monkeypatch):
    """Unless it comes too late, or where Python has nobody to raise it to."""
    dropped = []
    monkeypatch.setattr(sys, 'unraisablehook', dropped.append)
    arguments = (name, *ARGUMENTS[name])
    hybridmem(*arguments)  # compiles and imports
    began = time.perf_counter()
    status, _, err = hybridmem(*arguments)
    seconds = time.perf_counter() - began
    assert status == 0, err
    rng = random.Random(name)
    interrupted = tried = 0
    while tried < MOMENTS or (not interrupted and tried < MOST_MOMENTS):
        tried += 1
        began = time.perf_counter()
        status, err, seen = interrupt(hybridmem, arguments, rng.uniform(0, seconds))
        if seen and not dropped:
            assert status == 130, err
            assert err.splitlines()[-1] == 'hybridmem: error: interrupted'
            interrupted += 1
        if not seen:  # the machine was busier before
            seconds = min(seconds, time.perf_counter() - began)
        dropped.clear()
    assert interrupted


def interrupt(hybridmem, arguments, seconds):
    """Status and errors of a command line, and whether Ctrl-C came in time."""
    seen = []

    def handle(number, frame):
        codes = [called.f_code for called, _ in traceback.walk_stack(frame)]
        if commands.main.__code__ in codes:
            seen.append(True)  # a frame would keep arrays
            signal.raise_signal(signal.SIGINT)  # which may be held back

    # Workers of pytest ignore it.
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
    former = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-4))
    try:
        status, _, err = hybridmem(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        signal.signal(signal.SIGINT, ctrl_c)
    return status, err, bool(seen)
