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

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from chainer_hybridmem.errors import OptionError, UnknownNameError, nearest
from chainer_hybridmem.lab.pools.models import (
    ENDLESS,
    CnMem,
    CudaMalloc,
    Pool,
    SizePool,
    SplittingPool,
    TablePool,
)
from chainer_hybridmem.planning.layouts.layout import CUDA_ALIGNMENT, check_alignment
from chainer_hybridmem.planning.layouts.offline import exact, smartpool
from chainer_hybridmem.planning.layouts.trace import Trace

PAGE_BYTES = 4096  # MXNET_GPU_MEM_POOL_PAGE_SIZE
LARGE_BYTES = 2**21  # MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE
LINEAR_CUTOFF = 24  # MXNET_GPU_MEM_POOL_ROUND_LINEAR_CUTOFF
RESERVE_PERCENT = 5  # MXNET_GPU_MEM_POOL_RESERVE


def round_multiple(nbytes: int, page_bytes: int, large_bytes: int) -> int:
    """MXNet Naive: a multiple of the page; if that is large, of ``large_bytes``."""
    result = -(-nbytes // page_bytes) * page_bytes
    if result > large_bytes:
        result = -(-result // large_bytes) * large_bytes
    return result


def round_power(nbytes: int, page_bytes: int, linear_cutoff: int) -> int:
    """MXNet Round: a power of two up to ``2**linear_cutoff``, then multiples of it."""
    if nbytes > 1 << linear_cutoff:
        return -(-nbytes >> linear_cutoff) << linear_cutoff
    return max(1 << (nbytes - 1).bit_length(), page_bytes)


def _cudamalloc(trace: Trace) -> Pool:
    return CudaMalloc()


def _cnmem(trace: Trace, reserve_bytes: int | None = None) -> Pool:
    if reserve_bytes is not None and not 0 < reserve_bytes < ENDLESS:
        raise OptionError(f'reserve_bytes is {reserve_bytes}; it must be above zero.')
    return CnMem(reserve_bytes)


def _cupy(trace: Trace) -> Pool:
    return SplittingPool()


def _naive(
    trace: Trace,
    page_bytes: int = PAGE_BYTES,
    large_bytes: int = LARGE_BYTES,
    device_memory_bytes: int | None = None,
    reserve_percent: int = RESERVE_PERCENT,
) -> Pool:
    if page_bytes < 1 or large_bytes < 1:
        raise OptionError(
            f'page_bytes is {page_bytes} and large_bytes {large_bytes}; both must be '
            f'above zero.'
        )
    return SizePool(
        lambda n: round_multiple(n, page_bytes, large_bytes),
        device_memory_bytes,
        reserve_percent,
    )


def _round(
    trace: Trace,
    page_bytes: int = PAGE_BYTES,
    linear_cutoff: int = LINEAR_CUTOFF,
    device_memory_bytes: int | None = None,
    reserve_percent: int = RESERVE_PERCENT,
) -> Pool:
    check_alignment(page_bytes)
    if not 20 <= linear_cutoff <= 34 or page_bytes > 1 << linear_cutoff:
        raise OptionError(
            f'linear_cutoff is {linear_cutoff}; it must be from 20 to 34, and the page '
            f'({page_bytes} bytes) no larger than 2**linear_cutoff.'
        )
    return SizePool(
        lambda n: round_power(n, page_bytes, linear_cutoff),
        device_memory_bytes,
        reserve_percent,
    )


def _smartpool(trace: Trace, alignment: int = CUDA_ALIGNMENT) -> Pool:
    return TablePool(smartpool(trace, alignment), trace.sizes)


def _smartpool_first_fit(trace: Trace, alignment: int = CUDA_ALIGNMENT) -> Pool:
    return TablePool(smartpool(trace, alignment, first_fit=True), trace.sizes)


def _exact(trace: Trace, alignment: int = CUDA_ALIGNMENT) -> Pool:
    return TablePool(exact(trace, alignment), trace.sizes)


POOLS: dict[str, Callable[..., Pool]] = {
    'cudamalloc': _cudamalloc,
    'cnmem': _cnmem,
    'cupy': _cupy,
    'naive': _naive,
    'round': _round,
    'smartpool': _smartpool,
    'smartpool-first-fit': _smartpool_first_fit,
    'exact': _exact,
}


def check_names(names: Iterable[str]) -> None:
    """Refuses names of pools that there are not.

    Raises:
        UnknownNameError: Naming the pools there are.
    """
    for name in names:
        if name not in POOLS:
            raise UnknownNameError(
                f'There is no pool {name!r}.{nearest(name, POOLS)} Pools: '
                f'{", ".join(POOLS)}.'
            )


def make_pool(name: str, trace: Trace, **options: Any) -> Pool:
    """An empty pool.

    Raises:
        UnknownNameError: Naming the pools there are.
        OptionError: If it has no such option, or not with this value.
    """
    check_names([name])
    known = list(inspect.signature(POOLS[name]).parameters)[1:]
    for option in options:
        if option not in known:
            raise OptionError(
                f'Pool {name!r} has no option {option!r}; it has '
                f'{", ".join(known) or "none"}.'
            )
    return POOLS[name](trace, **options)
