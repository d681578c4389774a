"""Where native code keeps the numbers of a counter, and those of each block.

Note: [headers]
    Each block starts 64 bytes after a header: its id, its size, the address the
    C library knows or the bytes it takes up, and where it lies. So the id of any
    live array is one read away, and nothing has to be looked up when it dies.
"""

from __future__ import annotations

from chainer_hybridmem.training.devices import slab
from chainer_hybridmem.training.devices.counting import COUNTING_BYTES

# Fields of a counter behind those of every device, 8 bytes each.
RECLAIMING, FAILED_BYTES, FAILED_USED, LIMITED = range(
    COUNTING_BYTES, COUNTING_BYTES + 32, 8
)
FROM_POOL, FROM_SYSTEM, MAPPED_BYTES = range(LIMITED + 8, LIMITED + 32, 8)
WANTED = MAPPED_BYTES + 8  # by what does not fit by count, while space is asked for
THREAD = WANTED + 8  # whose allocations are limited, and which makes room
SIDE = THREAD + 8  # a slab as large as the limit, for what has no planned offset
ARENA = SIDE + slab.SLAB_BYTES  # a slab; empty as long as nothing is planned
TABLE = ARENA + slab.SLAB_BYTES
FIELDS = (TABLE + slab.TABLE_BYTES) // 8

# Fields of a header, behind its beginning.
HEADER = 64  # bytes before each block
IDENT, SIZE, EXTENT, PLACE = range(0, 32, 8)
IN_HEAP, IN_SIDE, MAPPED, IN_ARENA = 0, 1, 2, 3  # where a block lies

ALIGNMENT = 64
LARGE_BYTES = 1 << 16  # from this size on blocks come from a slab


def block_bytes(nbytes: int) -> int:
    """What a block takes up, its header included; 0 if it comes from the heap."""
    if nbytes < LARGE_BYTES:
        return 0
    return (nbytes + HEADER + ALIGNMENT - 1) & -ALIGNMENT
