"""The relaxation with whole decisions: mixed-integer linear programming.

Unlike the bound of the linear program, that of the solver's tree is trusted, up to the
share :data:`TRUST`, which is given away.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from chainer_hybridmem.interrupts import run_aside
from chainer_hybridmem.search.bound.events import make_row
from chainer_hybridmem.search.bound.relaxation import Relaxation
from chainer_hybridmem.search.bound.whole_maps import MOST_COLUMNS, WholeMaps
from chainer_hybridmem.search.candidates import KEEP, RECOMPUTE, SWAP
from chainer_hybridmem.simulation.problem import Problem
from chainer_hybridmem.terminal import c_output_on_stderr

TRUST = 1e-6  # share of the solver's bound given away for its tolerances


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the solver says.

    Attributes:
        floor (float): No assignment that is not forbidden takes less time,
            however it is scheduled, unless it takes as long as the best plan.
        x (ndarray or None): The best point found.
        done (bool): Whether it is proven to be the best.
    """

    floor: float
    x: np.ndarray | None
    done: bool


class WholeRelaxation:
    """A relaxation whose decisions are whole, with assignments forbidden.

    Args:
        problem (Problem): What is planned.
        limit_bytes (int): Memory limit.

    Attributes:
        relaxation (Relaxation): With decisions in fractions.
        forbidden (int): Assignments that are forbidden.
    """

    def __init__(self, problem: Problem, limit_bytes: int) -> None:
        columns = len(problem.maps) * len(problem.arrays.seconds)
        singles = columns <= MOST_COLUMNS
        self.relaxation = Relaxation(problem, limit_bytes, singles=singles)
        self.forbidden = 0
        at = self.relaxation.model.columns
        self._is_whole = np.zeros(at.end)
        self._is_whole[: at.replay] = 1
        self._is_whole[at.single :] = 1
        self._maps = WholeMaps(self.relaxation) if singles else None

    def cut(self, x: np.ndarray) -> bool:
        """Adds rows that a point violates; tells whether there were any."""
        found = self.relaxation.cut(x)
        return (self._maps is not None and self._maps.cut(x)) or found

    def action_at(self, x: np.ndarray) -> np.ndarray:
        """The (M,) actions at a point."""
        swapped, recomputed = self.relaxation.fractions(x)
        action = np.full(len(swapped), KEEP, np.int64)
        action[recomputed > 0.5] = RECOMPUTE
        action[swapped > 0.5] = SWAP
        return action

    def forbid(self, action: np.ndarray) -> None:
        """At least one map has another action."""
        at = self.relaxation.model.columns
        swapped = at.swap + np.nonzero(action == SWAP)[0]
        recomputed = at.recompute + np.nonzero(action == RECOMPUTE)[0]
        kept = np.nonzero(action == KEEP)[0]
        columns = [swapped, recomputed, at.swap + kept, at.recompute + kept]
        acting = len(swapped) + len(recomputed)
        values = np.concatenate([np.ones(acting), -np.ones(2 * len(kept))])
        self.relaxation.model.add_row(np.concatenate(columns), values, acting - 1)
        self.forbidden += 1

    def solve(self, best_seconds: float, time_budget: float) -> Answer:
        """The best assignment that is not forbidden and may beat the best plan.

        Args:
            best_seconds: Time of the best plan.
            time_budget: Seconds after which the solver gives up.
        """
        from scipy import optimize

        model = self.relaxation.model
        most = min(best_seconds - model.base_seconds, model.longest)
        total = np.array([model.columns.waited + model.n])
        rows = [make_row(total, [1.0], most)]
        if self._maps is not None:
            rows += self._maps.rows()
        program = self.relaxation.program(rows)
        lower, upper = program.bounds.T
        try:
            with c_output_on_stderr():  # HiGHS prints some lines without being asked
                result = run_aside(
                    lambda: optimize.milp(
                        program.cost,
                        integrality=self._is_whole[program.used],
                        bounds=optimize.Bounds(lower, upper),
                        constraints=[
                            optimize.LinearConstraint(
                                program.matrix, -np.inf, program.right
                            ),
                            optimize.LinearConstraint(program.equal, 0, 0),
                        ],
                        options={'time_limit': time_budget, 'mip_rel_gap': 1e-6},
                    )
                )
        except ValueError as error:
            if 'vector::' not in str(error):
                raise
            # HiGHS has run into a limit of its own and found out nothing.
            return Answer(model.base_seconds * (1 - TRUST), None, False)
        # SciPy gives a model that the solver refuses the same status.
        if result.status == 2 and 'nfeasible' in result.message:
            # Nothing is left that could be faster.
            return Answer(best_seconds * (1 - TRUST), None, True)
        floor = result.mip_dual_bound
        seconds = model.base_seconds
        if floor is not None and math.isfinite(floor):
            seconds += min(max(floor, 0.0), most, model.longest)
        x = None if result.x is None else self.relaxation.expanded(program, result.x)
        return Answer(seconds * (1 - TRUST), x, result.status == 0)
