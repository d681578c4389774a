"""Copies that fail, are late or never answer; swap files that are full or broken."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import faulty
import pytest

from chainer_hybridmem.devices import copies, store
from chainer_hybridmem.devices.host import HostDevice
from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.planners.improvement import Improvement
from chainer_hybridmem.session import Session

AT_MOST = 3  # failures per stage and kind, unless every one is wanted
STAGES = ['warm-up', 'profiling with replays', 'profiling', 'guided with an arena']
PLANS = {
    'swap': faulty.SWAP_ALL,
    'crossing': {**faulty.SWAP_ALL, 'cross_iteration': 'all'},
}


class FailingCopies:
    """Copies in one direction fail from one of them on.

    Args:
        outward: Whether copies to the store fail, or those from it.
        number: Of the first one that fails.
        count: How many fail.
        error: What they raise.
        late: Whether they have copied half of it before.
    """

    def __init__(
        self,
        outward: bool,
        number: int,
        count: int = 1,
        error: BaseException | None = None,
        late: bool = False,
    ) -> None:
        self.outward, self.number, self.count = outward, number, count
        self.error = error or OSError(5, 'the disk is broken')
        self.late = late
        self.copies = 0

    @contextlib.contextmanager
    def __call__(self, session: Session) -> Iterator[None]:
        execute = copies.CopyThread._execute

        def failing(thread: Any, job: Any) -> None:
            if job.outward is self.outward:
                self.copies += 1
                if 0 <= self.copies - 1 - self.number < self.count:
                    if self.late:
                        execute(thread, job)
                    raise type(self.error)(*self.error.args)  # without a traceback
            execute(thread, job)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copies.CopyThread, '_execute', failing)
            yield


def numbers(stage: str, plan: str, outward: bool) -> range:
    at, options = faulty.STAGES[stage]
    counting = FailingCopies(outward, 0, count=0)
    case = faulty.leave_session(at, counting, **options, **PLANS[plan])
    assert case.error is None
    return faulty.chosen(counting.copies, AT_MOST, offset=len(stage))


@pytest.mark.parametrize('late', [False, True])
@pytest.mark.parametrize('outward', [True, False])
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', STAGES)
def test_a_failed_copy_ends_the_session(
    stage: str, plan: str, outward: bool, late: bool
) -> None:
    at, options = faulty.STAGES[stage]
    for number in numbers(stage, plan, outward):
        failing = FailingCopies(outward, number, late=late)
        case = faulty.leave_session(at, failing, **options, **PLANS[plan])
        assert failing.copies > number
        check_message(case.error)


def check_message(error: BaseException | None) -> None:
    if error is not None:
        assert isinstance(error, SwapStoreError), repr(error)
        assert 'the disk is broken' in str(error) and 'swap' in str(error)


@pytest.mark.parametrize('outward', [True, False])
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', STAGES)
def test_a_failed_copy_that_the_program_catches(
    stage: str, plan: str, outward: bool
) -> None:
    at, options = faulty.STAGES[stage]
    for number in numbers(stage, plan, outward):
        failing = FailingCopies(outward, number)
        case = faulty.stay_in_session(at, failing, **options, **PLANS[plan])
        check_message(case.inside)


@pytest.mark.parametrize('error', [SystemExit(3), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize('outward', [True, False])
def test_a_copy_thread_survives_what_a_copy_raises(
    outward: bool, error: BaseException
) -> None:
    failing = FailingCopies(outward, 3, error=error)
    case = faulty.leave_session(4, failing, **faulty.SWAP_ALL)
    assert isinstance(case.error, SwapStoreError)
    case = faulty.stay_in_session(4, FailingCopies(outward, 3, error=error), **faulty.SWAP_ALL)
    assert isinstance(case.inside, SwapStoreError)
