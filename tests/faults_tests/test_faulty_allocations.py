"""Each allocation of an iteration is refused once, in every stage of a session."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
from support import faulty
from support.matrices import several
from support.native_faults import NativeFaults

from chainer_hybridmem.errors import OutOfMemoryError
from chainer_hybridmem.training.session.session import Session

AT_MOST = several(2, all_of_them=5)  # refusals per stage and kind
KINDS = {'final': {'final': True}, 'lasting': {'lasting': True}}
PLANS = {
    'swap and recompute': faulty.PLAN,
    'crossing': {**faulty.SWAP_ALL, 'cross_iteration': 'all'},
}


class Refusal:
    """Refuses one allocation of the iterations that it is injected into."""

    def __init__(self, number: int, **kind: bool) -> None:
        self.number, self.kind = number, kind
        self.allocations = 0
        self.happened = False

    @contextlib.contextmanager
    def __call__(self, session: Session) -> Iterator[None]:
        faults = NativeFaults(session.device.memory)  # type: ignore[arg-type]
        if self.number >= 0:
            faults.refuse(self.number, **self.kind)
        try:
            yield
        finally:
            self.allocations, self.happened = faults.allocations, faults.happened
            faults.remove()


@functools.cache
def numbers(stage: str, plan: str) -> range:
    """Allocations that are refused one after the other."""
    at, options = faulty.STAGES[stage]
    refusal = Refusal(-1)
    case = faulty.leave_session(at, refusal, **options, **PLANS[plan])
    assert case.error is None and refusal.allocations > 300
    return faulty.chosen(refusal.allocations, AT_MOST, offset=len(stage))


@pytest.mark.matrix
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', faulty.STAGES)
def test_a_refusal_that_passes_changes_nothing(stage: str, plan: str) -> None:
    at, options = faulty.STAGES[stage]
    for number in numbers(stage, plan):
        refusal = Refusal(number)
        case = faulty.leave_session(at, refusal, **options, **PLANS[plan])
        assert case.error is None and refusal.happened, number


@pytest.mark.matrix
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', faulty.STAGES)
def test_a_refusal_for_good_ends_the_session(stage: str, plan: str, kind: str) -> None:
    at, options = faulty.STAGES[stage]
    for number in numbers(stage, plan):
        case = faulty.leave_session(
            at, Refusal(number, **KINDS[kind]), **options, **PLANS[plan]
        )
        check_message(case)


@pytest.mark.matrix
@pytest.mark.parametrize('plan', reversed(PLANS))
@pytest.mark.parametrize('stage', faulty.STAGES)
def test_a_refusal_that_the_program_catches(stage: str, plan: str) -> None:
    at, options = faulty.STAGES[stage]
    for number in numbers(stage, plan):
        refusal = Refusal(number, final=True)
        case = faulty.stay_in_session(at, refusal, **options, **PLANS[plan])
        assert case.inside is None or isinstance(case.inside, MemoryError), number


def check_message(case: faulty.Case) -> None:
    """Where training could not go on, the error has the numbers."""
    error: Any = case.error
    if error is not None:
        assert isinstance(error, OutOfMemoryError), repr(error)
        assert 'are in use' in str(error)
        assert error.limit_bytes == faulty.LIMIT
