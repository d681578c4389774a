"""Profile and plan in, timeline out."""

from chainer_hybridmem.simulation.problem import Problem, make_problem
from chainer_hybridmem.simulation.timeline import Interval, Timeline, simulate

__all__ = ['Interval', 'Problem', 'Timeline', 'make_problem', 'simulate']
