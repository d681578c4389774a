"""Planners of other packages, found by their entry points."""

from __future__ import annotations

import dataclasses
import functools
from importlib import metadata

from chainer_hybridmem.errors import (
    HybridMemoryError,
    OptionError,
    PlanError,
    PlannerError,
)
from chainer_hybridmem.planners.planner import Planner, PlannerFunction
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.records.rules import pairs_of
from chainer_hybridmem.records.validation import check_plan
from chainer_hybridmem.simulation.problem import Problem

GROUP = 'chainer_hybridmem.planners'


@functools.cache
def found() -> dict[str, metadata.EntryPoint]:
    """Entry points of the group, by name; of equal names the first one."""
    result: dict[str, metadata.EntryPoint] = {}
    for entry in sorted(metadata.entry_points(group=GROUP), key=_order):
        result.setdefault(entry.name, entry)
    return result


def _order(entry: metadata.EntryPoint) -> tuple[str, str]:
    return entry.name, entry.value


@functools.cache
def load(name: str) -> Planner:
    """The planner behind an entry point, with what it returns checked.

    The entry point is a plain function or a :class:`.planner.Planner`.

    Raises:
        OptionError: If it cannot be imported or is no function.
    """
    entry = found()[name]
    try:
        loaded = entry.load()
    except Exception as error:
        raise OptionError(
            f'Planner {name!r} is an entry point to {entry.value}, which cannot be '
            f'imported: {type(error).__name__}: {error}.'
        ) from error
    if not callable(loaded):
        raise OptionError(
            f'Planner {name!r} is an entry point to {entry.value}, which is no '
            f'function of (problem, limit_bytes, **options).'
        )
    planner = loaded if isinstance(loaded, Planner) else Planner(name, loaded)
    who = f'Planner {name!r} ({entry.value})'
    return dataclasses.replace(
        planner, name=name, function=_with_checks(planner.function, who)
    )


def _with_checks(function: PlannerFunction, who: str) -> PlannerFunction:
    """The function, refusing plans that break a rule; errors say who made them."""

    @functools.wraps(function)
    def checked(problem: Problem, limit_bytes: int, **options: object) -> Plan:
        try:
            plan = function(problem, limit_bytes, **options)
        except HybridMemoryError:
            raise
        except Exception as error:
            raise PlannerError(
                f'{who} failed: {type(error).__name__}: {error}'
            ) from error
        if not isinstance(plan, Plan):
            raise PlannerError(f'{who} returned {plan!r}; a Plan was expected.')
        try:
            ruled = dataclasses.replace(plan, rules=pairs_of(problem.rules))
            check_plan(problem.profile, ruled, limit_bytes)
        except PlanError as error:
            raise PlannerError(
                f'{who} made a plan that breaks a rule. {error}'
            ) from error
        return plan

    return checked
