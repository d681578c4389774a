"""What the iterations of a session have been.

A profile knows one iteration, and is recorded while maps of older graphs are away.
Plain Chainer holds them as well. What comes back of them while an iteration is recorded
counts as the iteration's, and so twice: the peak is told too high rather than too low.
"""

from __future__ import annotations

import collections
import itertools
import statistics
import weakref
from typing import Any, NamedTuple

from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.training.devices.protocol import Device, PlaceFigures
from chainer_hybridmem.training.execution.mover import Counters
from chainer_hybridmem.training.session.guides.guide import Guide, Stage
from chainer_hybridmem.training.splitting import Splitter

NEWEST_ALIKE = 100  # iterations that the median of a kind is made of
MOST = 1000  # kinds; what comes later is counted together
GUIDED = Stage.GUIDED.value
LEARNING = Stage.WARM_UP.value, Stage.PROFILING.value
FEWEST_STEPS = 2  # that a median tells anything of

Figures = dict[str, Any]


class StepTimes(NamedTuple):
    """Of a step, as the median of the newest ones.

    Attributes:
        seconds (float): It takes.
        own_seconds (float): Of these, no other program has the processor.
        predicted_seconds (float or None): Likewise, where iterations follow a plan.
    """

    seconds: float
    own_seconds: float
    predicted_seconds: float | None

    def divide(self, count: int) -> StepTimes:
        """Of one of so many iterations, in the mean."""
        seconds, own, predicted = self
        return StepTimes(seconds / count, own / count, predicted and predicted / count)


def mean_times(kinds: list[dict[str, Any]]) -> tuple[StepTimes, float] | None:
    """Times of an iteration in the mean over kinds that follow plans, and in-core.

    None unless there are several of them.

    Args:
        kinds: From :meth:`.Session.statistics`.
    """
    guided = [kind for kind in kinds if kind['predicted_seconds'] is not None]
    if len(guided) < 2:
        return None
    total = sum(kind['iterations'] for kind in guided)
    *means, in_core = (
        sum(kind['iterations'] * kind[name] for kind in guided) / total
        for name in ('seconds', 'own_seconds', 'predicted_seconds', 'in_core_seconds')
    )
    return StepTimes(*means), in_core


class _KindHistory:
    """Iterations of one kind."""

    def __init__(self, state: str, operations: int | None) -> None:
        self._figures: Figures = {
            'state': state,
            'operations': operations,
            'iterations': 0,
            'peak_bytes': 0,
        }
        self._seconds: collections.deque[float] = collections.deque(maxlen=NEWEST_ALIKE)
        self._own: collections.deque[float] = collections.deque(maxlen=NEWEST_ALIKE)

    def count(self, entry: Figures, guide: Guide | None) -> None:
        figures = self._figures
        guided = figures['state'] == GUIDED
        plan = guide.plan if guide is not None and guided else None
        figures['iterations'] += 1
        figures['peak_bytes'] = max(figures['peak_bytes'], entry['peak_bytes'])
        for name in ('swapped_bytes', 'recomputed_bytes', 'evictions', 'restores'):
            figures[name] = entry[name]
        figures['predicted_seconds'] = plan.predicted_seconds if plan else None
        figures['in_core_seconds'] = plan.in_core_seconds if plan else None
        figures['predicted_peak_bytes'] = plan.predicted_peak_bytes if plan else None
        self._seconds.append(entry['seconds'])
        self._own.append(entry['own_seconds'])

    def figures(self) -> Figures:
        seconds, own = map(statistics.median, (self._seconds, self._own))
        return {**self._figures, 'seconds': seconds, 'own_seconds': own}


