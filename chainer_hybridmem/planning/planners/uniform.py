"""The baselines that treat every feature map alike (Ito et al., section 5.1).

``in-core`` keeps everything, as plain Chainer does. ``swap-all-unscheduled`` starts
each swap-in together with the computation just before the one that needs it;
``swap-all`` starts it as early as memory allows.
"""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import SWAP, Search, infeasible
from chainer_hybridmem.planning.simulation.problem import Problem
from chainer_hybridmem.units import format_bytes


def in_core(problem: Problem, limit_bytes: int) -> Plan:
    """Keeps every feature map until the graph dies, and runs every function whole.

    Raises:
        InfeasibleError: If plain Chainer exceeds the limit, or surely did so where the
            profile was recorded.
        OptionError: If the problem has functions in parts that would fit whole.
    """
    _check_whole(problem, limit_bytes)
    return Search(problem, limit_bytes).finish_in_core('in-core')


def _check_whole(problem: Problem, limit_bytes: int) -> None:
    """Refuses functions in parts: plain Chainer has none."""
    plain_bytes = problem.in_core.plain_peak_bytes
    if plain_bytes is None:
        at_least = problem.in_core_peak_bytes
        count = len(problem.profile.functions_in_parts)
        raise InfeasibleError(
            f"Planner 'in-core' does not fit: plain Chainer runs every function as a "
            f'whole, and where this profile was recorded {count} had to run in parts; '
            f'what plain Chainer needs is not known, but more than '
            f'{format_bytes(at_least)} ({at_least} bytes). Record the profile under a '
            f'larger memory limit, or use another planner.',
            at_least,
            limit_bytes,
        )
    if plain_bytes > limit_bytes:
        raise infeasible(problem, limit_bytes, 'in-core', None)
    if problem.parts:
        raise OptionError(
            f"Planner 'in-core' runs every function as a whole, but this problem has "
            f'{len(problem.parts)} in parts; make the problem without parts.'
        )


def swap_all(problem: Problem, limit_bytes: int) -> Plan:
    """Swaps every feature map, swap-ins as early as memory allows."""
    search = Search(problem, limit_bytes)
    return search.finish('swap-all', search.evaluate(search.fill(SWAP)))


def swap_all_unscheduled(problem: Problem, limit_bytes: int) -> Plan:
    """Swaps every feature map, swap-ins with the preceding computation."""
    previous = np.arange(len(problem.arrays.seconds), dtype=np.int64) - 1
    search = Search(problem, limit_bytes, lead=previous)
    return search.finish('swap-all-unscheduled', search.evaluate(search.fill(SWAP)))


IN_CORE = Planner(
    'in-core',
    in_core,
    source='plain Chainer',
    quick=True,
    actions=frozenset({Action.KEEP}),
    whole=True,
)
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
PLANNERS = (IN_CORE, UNSCHEDULED, SWAP_ALL)
