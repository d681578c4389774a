"""Shared by all tests; ``toys`` and ``networks`` in this folder are importable."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from support import matrices, networks
from support.empty_pools import empty_pools
from support.quick_search import quick_search

from chainer_hybridmem import compiling
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.devices.link import LEAST_ROOM_BYTES
from chainer_hybridmem.training.session.planning import plan_maker
from chainer_hybridmem.training.session.setting import link_measurement

WORKSPACE_BYTES = 1 << 19
# Rooms whose tests judge what has been searched for.
SEARCHING = {
    *('benchmarks_tests', 'contest_tests', 'documents_tests', 'planners_tests'),
    *('pools_tests', 'simulation_tests'),
}
compiling.LEAST_SECONDS = math.inf  # what a test prints is not left to the cache
# Nor what a plan is like to how busy the machine is.
plan_maker.LEAST_SECONDS = plan_maker.LEAST_SECONDS_NEEDED = math.inf


def pytest_ignore_collect(
    collection_path: pathlib.Path, config: pytest.Config
) -> bool | None:
    """Where only tests for a GPU run, files that name none are not imported."""
    if config.getoption('markexpr') != 'gpu' or collection_path.suffix != '.py':
        return None
    text = collection_path.read_text(encoding='utf-8')
    return None if 'gpu' in text or 'cudnn' in text else True


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out most of each matrix; skips tests marked ``gpu`` without a GPU."""
    left = set(matrices.select(items))
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    if 'PYTEST_XDIST_WORKER' in os.environ and 'EMU_LIBRARY' not in os.environ:
        skip = pytest.mark.skip(reason='needs a GPU for itself: run it without -n')
        for item in items:
            if item.get_closest_marker('alone'):
                item.add_marker(skip)
    marked = [item for item in items if item.get_closest_marker('gpu')]
    if not marked or compat.cuda_available():
        return
    skip = pytest.mark.skip(reason='needs CuPy and a CUDA GPU')
    for item in marked:
        item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Makes later garbage collections skip what collecting the tests has made.

    Many tests collect garbage to see what is left of a session; thousands of collected
    tests would make each of these a fifth of a second slow.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope='module')
def unburdened() -> None:
    """Makes garbage collections skip what the modules before have left, likewise.

    On a GPU what has been left counts, and must not be kept from its collection.
    """
    gc.collect()
    if not compat.cuda_available():
        gc.freeze()


@pytest.fixture(autouse=True)
def unburdened_gpu(request: pytest.FixtureRequest) -> None:
    """What other tests have left on a GPU counts: nothing is left, whatever came."""
    if request.node.get_closest_marker('gpu'):
        empty_pools()


@pytest.fixture(autouse=True, scope='session')
def small_workspaces() -> None:
    """Limits of tests are a few megabytes; cuDNN may take eight unless it is told."""
    from chainer.backends import cuda

    if cuda.cudnn_enabled:
        cuda.set_max_workspace_size(WORKSPACE_BYTES)


@pytest.fixture(autouse=True, scope='session')
def deterministic_algorithms() -> None:
    """Where cuDNN's others give other bits at each call, they must not be taken."""
    import chainer

    if os.environ.get('EMU_ATOMICS'):
        chainer.global_config.cudnn_deterministic = True


@pytest.fixture(autouse=True)
def nothing_counts_on() -> Iterator[None]:
    """A test that leaves memory counted fails by itself, and none after it."""
    before = numpy_memory.installed()
    yield
    if numpy_memory.installed() and not before:
        numpy_memory.set_handler(ctypes.py_object())  # NULL: NumPy's own
        pytest.fail('this test leaves a host device installed', pytrace=False)


@pytest.fixture(scope='module')
def data(request: pytest.FixtureRequest) -> list[tuple[Any, Any]]:
    """As many batches as the module's ``ITERATIONS`` say."""
    return networks.batches(request.module.ITERATIONS)


@pytest.fixture(scope='module')
def in_core(data: list[tuple[Any, Any]]) -> dict[str, Any]:
    """What plain Chainer makes of them."""
    return networks.train(networks.Everything, data)[0]


@pytest.fixture(scope='module')
def peak(data: list[tuple[Any, Any]]) -> int:
    """Bytes that they need in-core."""
    _, session = networks.train(
        networks.Everything, data[:5], memory_limit='1GB', planner='in-core'
    )
    return int(session.statistics()['in_core_peak_bytes'])


@pytest.fixture
def machine() -> None:
    """What each test runs on; None for the computer itself."""


@pytest.fixture(autouse=True, scope='module')
def brief_searches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where it is not plans that a room tries, they are searched for briefly."""
    room = pathlib.Path(request.node.nodeid).parts[1]
    with contextlib.nullcontext() if room in SEARCHING else quick_search():
        yield


@pytest.fixture(autouse=True)
def known_link(machine: object) -> Iterator[None]:
    """Sessions know the link to the store: to measure it takes longer than most tests.

    They measure one that is throttled, that has no room, or that is a real GPU's. A
    module whose tests need a measured link has a fixture of this name of its own.
    """
    known = Link(
        latency_seconds=1e-5, d2h_bytes_per_second=1e9, h2d_bytes_per_second=1e9
    )
    measure = link_measurement.measure_link

    def know(device: Any, tier: Tier = Tier.RAM, **options: Any) -> Link | None:
        throttled = device.describe().get('link_bandwidth')
        no_room = device.copies.host_room(tier) < LEAST_ROOM_BYTES
        real_gpu = device.clock.asynchronous and 'EMU_LIBRARY' not in os.environ
        if throttled or no_room or real_gpu:
            return measure(device, tier=tier, **options)
        return known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_measurement, 'measure_link', know)
        yield
