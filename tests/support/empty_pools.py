"""A GPU without what earlier tests of the process have left there."""

from __future__ import annotations

import gc


def empty_pools() -> None:
    """Frees all of CuPy's pool and of those of earlier sessions.

    cuDNN's states of dropout live as long as the process, in the pool of whoever has
    drawn first, and with them the whole segment that they lie in, of which a device
    would have no room.
    """
    import cupy

    from chainer_hybridmem.training.recompute import dropout_states

    gc.collect()
    if _count_bytes():
        cupy.clear_memo()
        dropout_states._watch.generators.clear()
        gc.collect()
        _count_bytes()


def _count_bytes() -> int:
    import cupy

    from chainer_hybridmem.training.devices.cuda.block_pool import _all_pools

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    return int(pool.total_bytes()) + sum(other.footprint_bytes for other in _all_pools)
