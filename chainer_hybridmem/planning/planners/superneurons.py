"""The static policy of SuperNeurons (Wang et al. 2018) as Ito et al. compare it.

Feature maps are kept from the output side while they fit. Of the rest, outputs of
convolutions are swapped and all others recomputed. A swap-in starts with the
convolution before the operation that needs it (Ito et al., section 5.2).

Where the paper is silent: a chain of recomputes may need more memory than there is.
Then recomputed maps are swapped after all, those needed nearest to the worst
operation first, until the rest fits; the plan's options say how many.
"""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Search,
    is_convolution,
)
from chainer_hybridmem.planning.search.repairs import give_up_recomputes
from chainer_hybridmem.planning.simulation.problem import Problem


def superneurons(problem: Problem, limit_bytes: int) -> Plan:
    """Keeps from the output side; swaps convolutions, recomputes the rest."""
    search = Search(problem, limit_bytes, lead=_preceding_convolution(problem.profile))
    if search.in_core_fits():
        return search.finish_in_core('superneurons')
    best, given_up = give_up_recomputes(search, _static_actions(problem))
    action = best.action.copy()
    for m in range(len(action) - 1, -1, -1):
        if not problem.arrays.allowed[m, KEEP]:
            continue
        before, action[m] = action[m], KEEP
        candidate = search.evaluate(action)
        if not candidate.fits:
            action[m] = before
            break
        best = candidate
    return search.finish('superneurons', best, given_up_recomputes=given_up)


def _static_actions(problem: Problem) -> np.ndarray:
    operations = problem.profile.operations
    return np.array(
        [
            RECOMPUTE
            if recomputable and not is_convolution(operations[s.producer].function)
            else SWAP
            for s, recomputable in zip(problem.maps, problem.recomputable, strict=True)
        ],
        np.int64,
    )


def _preceding_convolution(profile: Profile) -> np.ndarray:
    """(n,) last backward convolution before each operation."""
    lead, last = [], 0
    for op in profile.operations:
        lead.append(last)
        if op.forward >= 0 and is_convolution(op.function):
            last = op.index
    return np.array(lead, np.int64)


SUPERNEURONS = Planner('superneurons', superneurons, 'Wang et al. 2018', quick=True)
PLANNERS = (SUPERNEURONS,)
