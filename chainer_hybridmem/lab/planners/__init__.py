"""Planners of other papers: one file per system."""

# The table imports the files here: whoever imports one of them first imports it whole.
import chainer_hybridmem.planning.planners  # noqa: F401
