"""Ctrl-C at the lines of what counts memory without a session: nothing counts on."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.links as L
import numpy as np
import pytest
from faults_tests.test_interruptions import Interruption, places_of
from support import faulty
from support.matrices import several

from chainer_hybridmem import interrupts
from chainer_hybridmem.commands import doctor
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.recording.peak_meter import PeakMeter

AT_MOST = several(20, all_of_them=100)  # lines of each
X = np.ones((4, 8), np.float32)


def run(model: chainer.Link, passes: int = 1) -> None:
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        for _ in range(passes):
            model(X)


def record_a_pass() -> None:
    hybridmem.record_inference(L.Linear(8, 8), X)


def optimize_passes() -> None:
    model = L.Linear(8, 8)
    with hybridmem.optimize_inference(model, '1MiB'):
        run(model, 4)


def watch_a_pool() -> None:
    with hybridmem.profile_memory():
        run(L.Linear(8, 8))


def measure_a_peak() -> None:
    with PeakMeter():
        run(L.Linear(8, 8))


MEASUREMENTS = (
    record_a_pass,
    optimize_passes,
    watch_a_pool,
    measure_a_peak,
    doctor.count_memory,
)


def interrupt_measurement(
    measure: Callable[[], object], injection: Interruption
) -> None:
    """Ctrl-C in a measurement leaves nothing, and the next one is made."""
    with injection(), contextlib.suppress(KeyboardInterrupt):
        measure()
    assert not numpy_memory.installed(), injection.place
    assert not chainer.get_function_hooks(), f'a hook is left: {injection.place}'
    assert gc.isenabled(), injection.place
    measure()


@pytest.mark.usefixtures('ctrl_c')
@pytest.mark.parametrize('measure', MEASUREMENTS)
def test_nothing_counts_on(measure: Callable[[], object]) -> None:
    interrupt = functools.partial(interrupt_measurement, measure)
    measure()  # makes what others use again
    places = list(places_of(interrupt))
    for index in faulty.chosen(len(places), AT_MOST, offset=5):
        injection = Interruption(places[index])
        interrupt(injection)
        assert injection.happened, injection.place


def train() -> None:
    run = faulty.Run()
    with hybridmem.optimize(run.model, '1MiB'):
        run.iterate(0)


@contextlib.contextmanager
def interrupted_at_entry(time: int) -> Iterator[list[str]]:
    """Ctrl-C as an ``__exit__`` of the package is entered, before its first line.

    Args:
        time: How many are entered before it.

    Yields:
        The ends entered so far.
    """
    ends: list[str] = []
    entered = interrupts.ends_whole(lambda self: None).__code__

    def enter(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code is entered:
            ends.append(os.path.basename(frame.f_back.f_code.co_filename))
            if len(ends) == time + 1:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)

    sys.settrace(enter)
    try:
        yield ends
    finally:
        sys.settrace(None)


@pytest.mark.usefixtures('ctrl_c')
@pytest.mark.parametrize('measure', [*MEASUREMENTS, train])
def test_what_is_left_without_its_end_is_ended_by_the_next(
    measure: Callable[[], object],
) -> None:
    with interrupted_at_entry(99) as ends:
        measure()
    assert ends
    for time in range(len(ends)):
        with interrupted_at_entry(time), pytest.raises(KeyboardInterrupt):
            measure()
        interrupts.end_abandoned()
        assert not numpy_memory.installed()
        assert not chainer.get_function_hooks()
        with interrupted_at_entry(time), pytest.raises(KeyboardInterrupt):
            measure()
        measure()
        assert not numpy_memory.installed()
        assert not chainer.get_function_hooks()


@pytest.mark.usefixtures('ctrl_c')
def test_what_a_program_begins_in_another_way_is_not_ended() -> None:
    @contextlib.contextmanager
    def generator() -> Iterator[Any]:
        with hybridmem.profile_memory() as profiler:
            yield profiler

    def in_a_stack(stack: contextlib.ExitStack) -> Any:
        return stack.enter_context(hybridmem.profile_memory())

    def by_hand(stack: contextlib.ExitStack) -> Any:
        profiler = hybridmem.profile_memory().__enter__()
        stack.push(profiler)
        return profiler

    for begin in (in_a_stack, by_hand, lambda stack: stack.enter_context(generator())):
        with contextlib.ExitStack() as stack:
            begin(stack)
            interrupts.end_abandoned()
            assert numpy_memory.installed()
        assert not numpy_memory.installed()
