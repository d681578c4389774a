"""The fuzzer notices what must never happen: here the package does it."""

from __future__ import annotations

import math
import os
from typing import Any

from chainer_hybridmem.training.devices.host.array_data import bytes_of
from chainer_hybridmem.training.devices.host.copies import CopyThread
from chainer_hybridmem.training.devices.host.counter import Counter
from chainer_hybridmem.training.devices.host.memory import HostMemory
from chainer_hybridmem.training.devices.swap_store.store import TieredStore
from chainer_hybridmem.training.execution.live_map import HostSide, LiveMap
from chainer_hybridmem.training.splitting import splitter

# isort: split
import chainer
import pytest

from .fuzz import interruptions, schedules
from .fuzz.cases import draw
from .fuzz.checking import Result, check
from .fuzz.training import READS

CASE = 260  # its plan swaps 4 maps and recomputes 8
OVERWRITING = 1890  # backward, which writes over what functions keep, runs twice
SHARING = 1008  # its gradients are views of one array, and some sums have no room


def outcome() -> Result:
    return check(draw(CASE))


def test_the_case_is_worth_it() -> None:
    result = outcome()
    assert result.outcome == 'same' and min(result.moved) > 0


def test_backward_reads_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of a map that has come back."""
    finish = LiveMap.finish_swap_in

    def flipped(self: LiveMap) -> None:
        root: Any = self.host.memory
        finish(self)
        if root is not None:
            bytes_of(root)[0] ^= 1

    monkeypatch.setattr(LiveMap, 'finish_swap_in', flipped)
    result = outcome()
    assert result.outcome == 'different' and READS in result.detail


@pytest.mark.parametrize(
    ('case', 'owner', 'name', 'answer'),
    [
        pytest.param(OVERWRITING, HostSide, 'differs_from', False, id='an old copy'),
        pytest.param(SHARING, splitter, '_alone', True, id='a sum where others read'),
    ],
)
def test_a_question_is_answered_wrongly(
    case: int, owner: Any, name: str, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(draw(case)).outcome == 'same'
    monkeypatch.setattr(owner, name, lambda *_: answer)
    assert check(draw(case)).outcome == 'different'


def test_the_limit_is_not_kept_and_the_package_does_not_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = Counter.__init__

    def generous(self: Counter, limit_bytes: int, *arguments: Any) -> None:
        make(self, 2 * limit_bytes, *arguments)

    monkeypatch.setattr(Counter, '__init__', generous)
    for name in ('peak_bytes', 'window_peak_bytes'):
        told = property(
            lambda self, name=name: min(getattr(self.counter, name), self.limit_bytes)
        )
        monkeypatch.setattr(HostMemory, name, told)
    result = outcome()
    assert result.outcome == 'limit', result.detail


def test_a_session_leaves_host_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TieredStore, 'close', lambda self: None)
    assert outcome().outcome == 'left'


def test_a_session_leaves_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[CopyThread] = []
    close = CopyThread.close
    monkeypatch.setattr(CopyThread, 'close', lambda self: left.append(self))
    case = draw(CASE)
    case.session['copies'] = 'threads'
    try:
        assert check(case).outcome == 'left'
    finally:
        for thread in left:
            close(thread)


def test_ctrl_c_leaves_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hook, or a process that ends itself."""
    monkeypatch.setattr(
        'sys.argv', ['interruptions', '--subject', 'memory', '--lines', '8']
    )
    assert interruptions.main() == 0
    (subject,) = (s for s in interruptions.list_subjects() if 'memory' in s.name)

    def interrupt(interruption: interruptions.Interruption) -> None:
        subject.interrupt(interruption)
        if interruption.happened:
            chainer.get_function_hooks()['left'] = chainer.FunctionHook()
            subject.interrupt(interruption)

    careless = subject._replace(interrupt=interrupt)
    assert len(interruptions.sweep(careless, 0, math.inf, 3)) == 3
    assert 'a hook is left' in capsys.readouterr().out
    ends = subject._replace(interrupt=lambda interruption: os._exit(7))
    assert interruptions.find_fault(ends, ('', 0)) == 'the process ended with 7'


@pytest.mark.parametrize('name', schedules.SWITCHES)
def test_what_drawn_schedules_switch_off_is_there(name: str) -> None:
    """`python -m tests.fuzz.schedules` runs seldom."""
    with schedules.SWITCHES[name]():
        pass
