"""Planners: profile and memory limit in, plan out. One file per system.

``registry`` names them, ``make`` asks them. Those of other papers are in the lab.

Other packages add theirs with an entry point in the group
``chainer_hybridmem.planners``: see ``docs/reference/writing_a_planner.md``.
"""

from chainer_hybridmem.planning.planners.make import make_plan
from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.planners.registry import (
    DEFAULT,
    PLANNERS,
    check_name,
    check_options,
    find_planner,
    names,
    needs_options,
    options_of,
)

__all__ = [
    'DEFAULT',
    'PLANNERS',
    'Planner',
    'check_name',
    'check_options',
    'find_planner',
    'make_plan',
    'names',
    'needs_options',
    'options_of',
]
