"""Pools: memory traces, offline layouts and pool models. Pure: needs no Chainer."""

from chainer_hybridmem.planning.layouts.arena import Arena, IterationLog, lay_out
from chainer_hybridmem.planning.layouts.forward import (
    Lifetimes,
    blob_bytes,
    forward_trace,
    parameter_bytes,
)
from chainer_hybridmem.planning.layouts.layout import Layout, check_layout
from chainer_hybridmem.planning.layouts.offline import exact, smartpool
from chainer_hybridmem.planning.layouts.trace import Trace, from_lifetimes, from_log
from chainer_hybridmem.planning.layouts.walk import in_core_trace, planned_trace

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
    'smartpool',
]
