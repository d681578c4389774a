"""The emulator refuses what CUDA refuses; see docs/cuda_emulator.md."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        'EMU_LIBRARY' not in os.environ,
        reason='needs the emulator: make test-cuda',
    ),
]


@pytest.fixture
def control():
    from cuda_emulator import control

    yield control
    control.schedule('random', 0)


def run(program, **environment):
    """What a process of its own prints, and how it ends."""
    tests = os.path.dirname(os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(program)],
        env={
            **os.environ,
            'PYTHONPATH': os.pathsep.join(
                [os.environ['PYTHONPATH'], tests, os.path.dirname(tests)]
            ),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_work_runs_late(control):
    import cupy

    control.schedule('lazy')
    array = cupy.zeros(10, 'f')
    array += 1
    event = cupy.cuda.Event()
    event.record()
    assert not event.done
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match='NotReady'):
        cupy.cuda.get_elapsed_time(event, event)
    event.synchronize()
    assert event.done and float(array.sum()) == 10


@pytest.mark.parametrize('kind', ['malloc', 'copy', 'launch'])
def test_calls_that_fail(control, kind):
    import cupy

    pool = cupy.get_default_memory_pool()
    array = cupy.ones(1000, 'f')
    array + 1  # compiled
    pool.free_all_blocks()
    control.fail(kind, 1)
    errors = cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError
    with pytest.raises((*errors, MemoryError)):
        if kind == 'malloc':
            cupy.cuda.Memory(123456)
        elif kind == 'copy':
            array.get()
        else:
            array + 1
    assert float((array + 1).sum()) == 2000  # once only


def test_sorting(control):
    import cupy
    import numpy as np

    x = np.random.RandomState(0).rand(3, 50).astype('f')
    assert (cupy.sort(cupy.array(x)).get() == np.sort(x)).all()
    assert (cupy.argsort(cupy.array(x)).get() == np.argsort(x)).all()
    keys = cupy.array([[1, 1, 0], [2, 1, 3]])
    assert cupy.lexsort(keys).tolist() == [1, 0, 2]
    assert cupy.unique(cupy.array([2, 1, 2])).tolist() == [1, 2]
    assert sorted(cupy.random.permutation(9).tolist()) == list(range(9))


def test_freed_memory_ends_the_process():
    code, _, errors = run(
        """
        import cupy
        memory = cupy.cuda.Memory(4096)
        array = cupy.ndarray(10, 'f', cupy.cuda.MemoryPointer(memory, 0))
        cupy.cuda.runtime.free(memory.ptr)
        array.fill(1)
        cupy.cuda.Device().synchronize()
        """
    )
    assert code < 0 and 'that is not allocated' in errors


def test_several_devices():
    code, out, errors = run(
        """
        import cupy
        from cuda_emulator import control
        with cupy.cuda.Device(1):
            array = cupy.arange(5)
            there = control.device_bytes()
        here = control.device_bytes()
        copied = array.copy() if cupy.cuda.Device().id == 1 else cupy.asarray(array)
        print(array.device.id, there > 0, here, copied.tolist())
        """,
        EMU_DEVICES='2',
    )
    assert code == 0, errors
    assert out.split()[:3] == ['1', 'True', '0']


RACE = """
    import cupy
    from cuda_emulator import control
    from chainer_hybridmem.training.devices.cuda.copies import CudaCopyEngine
    from chainer_hybridmem.training.devices.cuda.device import CudaDevice

    def count_races():
        before = control.counters()['race']
        device = CudaDevice(2**24)
        device.memory.install(lambda missing: None)
        array = cupy.zeros(100000, 'f')
        copy, transfer = device.copies.swap_out(device.arrays.root(array), None)
        other = cupy.zeros(100000, 'f')
        device.copies.wait(transfer)
        array += 1
        del transfer, array
        root = device.memory.allocate(400000)
        transfer = device.copies.swap_in(copy, root)
        device.copies.wait(transfer)
        array = cupy.ndarray(100000, 'f', cupy.cuda.MemoryPointer(root, 0))
        array += 1
        device.clock.synchronize()
        device.memory.uninstall()
        return control.counters()['race'] - before

    control.watch_places()
    {sabotage}
    for mode in ('eager', 'lazy', 'random'):
        control.schedule(mode)
        print(count_races() > 0)
