"""Pools: memory traces, offline layouts and pool models. Pure: needs no Chainer."""

from chainer_hybridmem.pools.arena import Arena, IterationLog, lay_out
from chainer_hybridmem.pools.layout import Layout, check_layout, exact, smartpool
from chainer_hybridmem.pools.trace import Trace, from_lifetimes, from_log
from chainer_hybridmem.pools.walk import in_core_trace, planned_trace, recorded_trace

__all__ = [
    'Arena',
    'IterationLog',
    'Layout',
    'Trace',
    'check_layout',
    'exact',
    'from_lifetimes',
    'from_log',
    'in_core_trace',
    'lay_out',
    'planned_trace',
    'recorded_trace',
    'smartpool',
]
