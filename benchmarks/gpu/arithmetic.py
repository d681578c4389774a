"""How networks compute in the GPU benchmarks: float32, TF32 or mixed16.

Nothing here imports Chainer or CuPy before :func:`using` is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

NAMES = ('float32', 'tf32', 'mixed16')
# As PyTorch is asked to measure its algorithms (cudnn.benchmark), so is Chainer.
TUNED_WORKSPACE = '256MiB'


def limit_of(name: str, limit_bytes: int) -> int:
    """The limit of an arithmetic: mixed16's feature maps take half the bytes."""
    return limit_bytes // 2 if name == 'mixed16' else limit_bytes


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Models that are made and trained meanwhile compute this way.

    Args:
        name: Of ``NAMES``.
    """
    import chainer
    from cupy import _core
    from cupy._core import _routines_linalg as linalg

    former = _core.get_compute_type('f')
    kind = linalg.COMPUTE_TYPE_TF32 if name == 'tf32' else linalg.COMPUTE_TYPE_DEFAULT
    dtype = chainer.mixed16 if name == 'mixed16' else chainer.config.dtype
    _core.set_compute_type('f', kind)
    try:
        with chainer.using_config('dtype', dtype):
            yield
    finally:
        _core.set_compute_type('f', former)


@contextlib.contextmanager
def tuned(autotune: bool, workspace_bytes: int | None) -> Iterator[None]:
    """Convolutions choose their algorithms this way.

    Args:
        autotune: Whether they are measured.
        workspace_bytes: What one may take for a while; None for Chainer's default.
    """
    import chainer
    from chainer.backends import cuda

    former_bytes = cuda.get_max_workspace_size()
    if workspace_bytes is not None:
        cuda.set_max_workspace_size(workspace_bytes)
    try:
        with chainer.using_config('autotune', autotune):
            yield
    finally:
        cuda.set_max_workspace_size(former_bytes)


def cudnn_version() -> int | None:
    """The version that Chainer uses, 92800 for 9.28.0; None if it uses none."""
    from chainer_hybridmem.training.chainer_access import compat

    cuda = compat.import_chainer().backends.cuda
    return int(cuda.libcudnn.getVersion()) if cuda.cudnn_enabled else None
