"""What a session can tell about its run."""

from __future__ import annotations

from typing import Any

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.records.profile import Profile
from chainer_hybridmem.session.guides.guide import Guide, Stage
from chainer_hybridmem.session.guides.guidebook import GuideBook
from chainer_hybridmem.session.iterations.iteration_history import IterationHistory
from chainer_hybridmem.session.iterations.loop import Loop
from chainer_hybridmem.session.iterations.observation import InstrumentSelector
from chainer_hybridmem.session.session_statistics import collect_statistics
from chainer_hybridmem.session.setting.runtime import Runtime
from chainer_hybridmem.simulation import Problem
from chainer_hybridmem.simulation.problem import with_plain_peak

FITTING_ITERATIONS = 3  # in a row, after which nothing is expected to leave


class Results:
    """The guide with the plan, and figures of all iterations.

    Args:
        runtime (Runtime): Says what plans are made for.
        loop (Loop): Knows the iteration under way.
        guidebook (GuideBook): Has the guides.
        history (IterationHistory): Has figures of iterations.
        observation (InstrumentSelector): Tells when iterations are recorded.
    """

    def __init__(
        self,
        runtime: Runtime,
        loop: Loop,
        guidebook: GuideBook,
        history: IterationHistory,
        observation: InstrumentSelector,
    ) -> None:
        self._options = runtime.options
        self._loop = loop
        self._guidebook = guidebook
        self._history = history
        self._observation = observation

    def find_planned(self) -> Guide | None:
        """The guide of the iteration if it has a plan, else one that has."""
        guide = self._loop.iteration.following.guide
        if guide is not None and guide.plan is not None:
            return guide
        return self._guidebook.find_planned()

    @property
    def plan(self) -> Plan | None:
        """The plan followed now."""
        guide = self.find_planned()
        return None if guide is None else guide.plan

    @property
    def profile(self) -> Profile | None:
        """The profile that the plan was made from."""
        guide = self.find_planned()
        if guide is None or guide.problem is None:
            return None
        return guide.problem.profile

    @property
    def planned(self) -> tuple[Plan | None, Problem | None]:
        """The plan followed now, and what it was made for.

        Plain Chainer's peak is that of the session, older graphs included.
        """
        guide = self.find_planned()
        if guide is None or guide.problem is None:
            return (None if guide is None else guide.plan), None
        problem = guide.problem
        plain_bytes = self._history.plain.of(problem.in_core.plain_peak_bytes)
        return guide.plan, with_plain_peak(problem, plain_bytes)

    @property
    def settled(self) -> bool:
        """See :attr:`.Session.settled`."""
        guide = self.find_planned()
        if guide is not None:
            return guide.timed
        fits = self._history.fitting >= FITTING_ITERATIONS
        return self._observation.waits_for_shortage and fits

    @property
    def fits(self) -> bool:
        """Whether nothing has had to leave, and nothing is planned."""
        fitted = self._history.iterations > 0 and not self._history.shortages
        return fitted and self.find_planned() is None

    def make_error(self, what: str) -> SessionError:
        """The error for a question about a profile or plan that is not there.

        Args:
            what: ``'profile'`` or ``'plan'``.
        """
        iterations = self._history.iterations
        if self._observation.waits_for_shortage and self.fits:
            return SessionError(
                f'There is no {what} after {iterations} iterations, because '
                f'nothing had to leave: iterations are recorded once memory has been '
                f"short; name a planner, such as planner='hybrid', to have them "
                f'recorded in any case.'
            )
        return SessionError(
            f'There is no {what} after {iterations} iterations; train until '
            f'session.{what} is not None.'
        )

    def collect_statistics(self, cached: int) -> dict[str, Any]:
        """See :meth:`.Session.statistics`.

        Args:
            cached: Guides that earlier runs have made.
        """
        unplanned = sum(guide.stage is Stage.PASSIVE for guide in self._guidebook)
        state = self._loop.name_state()
        return {
            **collect_statistics(
                self._options, state, self._history, self.find_planned()
            ),
            'cached': cached,
            'unplanned': unplanned,
            'fits': self.fits,
        }

    def list_seconds(self) -> list[float]:
        """See :meth:`.Session.iteration_times`."""
        return [entry['seconds'] for entry in self._history.guided(self.plan)]
