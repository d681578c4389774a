"""Ctrl-C at any line of the package, in every stage of a session."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import faulty
import pytest

import chainer_hybridmem
from chainer_hybridmem.session import Session

AT_MOST = 12  # interruptions per stage, unless every one is wanted
FOLDER = os.path.dirname(chainer_hybridmem.__file__)
PLANS = {
    'swap and recompute': faulty.PLAN,
    'crossing': {**faulty.SWAP_ALL, 'cross_iteration': 'all'},
}
pytestmark = [
    pytest.mark.usefixtures('ctrl_c'),
    pytest.mark.skipif(sys.gettrace() is not None, reason='lines are traced already'),
]


class Interruption:
    """Raises SIGINT before one of the lines of the package that run.

    Args:
        number: Of the line among those to come; -1 for none.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.lines = 0
        self.where = ''

    @contextlib.contextmanager
    def __call__(self, session: Session | None = None) -> Iterator[None]:
        former = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(former)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == 'line':
            self.lines += 1
            if self.lines - 1 == self.number:
                sys.settrace(None)
                name = os.path.relpath(frame.f_code.co_filename, FOLDER)
                self.where = f'{name}:{frame.f_lineno} in {frame.f_code.co_name}'
                signal.raise_signal(signal.SIGINT)
        return self._line


def numbers(count: Callable[[Interruption], Any]) -> range:
    counting = Interruption(-1)
    count(counting)
    assert counting.lines > 50
    return faulty.chosen(counting.lines, AT_MOST, offset=counting.lines // 7)


@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', faulty.STAGES)
def test_ctrl_c_in_an_iteration(stage: str, plan: str) -> None:
    at, options = faulty.STAGES[stage]

    def interrupted(injection: Interruption) -> faulty.Case:
        return faulty.leave_session(at, injection, **options, **PLANS[plan])

    for number in numbers(interrupted):
        injection = Interruption(number)
        case = interrupted(injection)
        assert not injection.where or type(case.error) is KeyboardInterrupt, (
            f'{injection.where}: {case.error!r}'
        )


@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', faulty.STAGES)
def test_ctrl_c_that_the_program_catches(stage: str, plan: str) -> None:
    at, options = faulty.STAGES[stage]

    def interrupted(injection: Interruption) -> faulty.Case:
        return faulty.stay_in_session(at, injection, **options, **PLANS[plan])

    for number in numbers(interrupted):
        injection = Interruption(number)
        case = interrupted(injection)
        assert not injection.where or case.inside is not None, injection.where
