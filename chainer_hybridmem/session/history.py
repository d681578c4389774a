"""What the iterations of a session have been, and the figures made of them."""

from __future__ import annotations

import statistics
from typing import Any

from chainer_hybridmem.devices.protocol import Device, PlaceFigures
from chainer_hybridmem.execution.movements import Counters
from chainer_hybridmem.records.plan import Action, Plan, Tier
from chainer_hybridmem.session.guide import Guide
from chainer_hybridmem.session.options import Options
from chainer_hybridmem.splitting import Splitter

Entry = dict[str, Any]
NEWEST = 1000  # iterations that medians are made of
_MAXIMA = ('peak_bytes', 'footprint_bytes', 'host_bytes', 'disk_bytes')


class History:
    """One entry per finished iteration: the newest as they are, all of them summed up.

    Args:
        device (Device): Counts memory.

    Attributes:
        untrusted (set of str): Functions that are never run again.
        entries (list of dict): Figures of the newest iterations, of :data:`NEWEST` or
            more once there are so many.
        iterations (int): How many there have been.
        guided_iterations (int): How many of them have followed a plan.
        verified_iterations (int): How many of them were checked.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._placed_before = PlaceFigures(0, 0, 0)
        self.entries: list[Entry] = []
        self.untrusted: set[str] = set()
        self._guided: list[Entry] = []  # the newest
        self._maxima: list[Entry] = []  # of all, one for each plan and kind
        self.iterations = self.guided_iterations = self.verified_iterations = 0

    def begin_placing(self) -> None:
        """Places are set now: what has been before does not count."""
        self._placed_before = self._device.place_figures()

    def add(
        self,
        seconds: float,
        counters: Counters,
        plan: Plan | None,
        guided: bool,
        foreign_bytes: int,
        splitter: Splitter,
        verified: bool,
    ) -> Entry:
        """An iteration has ended.

        Args:
            seconds: It took.
            counters: What it has moved.
            plan: What it may have followed.
            guided: Whether it has followed it.
            foreign_bytes: What the program held when it began, beyond what it
                held when the plan's profile was recorded.
            splitter: Knows which functions have run in parts.
            verified: Whether every bit was checked, which takes its time.
        """
        device = self._device
        placed, pool = device.place_figures(), device.pool_figures()
        before, self._placed_before = self._placed_before, placed
        entry = {
            'guided': float(guided),
            'verified': float(verified),
            'host_bytes': device.host_bytes,
            'disk_bytes': device.disk_bytes,
            'plan': plan,
            'seconds': seconds,
            'stall_seconds': device.take_stall_seconds(),
            'peak_bytes': device.peak_bytes,
            'swapped_bytes': counters.swapped_out_bytes + counters.swapped_in_bytes,
            'recomputed_bytes': counters.recomputed_bytes,
            'evictions': counters.evictions,
            'restores': counters.restores,
            'foreign_bytes': foreign_bytes,
            'split': len(splitter.used),
            'split_inexact': splitter.inexact,
            'footprint_bytes': max(
                device.peak_bytes, pool.occupied_bytes + pool.free_bytes
            ),
            'placed': placed.placed - before.placed,
            'unplaced': sum(placed[1:]) - sum(before[1:]),
        }
        self._count(entry)
        return entry

    def _count(self, entry: Entry) -> None:
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

        They are of any plan, as long as there is none of this one.
        """
        return _of_plan(self._guided[-NEWEST:], plan)

    def statistics(
        self, options: Options, state: str, guide: Guide | None, differed: int
    ) -> dict[str, Any]:
        """See :meth:`.session.Session.statistics`.

        Args:
            options: What the plan was made for.
            state: Of the session.
            guide: The guide with the plan; None before there is one.
            differed: Iterations that nobody knew.
        """
        plan = guide.plan if guide is not None else None
        recent = self.guided(plan) or self.entries[-NEWEST:]
        guided = _of_plan([e for e in self._maxima if e['guided']], plan)

        def median(name: str) -> float | None:
            if not recent:
                return None
            return statistics.median(entry[name] for entry in recent)

        problem = guide.problem if guide is not None else None
        arena = guide.arena if guide is not None else None
        seconds = median('seconds')
        in_core = plan.in_core_seconds if plan is not None else None
        return {
            'state': state,
            'planner': options.planner,
            'iterations': self.iterations,
            'guided_iterations': self.guided_iterations,
            'verified_iterations': self.verified_iterations,
            'deviations': differed,
            'limit_bytes': options.limit_bytes,
            'peak_bytes': _most(self._maxima, 'peak_bytes'),
            'predicted_peak_bytes': plan.predicted_peak_bytes if plan else None,
            'in_core_peak_bytes': problem.in_core_peak_bytes if problem else None,
            'footprint_bytes': _most(self._maxima, 'footprint_bytes'),
            'arena_bytes': arena.slab_bytes if arena else None,
            'side_bytes': arena.side_bytes if arena else None,
            'no_arena': _no_arena(guide) if options.arena else None,
            'placed': _as_int(median('placed')),
            'unplaced': _as_int(median('unplaced')),
            'host_bytes': _most(guided or self._maxima, 'host_bytes'),
            'disk_bytes': _most(guided or self._maxima, 'disk_bytes'),
            'host_limit_bytes': options.host_limit_bytes,
            **{
                f'predicted_{name}_bytes': plan.tier_bytes(problem.profile, tier)
                if plan and problem
                else None
                for name, tier in (('host', Tier.RAM), ('disk', Tier.DISK))
            },
            'iteration_seconds': seconds,
            'predicted_seconds': plan.predicted_seconds if plan else None,
            'in_core_seconds': in_core,
            'lower_bound_seconds': plan.lower_bound_seconds if plan else None,
            'gap': plan.gap if plan else None,
            'overhead': seconds / in_core - 1 if seconds and in_core else None,
            'stall_seconds': median('stall_seconds'),
            'swapped_bytes': _as_int(median('swapped_bytes')),
            'recomputed_bytes': _as_int(median('recomputed_bytes')),
            'evictions': _as_int(median('evictions')),
            'restores': _as_int(median('restores')),
            'split': _as_int(median('split')),
            'split_inexact': _as_int(median('split_inexact')),
            'untrusted': sorted(self.untrusted),
            'foreign_bytes': int(recent[-1]['foreign_bytes']) if recent else None,
            'keep': plan.count(Action.KEEP) if plan else None,
            'swap': plan.count(Action.SWAP) if plan else None,
            'recompute': plan.count(Action.RECOMPUTE) if plan else None,
            'planning_seconds': guide.spent.seconds if guide and plan else None,
            'simulations': plan.simulations if plan else None,
            'guided_peak_bytes': _most(guided, 'peak_bytes') if guided else None,
        }


def _no_arena(guide: Guide | None) -> str | None:
    return 'waits for a plan' if guide is None else guide.no_arena


def _of_plan(guided: list[Entry], plan: Plan | None) -> list[Entry]:
    """Those of a plan, or all; without the checked ones where there are others."""
    guided = [e for e in guided if not e['verified']] or guided
    return [e for e in guided if e['plan'] is plan] or guided


def _raise_maxima(maxima: list[Entry], entry: Entry) -> None:
    """The largest figures of each plan and kind of iteration are kept."""
    for most in maxima:
        kinds = ('guided', 'verified')
        if most['plan'] is entry['plan'] and all(most[k] == entry[k] for k in kinds):
            most.update({name: max(most[name], entry[name]) for name in _MAXIMA})
            return
    names = ('plan', 'guided', 'verified', *_MAXIMA)
    maxima.append({name: entry[name] for name in names})


def _most(entries: list[Entry], name: str) -> int:
    return int(max((entry[name] for entry in entries), default=0))


def _as_int(value: float | None) -> int | None:
    return None if value is None else int(value)
