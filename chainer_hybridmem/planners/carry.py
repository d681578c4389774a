"""A plan that travels: made for another batch size, link or device, and timed anew.

Feature maps are found again by their label and their number among those of the same
label. The plan's actions are simulated on the new problem. Where they need too much
memory, maps leave in the order of the bound's fractions; a few thousand cold steps of
local search then mend what the new times make worse. If the result is proven to be
within ``tolerance`` of the best possible, nothing is searched; else the default planner
searches, and the faster plan counts.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from typing import Any

import numpy as np

from chainer_hybridmem import timing
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planners.hybrid import HYBRID
from chainer_hybridmem.planners.planner import Planner
from chainer_hybridmem.records.library import load_plan, load_profile
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.records.profile import Profile
from chainer_hybridmem.search.annealing import Annealer, Budget
from chainer_hybridmem.search.bound import lower_bound
from chainer_hybridmem.search.candidates import (
    KEEP,
    NUMBERS,
    RECOMPUTE,
    SWAP,
    Search,
)
from chainer_hybridmem.search.planner_options import SHARE
from chainer_hybridmem.search.repairs import free_memory, undo_useless_moves
from chainer_hybridmem.simulation.problem import Problem

COLD_STEPS = 4_000
TOLERANCE = 0.01


def carry(
    problem: Problem,
    limit_bytes: int,
    plan_file: str | None = None,
    profile_file: str | None = None,
    tolerance: float = TOLERANCE,
) -> Plan:
    """Uses a plan that was made for another batch size, link or device.

    Args:
        problem: What to plan.
        limit_bytes: Memory limit.
        plan_file: The plan. None: the default planner searches.
        profile_file: The profile that it was made for.
        tolerance: Nothing is searched if the plan is at most this share slower than the
            proven bound, and so than the result of any search.

    Raises:
        InfeasibleError: If nothing fits.
        OptionError: If only one of the files is given, or they do not go together.
        FormatError: If a file cannot be read.
    """
    options = {
        'plan_file': plan_file,
        'profile_file': profile_file,
        'tolerance': tolerance,
    }
    actions = None
    if plan_file is not None or profile_file is not None:
        actions = _actions(*_load(plan_file, profile_file))
    search = Search(problem, limit_bytes, barrier=False)
    if search.in_core_fits():
        return search.finish_in_core('carry', **options, searched=False)
    carried = None
    if actions is not None:
        with search.uncounted():
            annealer = Annealer(search, Budget(search, 0, None))
            annealer.warm_up()
            bound = lower_bound(problem, limit_bytes)
        goal = bound.seconds * (1 + tolerance)
        carried = free_memory(search, _transfer(problem, actions), bound)
        if carried.fits and carried.seconds > goal:
            carried = annealer.run_round(carried, COLD_STEPS, 0.0, goal, 0)
        if carried.seconds <= goal:
            kept = undo_useless_moves(search, carried)
            return search.finish('carry', kept, **options, searched=False)
    fresh = HYBRID(problem, limit_bytes)
    if carried is not None and carried.seconds < fresh.predicted_seconds:
        return search.finish('carry', carried, **options, searched=True)
    return dataclasses.replace(
        fresh,
        planner='carry',
        options={**options, 'searched': True, 'found_by': fresh.planner},
        planning_seconds=timing.now() - search.started,
        simulations=search.simulations + fresh.simulations,
    )


def _load(plan_file: str | None, profile_file: str | None) -> tuple[Plan, Profile]:
    if plan_file is None or profile_file is None:
        raise OptionError(
            f'plan_file is {plan_file!r} and profile_file is {profile_file!r}; the '
            f'plan and the profile that it was made for are both needed.'
        )
    plan, profile = load_plan(plan_file), load_profile(profile_file)
    if plan.profile_fingerprint != profile.fingerprint():
        raise OptionError(
            f'{plan_file} was not made for {profile_file}; name the profile that it '
            f'was made for.'
        )
    return plan, profile


def _actions(plan: Plan, profile: Profile) -> dict[str, list[int]]:
    """Actions by label, in the order in which the maps are made."""
    actions: dict[str, list[int]] = collections.defaultdict(list)
    storages = profile.storages
    for entry in sorted(plan.maps, key=lambda e: storages[e.storage].producer):
        actions[storages[entry.storage].label].append(NUMBERS[entry.action])
    return actions


def _transfer(problem: Problem, actions: dict[str, list[int]]) -> np.ndarray:
    """(M,) what the plan does with each map; the last of a label stands for more."""
    result = np.full(len(problem.maps), KEEP, np.int64)
    seen: dict[str, int] = collections.defaultdict(int)
    order = sorted(range(len(problem.maps)), key=lambda m: problem.maps[m].producer)
    for m in order:
        label = problem.maps[m].label
        known = actions.get(label)
        if known:
            result[m] = known[min(seen[label], len(known) - 1)]
        seen[label] += 1
    result[(result == RECOMPUTE) & ~problem.recomputable] = SWAP
    return result


class _File:
    """A path, as an option."""

    def check(self, name: str, value: Any) -> str | None:
        if value is None:
            return None
        try:
            path: str = os.fspath(value)
        except TypeError:
            raise OptionError(
                f'{name} is {value!r}; the path of a file is needed.'
            ) from None
        return path


PLANNERS = (
    Planner(
        'carry',
        carry,
        source='this project',
        options={
            'plan_file': _File(),
            'profile_file': _File(),
            'tolerance': SHARE,
        },
        improvable=True,
        needs_options=True,
    ),
)
