"""Profile and plan in, timeline out."""

from chainer_hybridmem.planning.simulation.problem import Problem, make_problem
from chainer_hybridmem.planning.simulation.timeline import simulate

__all__ = ['Problem', 'make_problem', 'simulate']
