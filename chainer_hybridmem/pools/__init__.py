"""Pools: memory traces, offline layouts and pool models. Pure: needs no Chainer."""

from chainer_hybridmem.pools.arena import Arena, IterationLog, lay_out
from chainer_hybridmem.pools.forward import (
    Lifetimes,
    blob_bytes,
    forward_trace,
    parameter_bytes,
)
from chainer_hybridmem.pools.layout import Layout, check_layout
from chainer_hybridmem.pools.offline import exact, smartpool
from chainer_hybridmem.pools.trace import Trace, from_lifetimes, from_log
from chainer_hybridmem.pools.walk import in_core_trace, planned_trace, recorded_trace

__all__ = [
    'Arena',
    'IterationLog',
    'Layout',
    'Lifetimes',
    'Trace',
    'blob_bytes',
    'check_layout',
    'exact',
    'forward_trace',
    'from_lifetimes',
    'from_log',
    'in_core_trace',
    'lay_out',
    'parameter_bytes',
    'planned_trace',
    'recorded_trace',
    'smartpool',
]
