"""Searches for better plans in the background, one per problem."""

from __future__ import annotations

from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.search.improvement import Improvement
from chainer_hybridmem.simulation import Problem


class BackgroundSearch:
    """The searches of a session; one runs at a time.

    Attributes:
        improvements (list of Improvement): Those that have begun.
    """

    def __init__(self) -> None:
        self.improvements: list[Improvement] = []

    def find(self, problem: Problem) -> Improvement | None:
        """The search for a problem; None if it has not begun."""
        return next((i for i in self.improvements if i.problem is problem), None)

    def start(self, problem: Problem, plan: Plan) -> None:
        """Begins to search for a better plan, unless another search runs."""
        if not any(other.running for other in self.improvements):
            found = Improvement(problem, plan.memory_limit_bytes, plan)
            self.improvements.append(found)
            found.start()

    def stop(self) -> None:
        """Ends all searches."""
        for improvement in self.improvements:
            improvement.close()
        self.improvements.clear()

    def forget(self, problem: Problem | None) -> None:
        """Ends the search for a problem that is no guide's any more."""
        for improvement in [i for i in self.improvements if i.problem is problem]:
            improvement.close()
            self.improvements.remove(improvement)