"""
SABOTAGES = {
    'none': 'pass',
    'nobody waits for copies': 'CudaCopyEngine.wait = lambda self, transfer: '
    'transfer.mark_waited()',
    'copies wait for nobody': 'cupy.cuda.Stream.wait_event = lambda *_: None',
    'blocks are given back too early': """
    start = CudaCopyEngine.start
    def hasty(engine, root, space, outward):
        result = start(engine, root, space, outward)
        if outward:
            root._owner.block = None
        return result
    CudaCopyEngine.start = hasty""",
}


@pytest.mark.parametrize('sabotage', SABOTAGES)
def test_races_are_seen_in_any_order(sabotage):
    """Also where the numbers happen to be right."""
    code, out, errors = run(
        RACE.format(sabotage=SABOTAGES[sabotage]), EMU_RACES='1',
        CUPY_CACHE_DIR=os.environ['CUPY_CACHE_DIR'] + '-races',
    )  # fmt: skip
    assert code == 0, errors
    assert out.split() == [str(sabotage != 'none')] * 3, errors


COLLECTED = """
    import gc
    import cupy
    from cuda_emulator import control
    from chainer_hybridmem.training.devices.cuda.device import CudaDevice

    control.schedule('lazy')
    device = CudaDevice(2**24)
    device.memory.install(lambda missing: None)
    array = cupy.full(100000, 5, 'f')
    copy, transfer = device.copies.swap_out(device.arrays.root(array), None)
    device.copies.wait(transfer)
    del array, transfer
    root = device.memory.allocate(400000)
    address = root.ptr
    cycle = [device.copies.swap_in(copy, root), copy]
    cycle.append(cycle)
    del root, copy, cycle
    gc.collect()
    again = cupy.full(100000, 7, 'f')
    assert again.data.ptr == address
    cupy.cuda.Device().synchronize()
    print(again.get().min())
"""


def test_a_copy_that_the_collector_takes_with_its_events():
    """CuPy's events have finalizers, which come first here."""
    code, out, errors = run(COLLECTED)
    assert (code, errors) == (0, '')
    assert out.strip() == '7.0'


TWO_STREAMS = """
    import cupy
    from cuda_emulator import control
    from chainer_hybridmem.training.devices.cuda.device import CudaDevice
    from chainer_hybridmem.planning.layouts import IterationLog, lay_out

    control.watch_places()
    beside = cupy.cuda.Stream(non_blocking=True)
"""
ON_TWO_STREAMS = """
    device = CudaDevice(2**24)
    device.memory.install(lambda missing: None)
    if {arena}:
        log = IterationLog(((1, 400000), (-1, 400000)), (0,), 0)
        offsets = device.offsets
        arena = lay_out((log, log), offsets.block_bytes, offsets.alignment_bytes)
        assert offsets.follow(arena)
        offsets.seek(0)
    array = cupy.zeros(100000, 'f')
    array += 1
    {between}
    if {arena}:
        device.offsets.seek(0)
    with beside:
        other = cupy.zeros(100000, 'f')
        other += 1
    cupy.cuda.Device().synchronize()
    print(control.counters()['race'])
    array = other = copy = None
    device.memory.uninstall()
"""
HANDED_ON = (
    'del array',
    # Freed while it is copied, on the other stream.
    """
    copy, transfer = device.copies.swap_out(device.arrays.root(array), None)
    del array
    with beside:
        del transfer
    array = cupy.zeros(100000, 'f')""",
    # Waited for on the other stream.
    """
    copy, transfer = device.copies.swap_out(device.arrays.root(array), None)
    with beside:
        device.copies.wait(transfer)
    del array, transfer
    array = cupy.zeros(100000, 'f')""",
)


@pytest.mark.parametrize('arena', [False, True])
def test_memory_is_used_again_on_the_stream_it_was_made_on(arena):
    parts = [ON_TWO_STREAMS.format(between=way, arena=arena) for way in HANDED_ON]
    code, out, errors = run(
        TWO_STREAMS + ''.join(parts),
        EMU_RACES='1', EMU_MODE='lazy',
        CUPY_CACHE_DIR=os.environ['CUPY_CACHE_DIR'] + '-races',
    )  # fmt: skip
    assert code == 0, errors
    assert out.split() == ['0'] * 3, errors


def test_an_array_is_not_alone_while_another_root_has_its_memory():
    """Memory that is found again has a root of its own."""
    import cupy

    from chainer_hybridmem.training.devices.cuda.device import CudaDevice

    def is_alone(array):
        holders = {id(array): {'the test'}}
        arrays = {id(array): array}
        del array
        return device.arrays.held_by_none_but(arrays, holders)

    device = CudaDevice(2**24)
    device.memory.install(lambda nbytes: None)
    try:
        array = cupy.empty(1000, 'f')
        view, find = device.arrays.capture(array), device.arrays.track(array)
        assert is_alone(array)
        other = device.arrays.restore(find(), view)
        assert not is_alone(array) and not is_alone(other)
        del other
        assert is_alone(array)
        del array
        assert find() is None
    finally:
        device.memory.uninstall()
        device.close()
