"""The table of planners: ours, and those of other packages."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from importlib import metadata
from typing import Any

from chainer_hybridmem.errors import (
    HybridMemoryError,
    OptionError,
    PlanError,
    PlannerError,
    UnknownNameError,
    nearest,
)
from chainer_hybridmem.planning.planners import (
    exact,
    hybrid,
    manual,
    pooch,
    superneurons,
    uniform,
)
from chainer_hybridmem.planning.planners.planner import (
    Planner,
    PlannerFunction,
    as_planner,
)
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.rules import pairs_of
from chainer_hybridmem.planning.search.candidates import accept
from chainer_hybridmem.planning.simulation.problem import Problem

# Planners of other papers are found by name, as those of other packages are.
LAB = 'chainer_hybridmem.lab.planners'
IN_LAB = ('vdnn', 'checkpoint', 'lower_sets', 'autoswap', 'capuchin', 'dtr')
FILES: tuple[Any, ...] = (
    *(uniform, pooch, superneurons),
    *(importlib.import_module(f'{LAB}.{name}') for name in IN_LAB),
    *(manual, exact, hybrid),
)
PLANNERS: dict[str, Planner | PlannerFunction] = {
    planner.name: planner for file in FILES for planner in file.PLANNERS
}
"""Ours by name. A plain function is a planner without traits."""
DEFAULT = hybrid.HYBRID.name


def names() -> list[str]:
    """All planners: ours, then those of other packages."""
    return list(dict.fromkeys([*PLANNERS, *found()]))


def needs_options(name: str) -> bool:
    """Whether a planner does nothing useful without options."""
    try:
        return find_planner(name).needs_options
    except OptionError:  # it cannot be imported, which its use will say
        return False


def find_planner(name: str) -> Planner:
    """The planner with this name; ours come first.

    Raises:
        UnknownNameError: If there is none.
        OptionError: If it is another package's and cannot be imported.
    """
    check_name(name)
    if name in PLANNERS:
        return as_planner(name, PLANNERS[name])
    return load(name)


def check_name(name: str) -> str:
    """Returns the name if a planner has it.

    Raises:
        UnknownNameError: Naming the planners there are.
    """
    if not isinstance(name, str) or not _is_known(name):
        known = names()
        raise UnknownNameError(
            f'There is no planner {name!r}.{nearest(name, known)} Planners: '
            f'{", ".join(known)}.'
        )
    return name


def _is_known(name: str) -> bool:
    # Most names are ours: only others need a look at what is installed.
    return name in PLANNERS or name in found()


def options_of(name: str) -> list[str]:
    """Names of a planner's options."""
    return list(find_planner(name).defaults)


def check_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options as plain values if the planner can use them all.

    Raises:
        OptionError: If it has no such option, naming the options there are and who
            has this one, or if a value is of the wrong kind or out of range.
    """
    planner = find_planner(name)
    known = list(planner.defaults)
    for option in options:
        if option in known:
            continue
        having = [other for other in PLANNERS if option in options_of(other)]
        hint = f' Planners with it: {", ".join(having)}.' if having else ''
        raise OptionError(
            f'Planner {name!r} has no option {option!r}; '
            f'it has {", ".join(known) or "none"}.{hint}'
        )
    return planner.check_options(options)


# -- planners of other packages -----------------------------------------------
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
            return accept(problem, ruled, limit_bytes)
        except PlanError as error:
            raise PlannerError(
                f'{who} made a plan that breaks a rule. {error}'
            ) from error

    return checked
