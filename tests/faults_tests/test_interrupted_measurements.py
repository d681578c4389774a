"""Ctrl-C at the lines of what counts memory without a session: nothing counts on."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
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


CONTEXTS = {
    'session': lambda: hybridmem.optimize(L.Linear(8, 8), '1MiB'),
    'inference': lambda: hybridmem.optimize_inference(L.Linear(8, 8), '1MiB'),
    'memory': hybridmem.profile_memory,
    'peak': PeakMeter,
}


@pytest.mark.parametrize('make', CONTEXTS.values(), ids=CONTEXTS)
def test_an_end_may_come_twice(make: Callable[[], Any]) -> None:
    """Ctrl-C as a with statement enters the end holds that back."""
    left = make().__enter__()
    for _ in range(2):
        left.__exit__(None, None, None)
        assert not numpy_memory.installed()
        assert not chainer.get_function_hooks()
    with make():
        assert numpy_memory.installed()
