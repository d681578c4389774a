"""What a handler of a signal raises comes out, also while native code runs."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.interrupts import run_aside
from chainer_hybridmem.jit import make_ready
from chainer_hybridmem.planning import planners
from chainer_hybridmem.planning.layouts import offline, planned_trace
from chainer_hybridmem.planning.search import local_search
from chainer_hybridmem.planning.search.annealing import Annealer, Budget
from chainer_hybridmem.planning.search.candidates import SWAP, Search
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.planning.simulation.staggered import staggered_seconds

MOMENTS = 25  # drawn, of each kind of work
LONG = 60.0  # seconds: nothing here takes so long unless it cannot be interrupted


class Impatience(Exception):
    """What a program's own handler raises."""


def raise_impatience(number: int, frame: FrameType | None) -> None:
    raise Impatience


def plan_with(name: str) -> Callable[[], Any]:
    profile = toys.chain()
    problem = make_problem(profile)
    limit_bytes = int(0.6 * problem.in_core_peak_bytes)

    def plan() -> Any:
        with contextlib.suppress(InfeasibleError):  # of some planners
            return planners.make_plan(profile, limit_bytes, name)

    return plan


def lay_out() -> Callable[[], Any]:
    profile = toys.chain()
    trace = planned_trace(profile, plan_with('swap-all')())
    return lambda: offline.exact(trace)


def stagger() -> Callable[[], Any]:
    problem, plan = make_problem(toys.chain()), plan_with('swap-all')()
    return lambda: staggered_seconds(problem, plan, (0.0, 0.5))


WORK: dict[str, Callable[[], Callable[[], Any]]] = {
    **{
        name: lambda name=name: plan_with(name)  # type: ignore[misc]
        for name in planners.names()
        if name != 'in-core' and not planners.needs_options(name)
    },
    'layout': lay_out,
    'staggered': stagger,
}


@pytest.mark.parametrize('kind', WORK)
def test_no_instruction_of_python_runs_inside_compiled_code(kind: str) -> None:
    """Numba unpickles the type of whatever it makes for Python: there, handlers run."""
    work = WORK[kind]()
    work()  # compiles
    inside = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == 'call' and frame.f_code.co_name == '_numba_unpickle':
            assert frame.f_back is not None
            code = frame.f_back.f_code
            inside.append(f'{code.co_filename}:{frame.f_back.f_lineno}')

    former = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(former)
    assert not inside


@contextlib.contextmanager
def alarm(handler: Any, seconds: float, error: list[Any]) -> Iterator[None]:
    """A handler that runs once, after so long; notes where it interrupted."""

    def note(number: int, frame: FrameType | None) -> None:
        error.append(frame)
        handler(number, frame)

    former = signal.signal(signal.SIGALRM, note)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize(
    'handler, error',
    [(signal.default_int_handler, KeyboardInterrupt), (raise_impatience, Impatience)],
    ids=['Ctrl-C', 'own'],
)
@pytest.mark.parametrize('kind', ['hybrid', 'exact', 'pooch', 'layout', 'staggered'])
def test_at_drawn_moments(
    kind: str, handler: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception itself, or nothing where Python has nobody to raise it to."""
    work = WORK[kind]()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    dropped: list[Any] = []
    monkeypatch.setattr(sys, 'unraisablehook', dropped.append)
    rng = random.Random(f'{kind} {error}')
    for _ in range(MOMENTS):
        moment = rng.uniform(1e-5, 1.1 * seconds)
        seen: list[Any] = []
        raised = None
        try:
            with alarm(handler, moment, seen):
                work()
        except BaseException as caught:
            raised = caught
        possible = {error} if seen else {type(None)}
        assert type(raised) in possible | ({type(None)} if dropped else set()), moment
        dropped.clear()


@contextlib.contextmanager
def ctrl_c_after(ready: Callable[[], bool]) -> Iterator[None]:
    """SIGINT to this process from another thread once something is the case."""
    over = threading.Event()

    def send() -> None:
        while not (ready() or over.wait(0.01)):
            pass
        if not over.is_set():
            signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.usefixtures('ctrl_c')
def test_a_long_search_is_interrupted() -> None:
    """While its compiled code runs, which lets other threads run."""
    search = Search(make_problem(toys.chain()), 1 << 40, barrier=False)
    annealer = Annealer(search, Budget(search, 0, None))
    make_ready(local_search.anneal)
    start = search.evaluate(search.fill(SWAP))
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        with ctrl_c_after(lambda: time.perf_counter() > began + 0.5):
            annealer.run_round(start, 10**10, 1.0, 0.0, 0)  # hours
    assert time.perf_counter() < began + LONG


@pytest.mark.usefixtures('ctrl_c')
def test_a_long_call_of_another_library_is_interrupted() -> None:
    goes_on, over = threading.Event(), threading.Event()

    def native() -> bool:
        goes_on.set()
        return over.wait(LONG)

    began = time.perf_counter()
    try:
        with pytest.raises(KeyboardInterrupt), ctrl_c_after(goes_on.is_set):
            run_aside(native)
    finally:
        over.set()
    assert time.perf_counter() < began + LONG


def test_what_runs_aside_returns_and_raises() -> None:
    assert run_aside(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_aside(lambda: 1 // 0)
    names = []
    thread = threading.Thread(
        target=lambda: run_aside(lambda: names.append(threading.current_thread().name)),
        name='own',
    )
    thread.start()
    thread.join()
    assert names == ['own']  # there, no handler runs anyway


@pytest.mark.parametrize('part_seconds', [1e-9, 1e-4, 10.0])
def test_a_round_in_parts_is_the_same_round(
    part_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(toys.random_network(5, 40))
    limit_bytes = int(0.7 * problem.in_core_peak_bytes)
    results = []
    for seconds in (3600.0, part_seconds):
        monkeypatch.setattr(
            'chainer_hybridmem.planning.search.annealing.PART_SECONDS', seconds
        )
        search = Search(problem, limit_bytes, barrier=False)
        annealer = Annealer(search, Budget(search, 0, None))
        start = search.evaluate(search.fill(SWAP))
        warm = 0.1 * problem.in_core_seconds
        found = annealer.run_round(start, 3000, warm, 0.0, 3)
        results.append((found.seconds, found.action, search.simulations))
    (first, action, count), (second, other, counted) = results
    assert first == second and count == counted
    assert np.array_equal(action, other)