class IterationKinds:
    """All kinds of iterations that a session has had.

    A kind is a state of the session; iterations that follow a plan are a kind for each
    signature, as long as there are no more than :data:`MOST` kinds.
    """

    def __init__(self) -> None:
        self._all: list[_KindHistory] = []
        self._by_state: dict[str, _KindHistory] = {}
        self._by_guide: weakref.WeakKeyDictionary[Guide, _KindHistory] = (
            weakref.WeakKeyDictionary()
        )

    def count(self, state: str, guide: Guide | None, entry: Figures) -> None:
        """An iteration has ended.

        Args:
            state: See :attr:`.Session.state`.
            guide: What it has followed; None if that was nothing.
            entry: Its figures, as the history has them; gets the state.
        """
        entry['state'] = state
        self._find(state, guide).count(entry, guide)

    def _find(self, state: str, guide: Guide | None) -> _KindHistory:
        if guide is not None and state == GUIDED:
            kind = self._by_guide.get(guide)
            if kind is None and len(self._all) < MOST:
                kind = self._by_guide[guide] = self._make(state, len(guide.signature))
            if kind is not None:
                return kind
        kind = self._by_state.get(state)
        if kind is None:
            kind = self._by_state[state] = self._make(state, None)
        return kind

    def _make(self, state: str, operations: int | None) -> _KindHistory:
        kind = _KindHistory(state, operations)
        self._all.append(kind)
        return kind

    def collect(self) -> list[Figures]:
        """Figures of each kind, in the order in which they were met first.

        Returns:
            list of dict: ``state``, ``operations`` (None without a signature),
            ``iterations``, ``seconds`` and ``own_seconds`` (medians of the newest),
            ``peak_bytes`` (the largest), ``predicted_seconds``, ``in_core_seconds`` and
            ``predicted_peak_bytes`` (None without a plan), and of the newest iteration
            ``swapped_bytes``, ``recomputed_bytes``, ``evictions`` and ``restores``.
        """
        return [kind.figures() for kind in self._all]


class PlainPeak:
    """Highest load of plain Chainer over all iterations that begin beside older graphs.

    Attributes:
        older_bytes (int): Most that older graphs had away when an iteration began.
        seen_bytes (int or None): What has been seen before the session, with everything
            in memory.
    """

    def __init__(self) -> None:
        self.older_bytes = 0
        self.seen_bytes: int | None = None
        self._begin_bytes = self._unknown_begin_bytes = 0
        self._bytes = 0

    def note(self, begin_bytes: int, older_bytes: int, above_bytes: int | None) -> None:
        """Takes an iteration.

        Args:
            begin_bytes: What plain Chainer would have held when it began.
            older_bytes: Of these, maps of older graphs that were away.
            above_bytes: Its highest load without swapping, above what it began with;
                None if that is not known.
        """
        if not older_bytes:
            return
        self.older_bytes = max(self.older_bytes, older_bytes)
        if above_bytes is None:
            self._unknown_begin_bytes = max(self._unknown_begin_bytes, begin_bytes)
            return
        self._begin_bytes = max(self._begin_bytes, begin_bytes)
        self._bytes = max(self._bytes, begin_bytes + above_bytes)

    def of(self, profile_bytes: int | None) -> int | None:
        """The peak of the session.

        Args:
            profile_bytes: That of an iteration alone, as its profile tells it.

        Returns:
            int or None: What has been seen, unless iterations alone need more since.
            None if neither is known: no profile tells it, or an iteration that none
            tells of began with more than all others.
        """
        seen_bytes = self.seen_bytes
        unknown = self._unknown_begin_bytes > self._begin_bytes
        if profile_bytes is None or unknown:
            return seen_bytes
        # A profile may have older graphs twice; what was seen had them once.
        if seen_bytes is not None and profile_bytes - self.older_bytes <= seen_bytes:
            return seen_bytes
        return max(profile_bytes, self._bytes)


Entry = dict[str, Any]
NEWEST = 1000  # iterations that medians are made of
_MAXIMA = ('peak_bytes', 'footprint_bytes', 'host_bytes', 'disk_bytes')


