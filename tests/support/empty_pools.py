"""CuPy's pool without what earlier tests of the process have left there."""

from __future__ import annotations

import gc


def empty_pool() -> None:
    """Frees all of it, cuDNN's states of dropout too.

    They live as long as the process, and with them the whole segment that they lie in,
    of which a device would have no room.
    """
    import cupy

    from chainer_hybridmem.training.recompute import dropout_states

    pool = cupy.get_default_memory_pool()
    gc.collect()
    pool.free_all_blocks()
    if pool.total_bytes():
        cupy.clear_memo()
        dropout_states._watch.generators.clear()
        gc.collect()
        pool.free_all_blocks()
