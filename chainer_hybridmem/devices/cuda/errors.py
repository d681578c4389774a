"""The error of an allocation that does not fit on the GPU."""

from __future__ import annotations

import functools
from typing import Any

from chainer_hybridmem.devices.cuda.gpu import import_cupy
from chainer_hybridmem.errors import OutOfMemoryError


def make_out_of_memory_error(
    message: str, requested_bytes: int, limit_bytes: int, used_bytes: int
) -> OutOfMemoryError:
    """An error that is both ours and CuPy's."""
    error: OutOfMemoryError = _out_of_memory_class()(
        message, requested_bytes, limit_bytes, used_bytes
    )
    return error


@functools.cache
def _out_of_memory_class() -> Any:
    """Made when it is first needed, because its base is CuPy's."""
    cupy_error = import_cupy().cuda.memory.OutOfMemoryError

    class CudaOutOfMemoryError(OutOfMemoryError, cupy_error):  # type: ignore[misc,valid-type]
        """An allocation on the GPU does not fit."""

        def __init__(
            self, message: str, requested_bytes: int, limit_bytes: int, used_bytes: int
        ) -> None:
            # Neither base's __init__ can pass on to the other one.
            MemoryError.__init__(self, message)
            self.requested_bytes = self._size = requested_bytes
            self.limit_bytes = self._limit = limit_bytes
            self.used_bytes = self._total = used_bytes

        def __reduce__(self) -> tuple[Any, tuple[str, int, int, int]]:
            return make_out_of_memory_error, (
                str(self),
                self.requested_bytes,
                self.limit_bytes,
                self.used_bytes,
            )

    return CudaOutOfMemoryError
