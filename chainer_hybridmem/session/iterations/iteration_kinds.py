"""Figures of iterations by kind: in-core, passive, recorded, or of one plan."""

from __future__ import annotations

import collections
import statistics
import weakref
from typing import Any

from chainer_hybridmem.session.guides.guide import Guide, Stage

NEWEST = 100  # iterations that the median of a kind is made of
MOST = 1000  # kinds; what comes later is counted together
GUIDED = Stage.GUIDED.value

Figures = dict[str, Any]


class _Kind:
    """Iterations of one kind."""

    def __init__(self, state: str, operations: int | None) -> None:
        self._figures: Figures = {
            'state': state,
            'operations': operations,
            'iterations': 0,
            'peak_bytes': 0,
        }
        self._seconds: collections.deque[float] = collections.deque(maxlen=NEWEST)

    def count(self, entry: Figures, guide: Guide | None) -> None:
        figures = self._figures
        guided = figures['state'] == GUIDED
        plan = guide.plan if guide is not None and guided else None
        figures['iterations'] += 1
        figures['peak_bytes'] = max(figures['peak_bytes'], entry['peak_bytes'])
        for name in ('swapped_bytes', 'recomputed_bytes', 'evictions', 'restores'):
            figures[name] = entry[name]
        figures['predicted_seconds'] = plan.predicted_seconds if plan else None
        figures['predicted_peak_bytes'] = plan.predicted_peak_bytes if plan else None
        self._seconds.append(entry['seconds'])

    def figures(self) -> Figures:
        return {**self._figures, 'seconds': statistics.median(self._seconds)}


class IterationKinds:
    """All kinds of iterations that a session has had.

    A kind is a state of the session; iterations that follow a plan are a kind for each
    signature, as long as there are no more than :data:`MOST` kinds.
    """

    def __init__(self) -> None:
        self._all: list[_Kind] = []
        self._by_state: dict[str, _Kind] = {}
        self._by_guide: weakref.WeakKeyDictionary[Guide, _Kind] = (
            weakref.WeakKeyDictionary()
        )

    def count(self, state: str, guide: Guide | None, entry: Figures) -> None:
        """An iteration has ended.

        Args:
            state: See :attr:`.Session.state`.
            guide: What it has followed; None if that was nothing.
            entry: Its figures, as the history has them.
        """
        self._find(state, guide).count(entry, guide)

    def _find(self, state: str, guide: Guide | None) -> _Kind:
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

    def _make(self, state: str, operations: int | None) -> _Kind:
        kind = _Kind(state, operations)
        self._all.append(kind)
        return kind

    def collect(self) -> list[Figures]:
        """Figures of each kind, in the order in which they were met first.

        Returns:
            list of dict: ``state``, ``operations`` (None without a signature),
            ``iterations``, ``seconds`` (median of the newest), ``peak_bytes`` (the
            largest), ``predicted_seconds`` and ``predicted_peak_bytes`` (None without a
            plan), and of the newest iteration ``swapped_bytes``, ``recomputed_bytes``,
            ``evictions`` and ``restores``.
        """
        return [kind.figures() for kind in self._all]
