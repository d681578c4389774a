"""Why a test is skipped."""

from __future__ import annotations

import os

import pytest

from chainer_hybridmem.training.chainer_access import compat

_cudnn = pytest.mark.skipif(
    os.environ.get('CHAINER_CUDNN') == '0' or not compat.cupy_can_use_cudnn(),
    reason='needs cuDNN; on the emulator: make test-cuda',
)
needs_emulated_cudnn = pytest.mark.skipif(
    'EMU_LIBRARY' not in os.environ or _cudnn.args[0],
    reason='is about the emulated cuDNN: make test-cuda',
)
_emulator = os.path.dirname(os.environ.get('EMU_LIBRARY', ''))
needs_emulated_cudnn9 = pytest.mark.skipif(
    not os.path.exists(os.path.join(_emulator, 'libcudnn.so.9')),
    reason='is about the emulated cuDNN 9: make test-cuda',
)
needs_cudnn = [pytest.mark.gpu, _cudnn]
