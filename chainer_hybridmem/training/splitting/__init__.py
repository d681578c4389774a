"""One function in parts, when its own working set exceeds the limit."""

from chainer_hybridmem.training.splitting.splitter import (
    EXACT,
    Splitter,
    Splitting,
    check_splitting,
)

__all__ = ['EXACT', 'Splitter', 'Splitting', 'check_splitting']
