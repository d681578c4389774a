"""What the machine tells of a thread's time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from chainer_hybridmem import timing

pytestmark = pytest.mark.skipif(
    not os.path.exists('/proc/thread-self/schedstat'),
    reason='this kernel does not tell how long threads wait for a processor',
)


@pytest.fixture
def rival():
    """A program that wants the one processor which this thread may use."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    program = subprocess.Popen([sys.executable, '-c', 'while True: pass'])
    yield program
    program.kill()
    program.wait()
    os.sched_setaffinity(0, allowed)


def test_the_processor_of_another_program_counts_as_delay(rival):
    start, delayed = time.thread_time(), timing.delayed()
    while timing.delayed() == delayed:
        assert time.thread_time() < start + 30, 'this thread computes undisturbed'
    assert timing.delayed() > delayed


def test_waiting_counts_as_time():
    began, delayed = timing.now(), timing.delayed()
    own = timing.undelayed()
    time.sleep(0.05)
    slept = timing.undelayed() - own
    assert slept >= 0.05 - (timing.delayed() - delayed)
    assert slept <= timing.now() - began


def test_each_thread_and_each_process_has_its_own_delays(rival):
    """A child is told nothing of the time before it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(timing.delayed()))
    while timing.delayed() < 0.02:
        pass
    thread.start()
    thread.join()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, repr(timing.delayed()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found.append(float(os.read(reader, 100)))
    os.close(reader)
    os.close(writer)
    own = timing.delayed()
    assert all(0.0 <= seconds < own for seconds in found)


def test_a_system_that_tells_nothing_has_no_delays(monkeypatch):
    def refuse(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(os, 'open', refuse)
    assert timing.delayed() == 0.0
