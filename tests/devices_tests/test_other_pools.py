"""What lies in other pools of the GPU than the session's counts, too."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest
from support.empty_pools import empty_pools

from chainer_hybridmem.training.devices.cuda.device import CudaDevice

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def free_bytes():
    import cupy

    return cupy.cuda.runtime.memGetInfo()[0]


def _in_an_earlier_session(nbytes):
    import cupy

    with contextlib.closing(CudaDevice(1 << 30)) as device, device.memory.counting():
        return cupy.zeros(nbytes, np.uint8), None


def _in_a_pool_of_the_program(nbytes):
    import cupy

    pool = cupy.cuda.MemoryPool()
    cupy.cuda.set_allocator(pool.malloc)
    return cupy.zeros(nbytes, np.uint8), pool


def _in_the_default_pool(nbytes):
    import cupy

    return cupy.zeros(nbytes, np.uint8), None


@pytest.mark.parametrize(
    'make', [_in_an_earlier_session, _in_a_pool_of_the_program, _in_the_default_pool]
)
def test_the_limit_is_about_what_lies_in_other_pools_too(make):
    """The driver gives no more, whoever has asked, and what dies there makes room."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    allocator, before = cupy.cuda.get_allocator(), free_bytes()
    nbytes, limit, unit = 3 << 20, 8 << 20, 256 << 10
    try:
        array, pool = make(nbytes)
        with contextlib.closing(CudaDevice(limit)) as device, device.memory.counting():
            assert device.memory.other_bytes >= nbytes
            filling = []
            with pytest.raises(MemoryError):
                while True:
                    filling.append(cupy.zeros(unit, np.uint8))
                    assert before - free_bytes() <= limit
            assert len(filling) * unit > limit - nbytes - (1 << 20)
            del array
            filling.append(cupy.zeros(nbytes - unit, np.uint8))
            assert before - free_bytes() <= limit
            filling.clear()
        del pool
    finally:
        cupy.cuda.set_allocator(allocator)


@pytest.mark.parametrize('make', [_in_an_earlier_session, _in_the_default_pool])
def test_nothing_lies_there_once_the_pools_are_empty(make):
    """Chainer keeps cuDNN's states of dropout where they have been made."""
    import cupy
    from chainer.backends import cuda

    if not cuda.cudnn_enabled:
        pytest.skip('without cuDNN nothing is kept')
    cupy.clear_memo()  # states are made anew
    with contextlib.closing(CudaDevice(1 << 30)) as device, device.memory.counting():
        cuda.get_cudnn_dropout_states()
    make(1 << 20)
    empty_pools()
    with contextlib.closing(CudaDevice(1 << 30)) as device, device.memory.counting():
        assert device.memory.other_bytes == 0
