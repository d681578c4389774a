"""Makes Chainer 7.8.1 importable and right on current Python and NumPy.

Chainer 7.8.1 was released for Python 3.5 to 3.9 and NumPy 1. Two kinds of repair are
needed, and both leave everything that exists for real alone:

* *Before* ``import chainer``: names that Chainer imports and that are gone
  (``stand_ins``). They are there only while Chainer is being
  imported, so no other package meets a stand-in where it expects the real thing. CuPy
  13 needs cuDNN, which it does not find in its package (``cuda``); CuPy 14 gets modules
  for it (:mod:`chainer_hybridmem.training.cudnn`).
* *After* it: code that fails, or silently gives other numbers (``patches``).

``repair`` does both around Chainer's import, with ``import_wrapper``. Every function
here may be called any number of times.
"""

from chainer_hybridmem.training.chainer_access.compat.cuda import (
    cuda_available,
    cupy_can_use_cudnn,
    cupy_has_cudnn,
    load_libraries,
)
from chainer_hybridmem.training.chainer_access.compat.repair import (
    after_import,
    import_chainer,
    install,
    patch_chainer,
    prepare,
)

__all__ = [
    'after_import',
    'cuda_available',
    'cupy_can_use_cudnn',
    'cupy_has_cudnn',
    'import_chainer',
    'install',
    'load_libraries',
    'patch_chainer',
    'prepare',
]
