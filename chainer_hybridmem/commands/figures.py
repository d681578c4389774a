"""Figures of profiles and plans as plain values: bytes int, seconds float.

The commands print them as tables and write them as JSON.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from chainer_hybridmem.planning.planners.make import price_rules
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.profile import Category, Phase, Profile
from chainer_hybridmem.planning.records.timeline import Timeline
from chainer_hybridmem.planning.search.candidates import SWAP, Search
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.reporting.page import figures

LARGEST_LIMIT_BYTES = 2**62
NOT_KNOWN = (  # where there is no plan
    *('iteration_seconds', 'overhead', 'peak_bytes', 'host_bytes', 'disk_bytes'),
    *('planning_seconds', 'lower_bound_seconds', 'gap', 'simulations'),
    *('sources', 'source_bytes'),
    *(action.value for action in Action),
    *(f'{action.value}_bytes' for action in Action),
)


def load_kernels(problem: Problem) -> None:
    """Simulates once, or loading the simulator counts as the first planning time."""
    search = Search(problem, LARGEST_LIMIT_BYTES)
    search.evaluate(search.fill(SWAP))


def profile_figures(problem: Problem) -> dict[str, Any]:
    """What a profile says about its network, device and link."""
    profile, link = problem.profile, problem.profile.link
    return {
        'device': profile.device,
        'operations': _count_by_phase(profile),
        'seconds': _seconds_by_phase(profile),
        'exchanged_bytes': profile.exchanged_bytes,
        'recomputable': int(problem.recomputable.sum()),
        'feature_map_bytes': sum(s.nbytes for s in problem.maps),
        'bytes_by_category': _bytes_by_category(profile),
        'initial_bytes': profile.initial_bytes,
        **figures.problem_figures(problem),
        'link': dataclasses.asdict(link),
    }


def plan_figures(problem: Problem, plan: Plan) -> dict[str, Any]:
    """What a plan is predicted to cost; the columns of ``hybridmem compare``."""
    return {
        'planner': plan.planner,
        'fits': True,
        'iteration_seconds': plan.predicted_seconds,
        'peak_bytes': plan.predicted_peak_bytes,
        **{action.value: plan.count(action) for action in Action},
        **figures.plan_figures(problem.profile, plan),
    }


def rule_costs(
    problem: Problem, limit_bytes: int, planned: dict[str, Any], **options: Any
) -> list[dict[str, Any]]:
    """What each rule of a planned problem costs, as plain values.

    Args:
        problem: Under its rules.
        limit_bytes: Memory limit.
        planned: Figures of the plan.
        options: Of the planner.
    """
    planner, seconds = planned['planner'], planned['iteration_seconds']
    costs = price_rules(problem, limit_bytes, planner, seconds, **options)
    return [dataclasses.asdict(cost) for cost in costs]


def misfit_figures(
    problem: Problem, planner: str, reason: str, failed: bool = False
) -> dict[str, Any]:
    """The same columns for a planner that finds no plan inside the limit, or fails."""
    return {
        **dict.fromkeys(NOT_KNOWN),
        'planner': planner,
        'fits': False,
        'in_core_seconds': problem.in_core_seconds,
        'reason': reason,
        'failed': failed,
    }


def timeline_figures(timeline: Timeline) -> dict[str, Any]:
    """Where the time of a simulated plan goes."""
    return {
        'stall_seconds': timeline.stall_seconds,
        'recompute_seconds': timeline.recompute_seconds,
        'stalls': sum(i.kind == 'stall' for i in timeline.intervals),
    }


def _count_by_phase(profile: Profile) -> dict[str, int]:
    counts = Counter(op.phase for op in profile.operations)
    return {phase.value: counts[phase] for phase in Phase}


def _seconds_by_phase(profile: Profile) -> dict[str, float]:
    return {
        phase.value: sum(
            op.device_seconds for op in profile.operations if op.phase is phase
        )
        for phase in Phase
    }


def _bytes_by_category(profile: Profile) -> dict[str, int]:
    """Bytes of all allocations, those that never live together included."""
    totals: Counter[Category] = Counter()
    for storage in profile.storages:
        totals[storage.category] += storage.nbytes
    return {category.value: totals[category] for category in Category}
