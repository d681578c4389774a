"""A proven lower bound: see :mod:`.proof`."""

from chainer_hybridmem.search.bound.proof import Bound, lower_bound, tighten, warm_up
from chainer_hybridmem.search.bound.relaxation import Relaxation

__all__ = ['Bound', 'Relaxation', 'lower_bound', 'tighten', 'warm_up']
