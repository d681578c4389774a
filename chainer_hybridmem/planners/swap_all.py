"""The two baselines that swap every feature map (Ito et al., section 5.1).

``swap-all-unscheduled`` starts each swap-in together with the computation just
before the one that needs it; ``swap-all`` starts it as early as memory allows.
"""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.planners.planner import Planner
from chainer_hybridmem.records.plan import Action, Plan
from chainer_hybridmem.search.candidates import SWAP, Search
from chainer_hybridmem.simulation.problem import Problem


def swap_all(problem: Problem, limit_bytes: int) -> Plan:
    """Swaps every feature map, swap-ins as early as memory allows."""
    search = Search(problem, limit_bytes)
    return search.finish('swap-all', search.evaluate(search.fill(SWAP)))


def swap_all_unscheduled(problem: Problem, limit_bytes: int) -> Plan:
    """Swaps every feature map, swap-ins with the preceding computation."""
    previous = np.arange(len(problem.arrays.seconds), dtype=np.int64) - 1
    search = Search(problem, limit_bytes, lead=previous)
    return search.finish('swap-all-unscheduled', search.evaluate(search.fill(SWAP)))


_ACTIONS = frozenset({Action.KEEP, Action.SWAP})  # the former where rules say so
UNSCHEDULED = Planner(
    'swap-all-unscheduled',
    swap_all_unscheduled,
    source='Ito et al., section 5.1',
    acts_always=True,
    quick=True,
    actions=_ACTIONS,
)
SWAP_ALL = Planner(
    'swap-all',
    swap_all,
    source='Ito et al., section 5.1',
    acts_always=True,
    quick=True,
    actions=_ACTIONS,
)
PLANNERS = (UNSCHEDULED, SWAP_ALL)
