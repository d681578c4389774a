"""The reference: keep everything, as plain Chainer does."""

from __future__ import annotations

from chainer_hybridmem.planners.planner import Planner
from chainer_hybridmem.records.plan import Action, Plan
from chainer_hybridmem.search.candidates import Search
from chainer_hybridmem.simulation.problem import Problem


def in_core(problem: Problem, limit_bytes: int) -> Plan:
    """Keeps every feature map until the graph dies."""
    return Search(problem, limit_bytes).finish_in_core('in-core')


PLANNERS = (
    Planner(
        'in-core',
        in_core,
        source='plain Chainer',
        quick=True,
        actions=frozenset({Action.KEEP}),
    ),
)
