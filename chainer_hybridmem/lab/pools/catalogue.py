"""Pool models by name.

=====================  ========================================================
name                   rule
=====================  ========================================================
cudamalloc             no pool: every malloc and free calls the device API
cnmem                  one slab; smallest free block that fits, split and merged
cupy                   likewise in blocks of the device, which it asks for as needed
naive                  MXNet: a free block of exactly the rounded size
round                  MXNet: likewise, rounded to powers of two, later multiples
smartpool              offline layout, by size, best fit; a table at run time
smartpool-first-fit    likewise, first fit
exact                  offline layout, as small as can be found
=====================  ========================================================
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from chainer_hybridmem.errors import UnknownNameError
from chainer_hybridmem.lab.pools.models import (
    CnMem,
    CudaMalloc,
    Pool,
    SizePool,
    SplittingPool,
    TablePool,
)
from chainer_hybridmem.planning.layouts.offline import exact, smartpool
from chainer_hybridmem.planning.layouts.trace import Trace

PAGE_BYTES = 4096  # MXNET_GPU_MEM_POOL_PAGE_SIZE
LARGE_BYTES = 2**21  # MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE
LINEAR_CUTOFF = 24  # MXNET_GPU_MEM_POOL_ROUND_LINEAR_CUTOFF


def round_multiple(nbytes: int) -> int:
    """MXNet Naive: a multiple of the page; if that is large, of ``LARGE_BYTES``."""
    result = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    if result > LARGE_BYTES:
        result = -(-result // LARGE_BYTES) * LARGE_BYTES
    return result


def round_power(nbytes: int) -> int:
    """MXNet Round: a power of two up to ``2**LINEAR_CUTOFF``, then multiples of it."""
    if nbytes > 1 << LINEAR_CUTOFF:
        return -(-nbytes >> LINEAR_CUTOFF) << LINEAR_CUTOFF
    return max(1 << (nbytes - 1).bit_length(), PAGE_BYTES)


# An empty pool for a trace; offline layouts have the alignment.
POOLS: dict[str, Callable[[Trace, int], Pool]] = {
    'cudamalloc': lambda trace, alignment: CudaMalloc(),
    'cnmem': lambda trace, alignment: CnMem(),
    'cupy': lambda trace, alignment: SplittingPool(),
    'naive': lambda trace, alignment: SizePool(round_multiple),
    'round': lambda trace, alignment: SizePool(round_power),
    'smartpool': lambda trace, alignment: TablePool(
        smartpool(trace, alignment), trace.sizes
    ),
    'smartpool-first-fit': lambda trace, alignment: TablePool(
        smartpool(trace, alignment, first_fit=True), trace.sizes
    ),
    'exact': lambda trace, alignment: TablePool(exact(trace, alignment), trace.sizes),
}


def check_names(names: Iterable[str]) -> None:
    """Refuses names of pools that there are not.

    Raises:
        UnknownNameError: Naming the pools there are.
    """
    for name in names:
        if name not in POOLS:
            close = difflib.get_close_matches(str(name), POOLS, 1)
            hint = f' Did you mean {close[0]!r}?' if close else ''
            raise UnknownNameError(
                f'There is no pool {name!r}.{hint} Pools: {", ".join(POOLS)}.'
            )
