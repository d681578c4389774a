"""How much memory a convolution of cuDNN may take in a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from chainer.backends import cuda


@contextlib.contextmanager
def workspaces_up_to(nbytes: int) -> Iterator[None]:
    former_bytes = cuda.get_max_workspace_size()
    cuda.set_max_workspace_size(nbytes)
    try:
        yield
    finally:
        cuda.set_max_workspace_size(former_bytes)
