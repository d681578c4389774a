"""The iteration is found in a raw log, whatever surrounds it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.lab.pools.iteration import find_iteration, iteration_trace
from chainer_hybridmem.lab.pools.replay import replay
from chainer_hybridmem.planning.layouts import check_layout, exact


def training(iterations, warm_up=7, after=0, layers=9):
    """A log: feature maps, workspaces, and gradients freed in the next iteration."""
    rng = random.Random(0)
    sizes = [rng.randint(1, 50) * 100 for _ in range(layers)]
    log, serial, gradients = [], 0, []

    def malloc(nbytes):
        nonlocal serial
        serial += 1
        log.append((serial, nbytes))
        return serial

    for _ in range(warm_up):
        malloc(rng.randint(1, 10**6))
    for _ in range(iterations):
        maps = []
        for nbytes in sizes:
            maps.append(malloc(nbytes))
            log.append((malloc(64), -1))
            log.append((malloc(64), -1))
        for old in gradients:
            log.append((old, -1))
        gradients = []
        for nbytes, old in zip(reversed(sizes), reversed(maps), strict=True):
            gradients.append(malloc(nbytes // 2))
            log.append((old, -1))
    for _ in range(after):
        malloc(rng.randint(1, 10**6))
    return log


PERIOD = 9 * 5 + 9 + 9 * 2


@pytest.mark.parametrize('warm_up', [0, 1, 40])
@pytest.mark.parametrize('after', [0, 3, 50])
def test_the_period_is_found(warm_up, after):
    found = find_iteration(training(6, warm_up, after))
    assert found is not None
    assert found.period == PERIOD
    assert found.stop - found.start >= 4 * PERIOD


def test_a_log_that_is_cut_anywhere():
    log = training(6)
    for cut in range(len(log) - PERIOD, len(log)):
        assert find_iteration(log[:cut]).period == PERIOD


def test_one_iteration_is_none():
    log = training(1)
    with pytest.raises(FormatError, match='No iteration'):
        iteration_trace(log)
    assert find_iteration([]) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(2, 5))
def test_any_repetition(sizes, count):
    log = [((r, i), nbytes) for r in range(count) for i, nbytes in enumerate(sizes)]
    found = find_iteration(log)
    assert found is not None
    assert len(sizes) % found.period == 0
    assert (found.start, found.stop) == (0, len(log))


def test_the_trace_of_the_iteration():
    trace = iteration_trace(training(6))
    assert len(trace.events) == PERIOD
    assert len(trace.carried) == 9
    check_layout(trace, exact(trace))
    assert replay(trace, 'cupy', 3).warm_device_calls == 0
    peaks = [iteration_trace(training(n)).peak_load_bytes for n in (4, 6, 9)]
    assert peaks[0] == peaks[1] == peaks[2]