class IterationHistory:
    """One entry per finished iteration: the newest as they are, all of them summed up.

    Args:
        device (Device): Counts memory.

    Attributes:
        untrusted (set of str): Functions that are never run again.
        kinds (IterationKinds): Figures of all iterations by kind.
        entries (list of dict): Figures of the newest iterations, of :data:`NEWEST` or
            more once there are so many.
        iterations (int): How many there have been.
        guided_iterations (int): How many of them have followed a plan.
        verified_iterations (int): How many of them were checked.
        deviations (int): How many have left what they had begun like for nothing.
        plain (PlainPeak): What plain Chainer would need, older graphs included.
        kept (PlainPeak): Likewise, with functions in parts as in profiles.
        shortages (int): In how many an allocation has not fitted at once.
        fitting (int): How many in a row have fitted by now.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._placed_before = PlaceFigures(0, 0, 0)
        self._is_draft = False  # what says where allocations lie
        self.kinds = IterationKinds()
        self.plain, self.kept = PlainPeak(), PlainPeak()
        self.entries: list[Entry] = []
        self.untrusted: set[str] = set()
        self._guided: list[Entry] = []  # the newest
        self._maxima: list[Entry] = []  # of all, for each plan, verified or not
        self.iterations = self.guided_iterations = self.verified_iterations = 0
        self.deviations = self.shortages = self.fitting = 0

    def begin_placing(self, is_draft: bool) -> None:
        """Offsets are set now: nothing before counts, and no draft does."""
        self._placed_before = self._device.offsets.figures()
        self._is_draft = is_draft

    def note_shortage(self, short: bool) -> None:
        """Whether an allocation has not fitted in the iteration to be added."""
        self.shortages += short
        self.fitting = 0 if short else self.fitting + 1

    def add(
        self,
        began: tuple[float, float],
        seconds: float,
        own_seconds: float,
        counters: Counters,
        plan: Plan | None,
        guided: bool,
        foreign_bytes: int,
        splitter: Splitter,
        verified: bool,
        evaluates: bool,
    ) -> Entry:
        """An iteration has ended.

        Args:
            began: From :attr:`.Iteration.began`.
            seconds: It took.
            own_seconds: Of these, no other program had the processor.
            counters: What it has moved.
            plan: What it may have followed.
            guided: Whether it has followed it.
            foreign_bytes: What the program held when it began, beyond what it
                held when the plan's profile was recorded.
            splitter: Knows which functions have run in parts.
            verified: Whether every bit was checked, which takes its time.
            evaluates: Whether an evaluation may be in that time.
        """
        device = self._device
        placed, pool = device.offsets.figures(), device.memory.pool_figures()
        before, self._placed_before = self._placed_before, placed
        if self._is_draft:
            before, self._is_draft = placed, False
        entry = {
            'guided': float(guided),
            'verified': float(verified),
            'evaluates': float(evaluates),
            'began': began,
            'rest_seconds': 0.0,
            'own_rest_seconds': 0.0,
            'host_bytes': device.copies.host_bytes,
            'disk_bytes': device.copies.disk_bytes,
            'plan': plan,
            'seconds': seconds,
            'stall_seconds': device.copies.take_stall_seconds(),
            'own_seconds': own_seconds,
            'peak_bytes': device.memory.peak_bytes,
            'swapped_bytes': counters.swapped_out_bytes + counters.swapped_in_bytes,
            'recomputed_bytes': counters.recomputed_bytes,
            'evictions': counters.evictions,
            'restores': counters.restores,
            'foreign_bytes': foreign_bytes,
            'split': len(splitter.used),
            'split_inexact': splitter.inexact,
            'footprint_bytes': max(
                device.memory.peak_bytes, pool.occupied_bytes + pool.free_bytes
            ),
            'placed': placed.placed - before.placed,
            'unplaced': sum(placed[1:]) - sum(before[1:]),
        }
        self._count(entry)
        return entry

    def _count(self, entry: Entry) -> None:
        if self.entries:
            _end_rest(self.entries[-1], *entry['began'])
        self.iterations += 1
        self.guided_iterations += bool(entry['guided'])
        self.verified_iterations += bool(entry['verified'])
        self.entries.append(entry)
        if entry['guided']:
            self._guided.append(entry)
        _raise_maxima(self._maxima, entry)
        for entries in (self.entries, self._guided):
            if len(entries) == 2 * NEWEST:
                del entries[:NEWEST]
                self._forget_plans()

    def _forget_plans(self) -> None:
        """Maxima of plans that the newest iterations do not know are made one."""
        known = {id(entry['plan']) for entry in (*self.entries, *self._guided)}
        maxima, self._maxima = self._maxima, []
        for entry in maxima:
            if id(entry['plan']) not in known:
                entry['plan'] = None
            _raise_maxima(self._maxima, entry)

    def guided(self, plan: Plan | None) -> list[Entry]:
        """The newest iterations that have followed a plan.

        Those since it was last predicted; without any, those before; without any of
        this plan, those of all plans.
        """
        guided = _all_but('verified', self._guided[-NEWEST:])
        predicted = [e for e in guided if e['plan'] is plan]
        return _all_but('evaluates', predicted or _of_plan(guided, plan))

    def find_steps(self, iterations: int) -> list[list[Entry]]:
        """The newest whole steps in which nothing was recorded, the newest first.

        Those since the last recording, if there are :data:`FEWEST_STEPS`.

        Args:
            iterations: Of a step.
        """
        entries = self.entries[-NEWEST:]
        ends = range(len(entries), iterations - 1, -iterations)
        steps = [entries[end - iterations : end] for end in ends]
        settled = [*itertools.takewhile(_is_settled, steps)]
        if len(settled) < FEWEST_STEPS:
            settled = [*filter(_is_settled, steps)]
        unverified = [s for s in settled if not any(entry['verified'] for entry in s)]
        return unverified or settled

    def find_least_rest(self, iterations: int) -> float:
        """Seconds between the iterations of a step, where they were fewest.

        Args:
            iterations: Of a step.
        """
        rests = [entry['own_rest_seconds'] for entry in self.entries[-NEWEST:-1]]
        ends = range(len(rests), iterations - 1, -iterations)
        return min((sum(rests[end - iterations : end]) for end in ends), default=0.0)

    def maxima(self, plan: Plan | None) -> list[Entry]:
        """The largest figures of iterations that have followed a plan.

        They are of any plan, as long as there is none of this one.
        """
        guided = [e for e in self._maxima if e['guided']]
        return _of_plan(_all_but('verified', guided), plan)

    @property
    def peak_bytes(self) -> int:
        """Highest load of the session, beside iterations as well."""
        return self._device.memory.highest_bytes

    def all_maxima(self) -> list[Entry]:
        """The largest figures of all iterations, by what they have followed."""
        return self._maxima


def _end_rest(entry: Entry, began: float, own_began: float) -> None:
    """The next iteration has begun; the program may have evaluated until then."""
    before, own_before = entry['began']
    rest = began - before - entry['seconds']
    own_rest = own_began - own_before - entry['own_seconds']
    entry['rest_seconds'] = max(rest, 0.0)
    entry['own_rest_seconds'] = max(min(own_rest, rest), 0.0)


def _is_settled(step: list[Entry]) -> bool:
    """Whether nothing was recorded; one that was interrupted has no state."""
    return not any(entry.get('state') in LEARNING for entry in step)


def _all_but(name: str, guided: list[Entry]) -> list[Entry]:
    """Those that are not ``name``; all where there are no others."""
    return [e for e in guided if not e[name]] or guided


def _of_plan(guided: list[Entry], plan: Plan | None) -> list[Entry]:
    """Those of a plan, however long it was predicted to take; all if there are none."""
    return [e for e in guided if _does_the_same(e['plan'], plan)] or guided


def _does_the_same(followed: Plan | None, plan: Plan | None) -> bool:
    """Whether two plans are one, apart from the times it is predicted for."""
    if followed is None or plan is None:
        return followed is plan
    return followed.maps is plan.maps


def _raise_maxima(maxima: list[Entry], entry: Entry) -> None:
    """The largest figures of each plan are kept, of verified iterations apart."""
    for most in maxima:
        kinds = ('guided', 'verified')
        if most['plan'] is entry['plan'] and all(most[k] == entry[k] for k in kinds):
            most.update({name: max(most[name], entry[name]) for name in _MAXIMA})
            return
    names = ('plan', 'guided', 'verified', *_MAXIMA)
    maxima.append({name: entry[name] for name in names})
