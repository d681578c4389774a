"""The figures of a session, made of its iterations and its guide."""

from __future__ import annotations

import statistics
from typing import Any

from chainer_hybridmem.records.plan import Action, Plan, Tier
from chainer_hybridmem.session.guides.guide import Guide
from chainer_hybridmem.session.iterations.iteration_history import (
    NEWEST,
    Entry,
    IterationHistory,
)
from chainer_hybridmem.session.setting.options import Options
from chainer_hybridmem.simulation import Problem

Figures = dict[str, Any]


def collect_statistics(
    options: Options, state: str, history: IterationHistory, guide: Guide | None
) -> Figures:
    """See :meth:`.session.Session.statistics`.

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
        **_device_memory(maxima, plan, problem),
        **_plain_memory(history, problem),
        **_arena(options, guide),
        'placed': recent.median_int('placed'),
        'unplaced': recent.median_int('unplaced'),
        **_host_memory(guided or maxima, options, plan, problem),
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


def _device_memory(
    maxima: list[Entry], plan: Plan | None, problem: Problem | None
) -> Figures:
    return {
        'peak_bytes': _most(maxima, 'peak_bytes'),
        'predicted_peak_bytes': plan.predicted_peak_bytes if plan else None,
        'footprint_bytes': _most(maxima, 'footprint_bytes'),
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


def _host_memory(
    maxima: list[Entry], options: Options, plan: Plan | None, problem: Problem | None
) -> Figures:
    figures: Figures = {
        'host_bytes': _most(maxima, 'host_bytes'),
        'disk_bytes': _most(maxima, 'disk_bytes'),
        'host_limit_bytes': options.host_limit_bytes,
    }
    for name, tier in (('host', Tier.RAM), ('disk', Tier.DISK)):
        predicted = plan.tier_bytes(problem.profile, tier) if plan and problem else None
        figures[f'predicted_{name}_bytes'] = predicted
    return figures


def _times(recent: _Recent, plan: Plan | None) -> Figures:
    seconds = recent.median('seconds')
    in_core = plan.in_core_seconds if plan else None
    return {
        'iteration_seconds': seconds,
        'predicted_seconds': plan.predicted_seconds if plan else None,
        'in_core_seconds': in_core,
        'lower_bound_seconds': plan.lower_bound_seconds if plan else None,
        'gap': plan.gap if plan else None,
        'overhead': seconds / in_core - 1 if seconds and in_core else None,
        'stall_seconds': recent.median('stall_seconds'),
    }


def _actions(plan: Plan | None) -> Figures:
    return {
        action.value: plan.count(action) if plan else None
        for action in (Action.KEEP, Action.SWAP, Action.RECOMPUTE)
    }


def _most(entries: list[Entry], name: str) -> int:
    return int(max((entry[name] for entry in entries), default=0))
