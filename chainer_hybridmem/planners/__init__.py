"""Planners: profile and memory limit in, plan out. One file per system.

Other packages add theirs with an entry point in the group
``chainer_hybridmem.planners``: see ``docs/reference/writing_a_planner.md``.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.errors import OptionError, UnknownNameError
from chainer_hybridmem.planners import third_party
from chainer_hybridmem.planners.autoswap import (
    autoswap_aoa,
    autoswap_bo,
    autoswap_doa,
    autoswap_swdoa,
    autoswap_wdoa,
)
from chainer_hybridmem.planners.capuchin import capuchin
from chainer_hybridmem.planners.checkpoint import checkpoint_speed, checkpoint_sqrt
from chainer_hybridmem.planners.dtr import dtr
from chainer_hybridmem.planners.exact import exact
from chainer_hybridmem.planners.hybrid import hybrid
from chainer_hybridmem.planners.in_core import in_core
from chainer_hybridmem.planners.lower_sets import checkpoint_dp, checkpoint_dp_exact
from chainer_hybridmem.planners.manual import manual
from chainer_hybridmem.planners.pooch import pooch, swap_opt
from chainer_hybridmem.planners.superneurons import superneurons
from chainer_hybridmem.planners.swap_all import swap_all, swap_all_unscheduled
from chainer_hybridmem.planners.vdnn import vdnn_all, vdnn_conv
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.records.profile import Profile
from chainer_hybridmem.records.splits import EXACT, Splitting
from chainer_hybridmem.search.bound import lower_bound
from chainer_hybridmem.search.candidates import check_host
from chainer_hybridmem.search.options import checked
from chainer_hybridmem.simulation.fitting import fitted
from chainer_hybridmem.simulation.problem import (
    CrossIteration,
    Problem,
    crossing_of,
    make_problem,
    with_host_limit,
)
from chainer_hybridmem.units import parse_bytes

PLANNERS: dict[str, Callable[..., Plan]] = {
    'in-core': in_core,
    'swap-all-unscheduled': swap_all_unscheduled,
    'swap-all': swap_all,
    'swap-opt': swap_opt,
    'pooch': pooch,
    'superneurons': superneurons,
    'vdnn-all': vdnn_all,
    'vdnn-conv': vdnn_conv,
    'checkpoint-sqrt': checkpoint_sqrt,
    'checkpoint-speed': checkpoint_speed,
    'checkpoint-dp': checkpoint_dp,
    'checkpoint-dp-exact': checkpoint_dp_exact,
    'autoswap-doa': autoswap_doa,
    'autoswap-aoa': autoswap_aoa,
    'autoswap-wdoa': autoswap_wdoa,
    'autoswap-swdoa': autoswap_swdoa,
    'autoswap-bo': autoswap_bo,
    'capuchin': capuchin,
    'dtr': dtr,
    'manual': manual,
    'exact': exact,
    'hybrid': hybrid,
}
DEFAULT = 'hybrid'


def names() -> list[str]:
    """All planners: ours, then those of other packages."""
    return list(dict.fromkeys([*PLANNERS, *third_party.found()]))


def function_of(planner: str) -> Callable[..., Plan]:
    """The planner with this name; ours come first.

    Raises:
        UnknownNameError: If there is none.
        OptionError: If it is another package's and cannot be imported.
    """
    check_name(planner)
    return PLANNERS.get(planner) or third_party.load(planner)


def check_name(planner: str) -> str:
    """Returns the name if a planner has it.

    Raises:
        UnknownNameError: Naming the planners there are.
    """
    if not isinstance(planner, str) or not _is_known(planner):
        known = names()
        close = difflib.get_close_matches(str(planner), known, 1)
        hint = f' Did you mean {close[0]!r}?' if close else ''
        raise UnknownNameError(
            f'There is no planner {planner!r}.{hint} Planners: {", ".join(known)}.'
        )
    return planner


def _is_known(planner: str) -> bool:
    # Most names are ours: nobody need look what is installed.
    return planner in PLANNERS or planner in third_party.found()


def options_of(planner: str) -> list[str]:
    """Names of a planner's options."""
    return list(inspect.signature(function_of(planner)).parameters)[2:]


def check_options(planner: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options as plain values if the planner can use them all.

    Raises:
        OptionError: If it has no such option, naming the options there are and who
            has this one, or if a value is of the wrong kind or out of range.
    """
    known = options_of(planner)
    for option in options:
        if option in known:
            continue
        having = [name for name in PLANNERS if option in options_of(name)]
        hint = f' Planners with it: {", ".join(having)}.' if having else ''
        raise OptionError(
            f'Planner {planner!r} has no option {option!r}; '
            f'it has {", ".join(known) or "none"}.{hint}'
        )
    plain = {option: checked(option, value) for option, value in options.items()}
    if planner == 'manual' and 'actions' in plain:
        from chainer_hybridmem.planners.manual import check_actions

        chosen = check_actions(plain['actions'])
        plain['actions'] = {pattern: what.value for pattern, what in chosen.items()}
    return plain


def make_plan(
    profile: Profile | Problem,
    memory_limit: int | str,
    planner: str = DEFAULT,
    cross_iteration: CrossIteration = False,
    host_limit: int | str | None = None,
    splitting: Splitting = EXACT,
    **options: Any,
) -> Plan:
    """Decides what happens to each feature map.

    Args:
        profile: A recorded iteration, or the problem made of it.
        memory_limit: Bytes, or text such as ``'16GiB'``.
        planner: Name of the planner.
        cross_iteration: Whether parameters and optimizer states may leave, too:
            ``'states'`` for the latter only, ``'all'`` or True for both. A problem
            has been asked already.
        host_limit: Most bytes of RAM for host copies of what is swapped; the rest goes
            to the disk if the profile has a disk link, else it is kept or made
            again. None is no limit, or the problem's own.
        splitting: Which functions may run in parts where an operation alone exceeds
            the limit, and its profile knows how: ``'exact'``, True or False as in
            :func:`chainer_hybridmem.optimize`. A problem has been asked already.
        options: Options of that planner.

    Returns:
        Plan: Checked against the profile and the limit, with the proven bound.

    Raises:
        InfeasibleError: If the planner finds no plan inside the limit.
        UnknownNameError: If there is no such planner.
        OptionError: If the planner has no such option, or not with this value, or if
            a problem was made with less ``cross_iteration``.
    """
    function = function_of(planner)
    limit_bytes = parse_bytes(memory_limit, 'memory_limit')
    options = check_options(planner, options)
    problem = _problem_of(profile, cross_iteration, splitting)
    if host_limit is not None:
        host_limit_bytes = parse_bytes(host_limit, 'host_limit', least=0)
        problem = with_host_limit(problem, host_limit_bytes)
    problem = fitted(problem, limit_bytes)
    plan = function(problem, limit_bytes, **options)
    check_host(problem, plan)
    bound = lower_bound(problem, limit_bytes).seconds
    return dataclasses.replace(
        plan,
        options={**options, **plan.options},
        parts=problem.parts,
        lower_bound_seconds=max(plan.lower_bound_seconds, bound),
    )


def _problem_of(
    profile: Profile | Problem, cross_iteration: CrossIteration, splitting: Splitting
) -> Problem:
    if not isinstance(profile, Problem):
        return make_problem(profile, cross_iteration, splitting=splitting)
    if not crossing_of(cross_iteration) <= crossing_of(profile.cross_iteration):
        raise OptionError(
            f'cross_iteration is {cross_iteration!r}, but the problem was made without '
            'it; give it to make_problem.'
        )
    return profile
