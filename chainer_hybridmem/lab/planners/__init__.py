"""Planners of other papers: one file per system."""

# First the table of planners, which imports these files and needs each of them whole.
import chainer_hybridmem.planning.planners  # noqa: F401
