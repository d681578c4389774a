"""What CuPy's default pool takes up beside a session.

Note: [other pools]
    Arrays that were made before the session lie in CuPy's default pool. It keeps whole
    chunks as long as one small array in them lives, so what it holds beyond the arrays
    that are known counts as in use: the driver's memory is what the limit is about.
"""

from __future__ import annotations

from chainer_hybridmem.devices.cuda.counting import AllocationCounter
from chainer_hybridmem.devices.cuda.gpu import Gpu


class OtherPools:
    """Counts it; see [other pools].

    Args:
        gpu: Whose memory it is.
        counter: Where it is counted.

    Attributes:
        nbytes (int): Counted now.
        shrinks (bool): Whether an array has died there, so that less may be held.
    """

    def __init__(self, gpu: Gpu, counter: AllocationCounter) -> None:
        self._gpu = gpu
        self._counter = counter
        self._ident = 0
        self.nbytes = 0
        self.shrinks = False

    def expect_less(self) -> None:
        """An array has died there: it may give a chunk back when it is asked."""
        self.shrinks = True

    def count(self, known_bytes: int) -> None:
        """Counts anew what is held.

        Args:
            known_bytes: Of it, counted elsewhere.
        """
        self.shrinks = False
        self.forget()
        with self._gpu.current():
            pool = self._gpu.cupy.get_default_memory_pool()
            pool.free_all_blocks()
            nbytes = int(pool.total_bytes()) - known_bytes
        if nbytes > 0:
            self._ident, self.nbytes = self._counter.count(nbytes), nbytes

    def forget(self) -> None:
        """Counts nothing any more."""
        if self.nbytes:
            nbytes, self.nbytes = self.nbytes, 0
            self._counter.uncount(self._ident, nbytes)
