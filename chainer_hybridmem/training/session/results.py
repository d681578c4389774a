"""What a session can tell about its run."""

from __future__ import annotations

import statistics
from typing import Any

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.planning.simulation.problem import with_plain_peak
from chainer_hybridmem.training.session.guides.guide import Guide, Stage
from chainer_hybridmem.training.session.guides.guidebook import GuideBook
from chainer_hybridmem.training.session.iterations.iteration_history import (
    FEWEST_STEPS,
    NEWEST,
    Entry,
    IterationHistory,
    StepTimes,
)
from chainer_hybridmem.training.session.iterations.loop import Loop
from chainer_hybridmem.training.session.iterations.observation import InstrumentSelector
from chainer_hybridmem.training.session.setting.options import Options
from chainer_hybridmem.training.session.setting.runtime import Runtime

FITTING_ITERATIONS = 3  # in a row, after which nothing is expected to leave


def _predict(entry: Entry) -> float:
    plan = entry['plan'] if entry['guided'] else None
    return float(entry['own_seconds'] if plan is None else plan.predicted_seconds)


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
            'plain_peak_bytes': self._find_plain_peak(),
            'unplanned': unplanned,
            'fits': self.fits,
        }

    def _find_plain_peak(self) -> int | None:
        problems = [g.problem for g in self._guidebook if g.problem is not None]
        peaks = [problem.in_core.plain_peak_bytes for problem in problems]
        known = [peak for peak in peaks if peak is not None]
        whole = len(known) == len(peaks) > 0
        return self._history.plain.of(max(known) if whole else None)

    def time_steps(self, iterations: int) -> StepTimes | None:
        """See :meth:`.Session.time_steps`."""
        steps = self._history.find_steps(iterations)
        if len(steps) < FEWEST_STEPS:
            return None
        seconds, own, predicted = (
            statistics.median(sum(map(of, step)) for step in steps)
            for of in (
                lambda entry: entry['seconds'] + entry['rest_seconds'],
                lambda entry: entry['own_seconds'] + entry['own_rest_seconds'],
                lambda entry: _predict(entry) + entry['own_rest_seconds'],
            )
        )
        follows = any(entry['guided'] for step in steps for entry in step)
        return StepTimes(seconds, own, predicted if follows else None)

    def list_seconds(self) -> list[float]:
        """See :meth:`.Session.iteration_times`."""
        return [entry['seconds'] for entry in self._history.guided(self.plan)]


Figures = dict[str, Any]


def collect_statistics(
    options: Options, state: str, history: IterationHistory, guide: Guide | None
) -> Figures:
    """See :meth:`.Session.statistics`.

    Args:
        options: What the plan was made for.
        state: Of the session.
        history: Its iterations.
        guide: The guide with the plan; None before there is one.
    """
    plan = None if guide is None else guide.plan
    problem = None if guide is None else guide.problem
    recent = _Recent(history.guided(plan) or history.entries[-NEWEST:])
    maxima, guided = history.all_maxima(), history.maxima(plan)
    return {
        'state': state,
        'planner': options.planner,
        **_count_iterations(history),
        'limit_bytes': options.limit_bytes,
        **_device_memory(history, plan),
        **_plain_memory(history, problem),
        **_arena(options, guide),
        'placed': recent.median_int('placed'),
        'unplaced': recent.median_int('unplaced'),
        **_host_memory(guided or maxima, options, guide),
        **_times(recent, plan),
        'swapped_bytes': recent.median_int('swapped_bytes'),
        'recomputed_bytes': recent.median_int('recomputed_bytes'),
        'evictions': recent.median_int('evictions'),
        'restores': recent.median_int('restores'),
        'split': recent.median_int('split'),
        'split_inexact': recent.median_int('split_inexact'),
        'untrusted': sorted(history.untrusted),
        'foreign_bytes': recent.newest('foreign_bytes'),
        **_actions(plan),
        'planning_seconds': guide.spent.seconds if guide and plan else None,
        'simulations': plan.simulations if plan else None,
        'guided_peak_bytes': _most(guided, 'peak_bytes') if guided else None,
        'kinds': history.kinds.collect(),
    }


class _Recent:
    """The iterations that medians are made of."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def median(self, name: str) -> float | None:
        if not self._entries:
            return None
        return statistics.median(entry[name] for entry in self._entries)

    def median_int(self, name: str) -> int | None:
        value = self.median(name)
        return None if value is None else int(value)

    def newest(self, name: str) -> int | None:
        return int(self._entries[-1][name]) if self._entries else None


def _count_iterations(history: IterationHistory) -> Figures:
    return {
        'iterations': history.iterations,
        'guided_iterations': history.guided_iterations,
        'verified_iterations': history.verified_iterations,
        'deviations': history.deviations,
    }


def _device_memory(history: IterationHistory, plan: Plan | None) -> Figures:
    return {
        'peak_bytes': history.peak_bytes,
        'predicted_peak_bytes': plan.predicted_peak_bytes if plan else None,
        'footprint_bytes': max(
            history.peak_bytes, _most(history.all_maxima(), 'footprint_bytes')
        ),
    }


def _plain_memory(history: IterationHistory, problem: Problem | None) -> Figures:
    plain = kept = None
    if problem is not None:
        plain = history.plain.of(problem.in_core.plain_peak_bytes)
        kept = history.kept.of(problem.in_core_peak_bytes)
    return {
        'in_core_peak_bytes': plain,
        'in_core_peak_in_parts_bytes': kept,
        'older_bytes': history.plain.older_bytes,
    }


def _arena(options: Options, guide: Guide | None) -> Figures:
    arena = None if guide is None else guide.arena.laid_out
    return {
        'arena_bytes': arena.slab_bytes if arena else None,
        'side_bytes': arena.side_bytes if arena else None,
        'no_arena': _explain_absence(guide) if options.arena else None,
    }


def _explain_absence(guide: Guide | None) -> str | None:
    return 'waits for a plan' if guide is None else guide.explain_no_arena()


def _host_memory(maxima: list[Entry], options: Options, guide: Guide | None) -> Figures:
    predicted = None if guide is None else guide.find_host_bytes()
    figures: Figures = {
        'host_bytes': _most(maxima, 'host_bytes'),
        'disk_bytes': _most(maxima, 'disk_bytes'),
        'host_limit_bytes': options.host_limit_bytes,
    }
    names = 'predicted_host_bytes', 'predicted_disk_bytes'
    figures.update(zip(names, predicted or (None, None), strict=True))
    return figures


def _times(recent: _Recent, plan: Plan | None) -> Figures:
    own = recent.median('own_seconds')
    in_core = plan.in_core_seconds if plan else None
    return {
        'iteration_seconds': recent.median('seconds'),
        'own_seconds': own,
        'predicted_seconds': plan.predicted_seconds if plan else None,
        'in_core_seconds': in_core,
        'lower_bound_seconds': plan.lower_bound_seconds if plan else None,
        'gap': plan.gap if plan else None,
        'overhead': own / in_core - 1 if own and in_core else None,
        'stall_seconds': recent.median('stall_seconds'),
    }


def _actions(plan: Plan | None) -> Figures:
    return {
        action.value: plan.count(action) if plan else None
        for action in (Action.KEEP, Action.SWAP, Action.RECOMPUTE)
    }


def _most(entries: list[Entry], name: str) -> int:
    return int(max((entry[name] for entry in entries), default=0))
