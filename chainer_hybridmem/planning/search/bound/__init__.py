"""A proven lower bound: see :mod:`.proof`."""

from chainer_hybridmem.planning.search.bound.proof import (
    Bound,
    bound_of_parts,
    bound_of_ranks,
    lower_bound,
    tighten,
    warm_up,
)
from chainer_hybridmem.planning.search.bound.relaxation import Relaxation
from chainer_hybridmem.planning.search.bound.reversal import find_passes
from chainer_hybridmem.planning.search.bound.schedules import bound_of_schedules
from chainer_hybridmem.planning.search.bound.segments import WIDE_GAP
from chainer_hybridmem.planning.search.bound.whole import TRUST, WholeRelaxation

__all__ = [
    'TRUST',
    'WIDE_GAP',
    'Bound',
    'Relaxation',
    'WholeRelaxation',
    'bound_of_parts',
    'bound_of_ranks',
    'bound_of_schedules',
    'find_passes',
    'lower_bound',
    'tighten',
    'warm_up',
]
