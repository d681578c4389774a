"""Training with CuPy inside a memory limit.

Allocations come from a pool of our own, limited to that; copies run on two streams
beside the user's current one, which is called the compute stream here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.training.devices.bits import same_bits
from chainer_hybridmem.training.devices.copies import Copies
from chainer_hybridmem.training.devices.cuda.block_pool import (
    WHOLE_SHARE,
    ArenaMemory,
    BlockPool,
)
from chainer_hybridmem.training.devices.cuda.copies import CudaCopyEngine
from chainer_hybridmem.training.devices.cuda.gpu import (
    UNIT_BYTES,
    CudaClock,
    Gpu,
    round_up,
)
from chainer_hybridmem.training.devices.cuda.late_checks import LateChecks
from chainer_hybridmem.training.devices.cuda.memory import CudaMemory
from chainer_hybridmem.training.devices.ports import Arrays, Offsets
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.devices.references import (
    count_references,
    held_by_none_but,
)
from chainer_hybridmem.training.devices.swap_store.store import Store
from chainer_hybridmem.training.devices.values import (
    Array,
    PlaceFigures,
    Root,
    View,
    find_view,
)

if TYPE_CHECKING:
    from chainer_hybridmem.planning.layouts.arena import Arena


_PINNED_BYTES = 1 << 26  # at once, at least, or such a part of the limit

OF_HOST = {  # options that a GPU does not have, and why
    'link_bandwidth': "a GPU's link cannot be throttled",
    'swap_dir': 'a GPU swaps to pinned memory',
    'disk_bandwidth': 'a GPU swaps to no disk',
    'shared_link': 'GPUs share the links that the machine has',
}


class CudaDevice(Device):
    """CuPy behind the ports of a device.

    Args:
        limit_bytes: Most bytes of GPU memory that may be in use; a smaller
            ``CUPY_GPU_MEMORY_LIMIT`` wins.
        device_id: GPU number; None for the current one.
        host_limit_bytes: Most bytes of pinned memory for swapped feature maps; None is
            no limit.
        of_host: Options of ``OF_HOST``, which must be None.

    Raises:
        OptionError: If CuPy or a GPU is missing or an option cannot be used.
    """

    kind = 'cuda'
    memory: CudaMemory

    def __init__(
        self,
        limit_bytes: int,
        device_id: int | None = None,
        host_limit_bytes: int | None = None,
        **of_host: Any,
    ) -> None:
        if limit_bytes <= 0:
            raise OptionError(f'limit_bytes is {limit_bytes}; it must be above zero.')
        for name, value in of_host.items():
            if value is not None:
                raise OptionError(
                    f'{name} is {value!r}, but {OF_HOST[name]}; leave it out, or use '
                    f"device='cpu'."
                )
        self._gpu = gpu = Gpu(device_id)
        self.memory = memory = CudaMemory(gpu, limit_bytes)
        self.arrays = CudaArrays(gpu, memory)
        self.clock = CudaClock(gpu)
        engine = CudaCopyEngine(gpu, memory, self.clock)
        least_bytes = min(_PINNED_BYTES, max(1, memory.limit_bytes // WHOLE_SHARE))
        pinned = Store(
            engine.make_block, Tier.RAM, host_limit_bytes, least_bytes, pinned=True
        )
        self.copies = Copies(pinned, None, engine, self.arrays)
        self.offsets = CudaOffsets(gpu, memory.pool)
        with gpu.current():
            self.late_checks = LateChecks(gpu.cuda)

    def describe(self) -> dict[str, Any]:
        return {'kind': self.kind, **self._gpu.describe()}


_COMPARED_ELEMENTS = 1 << 24  # at a time; one byte each is allocated for them


class CudaArrays(Arrays):
    """Roots are CuPy's memory objects, which all views of an allocation share.

    Args:
        gpu: Where the arrays are.
        memory: Knows the ids of allocations.
    """

    def __init__(self, gpu: Gpu, memory: CudaMemory) -> None:
        self._memory = memory
        self._number = gpu.number
        self._new_array: Callable[..., Any] = gpu.cupy.ndarray
        self._new_memory: Callable[..., Any] = gpu.cuda.UnownedMemory
        self._new_pointer: Callable[..., Any] = gpu.cuda.MemoryPointer

    def owns(self, array: Any) -> bool:
        return isinstance(array, self._new_array)  # type: ignore[arg-type]

    def allocation_id(self, array: Array) -> int:
        return self._memory.ident_of(array.data.mem)

    def root(self, array: Array) -> Root:
        return array.data.mem

    def track(self, array: Array) -> Callable[[], Root | None]:
        find_owner = self._memory.allocator.track(array.data.mem)
        if find_owner is None:
            return super().track(array)

        def find_root() -> Root | None:
            alive = find_owner()
            if alive is None:
                return None
            return self._new_memory(alive.ptr, alive.nbytes, alive, self._number)

        return find_root

    def root_bytes(self, root: Root) -> int:
        return round_up(root.size)

    def capture(self, array: Array) -> View:
        pointer = array.data
        offset_bytes = pointer.ptr - pointer.mem.ptr if array.size else 0
        return find_view(offset_bytes, array.shape, array.strides, array.dtype.str)

    def restore(self, root: Root, view: View) -> Array:
        pointer = self._new_pointer(root, view.offset_bytes)
        return self._new_array(view.shape, view.dtype, pointer, view.strides)

    def memory_at(self, address: int, nbytes: int) -> Root:
        return self._new_memory(address, nbytes, None, self._number)

    def same_bits(self, left: Array, right: Array) -> bool:
        return same_bits(left, right, _COMPARED_ELEMENTS)

    def last_look(self, root: Root, look: Callable[[int], None]) -> object:
        owner = self._memory.allocator.find_owner(root)
        return None if owner is None else owner.call_last(look)

    def held_by_none_but(
        self, arrays: dict[int, Array], holders: dict[int, set[object]]
    ) -> bool:
        _add_bases(arrays, holders)
        alone = held_by_none_but(arrays, holders, self.root, _pointer_of)
        return alone and self._are_only_roots(arrays)

    def _are_only_roots(self, arrays: dict[int, Array]) -> bool:
        """Whether no other arrays are in the memory, by another root."""
        owners: dict[int, Any] = {}
        roots: dict[int, set[int]] = {}
        for key in arrays:
            root = arrays[key].data.mem
            owner = self._memory.allocator.find_owner(root)
            if owner is not None:
                owners[id(owner)] = owner
                roots.setdefault(id(owner), set()).add(id(root))
        owner = None  # every reference counts
        return all(count_references(owners, key) == len(roots[key]) for key in owners)


def _add_bases(arrays: dict[int, Array], holders: dict[int, set[object]]) -> None:
    """Adds what views are of: these arrays refer to the memory as well."""
    for key in list(arrays):
        base = arrays[key].base
        if base is not None:
            arrays[id(base)] = base
            holders.setdefault(id(base), set()).add(key)


def _pointer_of(array: Array) -> Any:
    """What refers to the memory; views may share one."""
    return array.data


class CudaOffsets(Offsets):
    """The arena is a slab of GPU memory, which is mapped as blocks are placed.

    Where the driver maps none, it is one block, which there must be memory for at once.

    Args:
        gpu: Where it lies.
        pool: Which gives it, and whose other blocks lie beside it.
    """

    alignment_bytes = UNIT_BYTES
    needed = True

    def __init__(self, gpu: Gpu, pool: BlockPool) -> None:
        self._gpu = gpu
        self._pool = pool
        self._counted = PlaceFigures(0, 0, 0)  # in arenas that are gone
        self._missing_bytes = 0
        self._settled = False  # whether nothing that has a place lay elsewhere
        self.moves_in = pool.maps
        self.spare_bytes = pool.spare_bytes

    def block_bytes(self, nbytes: int) -> int:
        return round_up(nbytes)

    def follow(self, arena: Arena, moves_in: bool = True) -> bool:
        """See :meth:`.Offsets.follow`; a larger arena replaces a smaller one."""
        memory = self._pool.arena
        if memory is None or memory.nbytes < arena.slab_bytes:
            memory = self._replace(memory, arena.slab_bytes)
        if memory is None:
            return False
        memory.table.expect(arena)
        refused_bytes = memory.take_refused()  # of the iteration before
        self._missing_bytes = refused_bytes if self._settled else 0
        self._settled = not moves_in and not self._missing_bytes
        return not self._missing_bytes

    def _replace(self, smaller: ArenaMemory | None, nbytes: int) -> ArenaMemory | None:
        """Memory for an arena; None if there is none beside what blocks need."""
        former = weakref.ref(smaller) if smaller is not None else None
        del smaller
        counted = self._counted
        self.release()
        memory = self._pool.make_arena(nbytes)
        if memory is None:
            self._missing_bytes = max(0, self._pool.excess_bytes(nbytes))
            # Where blocks keep it alive, the rest of it is still to be used.
            memory = former() if former is not None else None
            if memory is not None:
                self._counted = counted
            self._pool.arena = memory
            return None
        self._pool.arena = memory
        return memory

    @property
    def missing_bytes(self) -> int:
        return self._missing_bytes

    def release(self) -> None:
        self._counted = self.figures()
        self._pool.arena = None  # it goes with the last block in it
        self._pool.give_back()

    def seek(self, k: int) -> None:
        memory = self._pool.arena
        if memory is not None:
            memory.table.seek(k)

    def figures(self) -> PlaceFigures:
        memory = self._pool.arena
        if memory is None:
            return self._counted
        return PlaceFigures(
            *map(sum, zip(self._counted, memory.table.figures(), strict=True))
        )

    def close(self) -> None:
        self._pool.arena = None
