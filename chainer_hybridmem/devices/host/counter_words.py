"""Where native code keeps the numbers of a counter, and those of each block.

Note: [headers]
    Each block starts 64 bytes after a header: its id, its size, the address the
    C library knows or the bytes it takes up, and where it lies. So the id of any
    live array is one read away, and nothing has to be looked up when it dies.
"""

from __future__ import annotations

from chainer_hybridmem.devices import slab

# Fields of a counter, 8 bytes each.
LIMIT, USED, PEAK, WINDOW, NEXT_ID = range(0, 40, 8)
LOGGING, LOG, LOG_LENGTH, LOG_CAPACITY = range(40, 72, 8)
RECLAIMING, FAILED_BYTES, FAILED_USED, LIMITED = range(72, 104, 8)
FROM_POOL, FROM_SYSTEM, MAPPED_BYTES, SAMPLE_PEAK = range(104, 136, 8)
WANTED = 136  # by an allocation that does not fit by count, while space is asked for
THREAD = 144  # whose allocations are limited, and which makes room
SIDE = 152  # a slab as large as the limit, for what has no planned offset
ARENA = SIDE + slab.SLAB_BYTES  # a slab; empty as long as nothing is planned
TABLE = ARENA + slab.SLAB_BYTES
FIELDS = (TABLE + slab.TABLE_BYTES) // 8
ID_BITS = 40  # of an id; the counter's number is above them

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
