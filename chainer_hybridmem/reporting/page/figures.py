"""Names and figures of profiles, plans and limits on a page.

Names and storages are there once; columns hold their places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from chainer_hybridmem.planning.records.measured_timeline import Measured
from chainer_hybridmem.planning.records.plan import Action, Plan, Tier
from chainer_hybridmem.planning.records.profile import Category, Profile, Storage
from chainer_hybridmem.planning.records.timeline import Timeline
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.reporting.page.prices import sweep_bound
from chainer_hybridmem.terminal import printable

MOST_LETTERS = 120  # of a name
SWEEP_LIMITS = 9

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """A plan on a page, and what was measured with it.

    Attributes:
        name (str): What the page calls it.
        plan (Plan): The plan.
        measured (Measured or None): An iteration that followed it.
        figures (dict): More figures of the run, such as a session's medians:
            ``measured_seconds``, ``measured_peak_bytes``, ``measured_parts``, and the
            ``whole_peak_bytes`` of all iterations, those without the plan included.
        problem (Problem or None): What the plan was made for, with the bounds that are
            known; None makes it anew.
    """

    name: str
    plan: Plan
    measured: Measured | None = None
    figures: Figures = dataclasses.field(default_factory=dict)
    problem: Problem | None = None


def shown_name(text: str) -> str:
    """A name as the page has it: no marks that turn text around, and not too long."""
    text = printable(text)
    return text if len(text) <= MOST_LETTERS else f'…{text[1 - MOST_LETTERS :]}'


def profile_figures(problem: Problem, name: str) -> Figures:
    """What a page says about a recorded iteration."""
    profile = problem.profile
    figures = problem_figures(problem)
    figures['least_memory_operation'] = shown_name(figures['least_memory_operation'])
    return {
        'name': shown_name(name),
        'fingerprint': profile.fingerprint(),
        'device': {
            shown_name(str(key)): shown_name(str(value))
            for key, value in profile.device.items()
        },
        'operations': len(profile.operations),
        **figures,
    }


def problem_figures(problem: Problem) -> Figures:
    """What is known about an iteration before it is planned."""
    least, operation = least_memory(problem)
    return {
        'feature_maps': len(problem.maps),
        'in_core_seconds': problem.in_core_seconds,
        'in_core_peak_bytes': problem.in_core.plain_peak_bytes,
        'in_core_peak_in_parts_bytes': problem.in_core_peak_bytes,
        'least_memory_bytes': least,
        'least_memory_operation': problem.profile.operations[operation].label,
    }


def plan_figures(profile: Profile, plan: Plan) -> Figures:
    """What a plan does and is predicted to cost."""
    return {
        'in_core_seconds': plan.in_core_seconds,
        'overhead': plan.overhead,
        'lower_bound_seconds': plan.lower_bound_seconds,
        'gap': plan.gap,
        'host_bytes': plan.tier_bytes(profile, Tier.RAM),
        'disk_bytes': plan.tier_bytes(profile, Tier.DISK),
        **{f'{a.value}_bytes': plan.action_bytes(profile, a) for a in Action},
        'sources': len(plan.sources),
        'source_bytes': plan.source_bytes(profile),
        'planning_seconds': plan.planning_seconds,
        'simulations': plan.simulations,
    }


def run_figures(profile: Profile, run: Run, timeline: Timeline) -> Figures:
    """What a plan is predicted to cost, and what was measured.

    Args:
        profile: With the functions in parts that the plan takes so.
        run: The run.
        timeline: Its plan as simulated.
    """
    plan, measured = run.plan, run.measured
    found: Figures = {
        'planner': shown_name(plan.planner),
        'memory_limit_bytes': plan.memory_limit_bytes,
        'predicted_seconds': timeline.total_seconds,
        'peak_bytes': timeline.peak_bytes,
        'stall_seconds': timeline.stall_seconds,
        'host_stall_seconds': timeline.host_stall_seconds,
        'recompute_seconds': timeline.recompute_seconds,
        **{f'{action.value}_maps': plan.count(action) for action in Action},
        'parts': len(profile.functions_in_parts),
        **plan_figures(profile, plan),
    }
    if measured is not None:
        lasting = measured.timeline
        found['measured_seconds'] = measured.total_seconds
        found['measured_peak_bytes'] = lasting.peak_bytes
        found['measured_stall_seconds'] = lasting.stall_seconds
        found['measured_recompute_seconds'] = lasting.recompute_seconds
    found.update(run.figures)
    if found.get('measured_seconds') and plan.in_core_seconds > 0:
        found['measured_overhead'] = (
            found['measured_seconds'] / plan.in_core_seconds - 1
        )
    return found


def sweep_figures(problem: Problem, time_budget: float) -> list[Figures]:
    """The proven bound against the limit.

    Args:
        problem: What is planned.
        time_budget: Seconds for the bound.
    """
    in_core = problem.in_core_seconds
    curve = sweep_bound(problem, SWEEP_LIMITS, time_budget)
    return [
        {
            'memory_limit_bytes': limit,
            'lower_bound_seconds': seconds,
            'overhead': seconds / in_core - 1 if in_core > 0 else 0.0,
        }
        for limit, seconds in curve
    ]


def storage_name(storage: Storage) -> str:
    """The name of a storage; what is no input and has no name gets that of its kind."""
    unnamed = storage.producer < 0 and storage.label == Category.INPUT.value
    return storage.category.value if unnamed else storage.label


class Tables:
    """What the columns of all runs refer to."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._name_places: dict[str, int] = {}
        self._storages: list[Storage] = []
        self._storage_places: dict[tuple[int, int], int] = {}

    def place_name(self, text: str) -> int:
        """Finds the place of a text in the table of names, or adds it."""
        text = shown_name(text)
        place = self._name_places.setdefault(text, len(self.names))
        if place == len(self.names):
            self.names.append(text)
        return place

    def place_names(self, texts: Iterable[str]) -> list[int]:
        """The place of each name."""
        return [self.place_name(text) for text in texts]

    def place_storage(self, storage: Storage) -> int:
        """The place of a storage; one that is smaller in parts has two of them."""
        key = storage.id, storage.nbytes
        place = self._storage_places.setdefault(key, len(self._storages))
        if place == len(self._storages):
            self._storages.append(storage)
        return place

    def storage_columns(self) -> dict[str, list[Any]]:
        """The table of storages, once all of them have a place."""
        return {
            'id': [storage.id for storage in self._storages],
            'name': self.place_names(map(storage_name, self._storages)),
            'producer': [storage.producer for storage in self._storages],
            'bytes': [storage.nbytes for storage in self._storages],
            'category': [storage.category.value for storage in self._storages],
        }
