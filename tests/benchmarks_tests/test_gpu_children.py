"""Cases run in other processes, whatever becomes of these."""

from __future__ import annotations

import pathlib
import sys

import pytest

from benchmarks.gpu import children

ROOT = str(pathlib.Path(__file__).resolve().parents[2])
CASES = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from benchmarks.gpu import children

alive = True

def good():
    yield {{'figure': 1, 'process': os.getpid()}}
    yield {{'figure': 2}}

def crash():
    yield {{'figure': 3}}
    os.kill(os.getpid(), signal.SIGSEGV)

def sleep():
    time.sleep(60)
    yield {{}}

def fail():
    raise ValueError('no such\\nlayout')

def lose():
    global alive
    alive = False
    raise RuntimeError('illegal address')

cases = dict(good=good, crash=crash, sleep=sleep, fail=fail, lose=lose, last=good)
sys.exit(children.serve(cases, sys.argv[1:], lambda: alive))
"""


@pytest.fixture
def run():
    def run(*names, silence=30.0, source=CASES):
        rows = []
        command = [sys.executable, '-c', source.format(root=ROOT)]
        children.run(command, names, rows.append, silence)
        return rows

    return run


def test_rows_come_in_order(run):
    rows = run('good', 'last')
    assert [(row['case'], row['figure']) for row in rows] == [
        ('good', 1), ('good', 2), ('last', 1), ('last', 2),
    ]  # fmt: skip


def test_a_case_that_ends_its_process_costs_the_others_nothing(run):
    rows = run('good', 'crash', 'last')
    assert [row['case'] for row in rows] == ['good'] * 2 + ['crash'] * 2 + ['last'] * 2
    assert rows[2]['figure'] == 3
    assert rows[3]['why'] == 'its process ended by SIGSEGV'
    assert rows[0]['process'] != rows[4]['process']


def test_a_silent_case_is_ended(run):
    silent, last, _ = run('sleep', 'last', silence=2.0)
    assert silent == {
        'case': 'sleep',
        'why': 'its process said nothing for too long, or was killed',
    }
    assert last['case'] == 'last'


def test_a_case_that_fails_is_told_in_one_line(run):
    failed, *others = run('fail', 'last')
    assert failed == {'case': 'fail', 'why': 'ValueError: no such layout'}
    assert len(others) == 2


def test_after_a_lost_gpu_the_others_run_in_a_new_process(run):
    first, _, lost, last, _ = run('good', 'lose', 'last')
    assert lost['why'] == 'RuntimeError: illegal address'
    assert first['process'] != last['process']


def test_a_process_that_begins_nothing_is_not_started_again(run):
    rows = run('good', 'last', source='raise SystemExit(7)')
    assert rows == [
        {'case': name, 'why': 'not begun: its process ended with status 7'}
        for name in ('good', 'last')
    ]
