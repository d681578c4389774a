"""The table of planners: ours, and those of other packages."""

from __future__ import annotations

import difflib
from typing import Any

from chainer_hybridmem.errors import OptionError, UnknownNameError
from chainer_hybridmem.planners import (
    autoswap,
    capuchin,
    carry,
    checkpoint,
    dtr,
    exact,
    hybrid,
    in_core,
    lower_sets,
    manual,
    pooch,
    superneurons,
    swap_all,
    third_party,
    vdnn,
)
from chainer_hybridmem.planners.planner import Planner, PlannerFunction, as_planner

_FILES = (
    in_core,
    swap_all,
    pooch,
    superneurons,
    vdnn,
    checkpoint,
    lower_sets,
    autoswap,
    capuchin,
    dtr,
    manual,
    exact,
    hybrid,
    carry,
)
PLANNERS: dict[str, Planner | PlannerFunction] = {
    planner.name: planner for file in _FILES for planner in file.PLANNERS
}
"""Ours by name. A plain function is a planner without traits."""
DEFAULT = hybrid.HYBRID.name


def names() -> list[str]:
    """All planners: ours, then those of other packages."""
    return list(dict.fromkeys([*PLANNERS, *third_party.found()]))


def improvable_names() -> list[str]:
    """Planners whose plans a search beside training can improve."""
    return [name for name in PLANNERS if find_planner(name).improvable]


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
    return third_party.load(name)


def check_name(name: str) -> str:
    """Returns the name if a planner has it.

    Raises:
        UnknownNameError: Naming the planners there are.
    """
    if not isinstance(name, str) or not _is_known(name):
        known = names()
        close = difflib.get_close_matches(str(name), known, 1)
        hint = f' Did you mean {close[0]!r}?' if close else ''
        raise UnknownNameError(
            f'There is no planner {name!r}.{hint} Planners: {", ".join(known)}.'
        )
    return name


def _is_known(name: str) -> bool:
    # Most names are ours: only others need a look at what is installed.
    return name in PLANNERS or name in third_party.found()


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
