"""An exception of the program itself at every operation, hook and update."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from support import faulty, networks
from support.matrices import several

# isort: split
import chainer

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.training.session.session import Session

AT_MOST = several(1, all_of_them=2)  # exceptions per stage
PLANS = {'swap and recompute': faulty.PLAN, 'crossing': faulty.CROSSING}


class MyError(Exception):
    """The program's own."""


class RaisingHook(chainer.FunctionHook):
    """Raises before or after one function of an iteration runs, forward or backward.

    Args:
        number: Of the call; -1 for none.
    """

    name = 'raising'

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    @contextlib.contextmanager
    def __call__(self, session: Session) -> Iterator[None]:
        with self:
            yield

    def _count(self, *args: Any) -> None:
        self.calls += 1
        if self.calls - 1 == self.number:
            raise MyError

    forward_preprocess = forward_postprocess = _count
    backward_preprocess = backward_postprocess = _count


@functools.cache
def numbers(stage: str, plan: str) -> range:
    """Calls of the hook that raise, one after the other."""
    at, options = faulty.STAGES[stage]
    hook = RaisingHook(-1)
    case = faulty.leave_session(at, hook, **options, **PLANS[plan])
    assert case.error is None and hook.calls > 80
    return faulty.chosen(hook.calls, AT_MOST, offset=len(stage))


@pytest.mark.matrix
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', faulty.STAGES)
def test_an_exception_in_an_operation_ends_the_session(stage: str, plan: str) -> None:
    at, options = faulty.STAGES[stage]
    for number in numbers(stage, plan):
        case = faulty.leave_session(at, RaisingHook(number), **options, **PLANS[plan])
        assert type(case.error) is MyError


@pytest.mark.matrix
@pytest.mark.parametrize('plan', reversed(PLANS))
@pytest.mark.parametrize('stage', faulty.STAGES)
def test_an_exception_in_an_operation_is_caught(stage: str, plan: str) -> None:
    at, options = faulty.STAGES[stage]
    for number in numbers(stage, plan):
        hook = RaisingHook(number)
        case = faulty.stay_in_session(at, hook, **options, **PLANS[plan])
        assert type(case.inside) is MyError or hook.calls <= number


class RaisingUpdate:
    """An optimizer's hook that raises for one of the parameters."""

    name = 'raising'
    call_for_each_param = True
    timing = 'pre'

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def __call__(self, rule: Any, parameter: Any) -> None:
        self.calls += 1
        if self.calls - 1 == self.number:
            raise MyError

    def into(self, run: faulty.Run) -> faulty.Inject:
        @contextlib.contextmanager
        def inject(session: Session) -> Iterator[None]:
            run.optimizer.add_hook(self)
            try:
                yield
            finally:
                run.optimizer.remove_hook(self.name)

        return inject


@pytest.mark.matrix
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', faulty.STAGES)
def test_an_exception_in_an_update(stage: str, plan: str) -> None:
    at, options = faulty.STAGES[stage]
    for number in faulty.chosen(12, 1, offset=at):
        for run_case in (faulty.leave_session, faulty.stay_in_session):
            hook, run = RaisingUpdate(number), faulty.Run()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(faulty, 'Run', lambda run=run: run)
                case = run_case(at, hook.into(run), **options, **PLANS[plan])
            assert hook.calls >= number and type(case.error or case.inside) is MyError


def test_an_exception_between_iterations() -> None:
    @contextlib.contextmanager
    def inject(session: Session) -> Iterator[None]:
        yield
        raise MyError

    for stage in faulty.STAGES:
        at, options = faulty.STAGES[stage]
        case = faulty.leave_session(at, inject, **options, **faulty.CROSSING)
        assert type(case.error) is MyError


def test_what_is_caught_costs_no_second_profile() -> None:
    """The kind of the iteration is known as well as before."""
    case = faulty.stay_in_session(5, RaisingHook(30), more=4, **faulty.SWAP_ALL)
    history = networks.entries_of(case.session)
    assert type(case.inside) is MyError
    assert [entry['guided'] for entry in history] == [0, 0, 0] + [1] * 7
    assert case.session.deviations == 0


def test_iterations_that_come_to_their_end_count_once() -> None:
    """Neither one that a backward function breaks off, nor one that has no plan."""
    run, caught = faulty.Run(), []
    with faulty.chainer_hybridmem.optimize(run.model, faulty.LIMIT, 'in-core') as one:
        done = 0
        for i in range(8):
            try:
                run.iterate(i)
                done += 1
            except InfeasibleError as error:
                caught.append(str(error))
    assert caught and one.iterations == done
    with faulty.chainer_hybridmem.optimize(run.model, 2 * faulty.LIMIT) as one:
        for i in range(3):
            run.iterate(i)
        hook = RaisingHook(2)
        hook.forward_preprocess = hook.forward_postprocess = lambda *args: None
        with hook(one), pytest.raises(MyError):
            run.iterate(3)
    assert one.iterations == 3


def test_an_error_that_is_kept_keeps_its_graph_and_nothing_else() -> None:
    """Its frames hold the graph of the iteration: that one is left as changed."""
    kept: list[BaseException] = []

    class Keeping(RaisingHook):
        @contextlib.contextmanager
        def __call__(self, session: Session) -> Iterator[None]:
            with self:
                try:
                    yield
                except MyError as error:
                    kept.append(error)
                    raise

    run, snapshots = faulty.Run(), faulty.in_core()
    with faulty.chainer_hybridmem.optimize(run.model, 2 * faulty.LIMIT) as session:
        for i in range(4):
            run.iterate(i)
        with Keeping(14)(session), pytest.raises(MyError):
            run.iterate(4)
        run.restore(snapshots[4])
        for i in range(4, 9):
            run.iterate(i)
    run.snapshot().assert_same(snapshots[9])
    kept.clear()
    gc.collect()
    faulty.assert_nothing_left(faulty.Case(None, None, run, session))


ENDS = {
    'the iteration beyond the limit': 'session.finish_iteration',
    'what is told of the limit': 'session._explain',
    'the last iteration': 'session._loop.count_last',
    'replays for living graphs': 'session._runtime.executor.close',
    'an iteration that nobody has seen': 'session._arrays.count_updates',
    'what the plan has moved': 'session._runtime.executor.abandon',
}


@pytest.mark.parametrize('place', ENDS.values(), ids=ENDS)
def test_what_is_raised_as_a_session_ends_leaves_nothing(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the end follows, whatever is raised."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MyError

    run = faulty.Run()
    with (
        pytest.raises(MyError),
        faulty.chainer_hybridmem.optimize(run.model, faulty.LIMIT) as session,
    ):
        if 'count_updates' not in place:
            for i in range(4):
                run.iterate(i)
        monkeypatch.setattr(type(session._overrun), 'is_under_way', True)
        *owners, name = place.split('.')[1:]
        owner = functools.reduce(getattr, owners, session)
        monkeypatch.setattr(owner, name, fail)
    faulty.assert_nothing_left(faulty.Case(None, None, run, session))
