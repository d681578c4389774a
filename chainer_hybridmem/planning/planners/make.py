"""Makes plans by the name of a planner, and checks them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning.planners.registry import (
    DEFAULT,
    check_options,
    find_planner,
)
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.rules import Rule, RuleCost, pairs_of
from chainer_hybridmem.planning.records.splits import EXACT, Splitting
from chainer_hybridmem.planning.records.validation import check_obedience
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import check_host
from chainer_hybridmem.planning.simulation.obedience import NUMBERS, check_limits, named
from chainer_hybridmem.planning.simulation.problem import (
    CrossIteration,
    Problem,
    crossing_of,
    make_problem,
    with_host_limit,
    with_rules,
)
from chainer_hybridmem.units import parse_bytes


def make_plan(
    profile: Profile | Problem,
    memory_limit: int | str,
    planner: str = DEFAULT,
    cross_iteration: CrossIteration = False,
    host_limit: int | str | None = None,
    splitting: Splitting = EXACT,
    rules: Any = None,
    **options: Any,
) -> Plan:
    """Decides what happens to each feature map.

    Args:
        profile: A recorded iteration, or the problem made of it.
        memory_limit: Bytes, or text such as ``'16GiB'`` or ``'60%'`` of the in-core
            peak.
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
        rules: What may happen to feature maps by name, such as
            ``{'*/conv1/*': 'keep', 'LSTM': 'no recompute', 'decoder/*': 'at most
            2GiB'}``; see docs/guide/rules.md. None: the problem's own.
        options: Options of that planner.

    Returns:
        Plan: Checked against the profile and the limit, with the proven bound.

    Raises:
        InfeasibleError: If the planner finds no plan inside the limit.
        UnknownNameError: If there is no such planner.
        OptionError: If the planner has no such option, or not with this value, if a
            problem was made with less ``cross_iteration``, or if the rules name nothing
            or cannot be obeyed.
    """
    chosen = find_planner(planner)
    options = check_options(planner, options)
    problem = _problem_of(profile, cross_iteration, splitting, rules)
    limit_bytes = parse_bytes(
        memory_limit, 'memory_limit', whole_bytes=problem.whole_bytes
    )
    if host_limit is not None:
        host_limit_bytes = parse_bytes(host_limit, 'host_limit', least=0)
        problem = with_host_limit(problem, host_limit_bytes)
    problem = chosen.fit(problem, limit_bytes)
    usable = with_actions(problem, chosen.actions, planner)
    plan = chosen(usable, limit_bytes, **options)
    plan = dataclasses.replace(plan, rules=pairs_of(problem.rules))
    check_obedience(problem.profile, plan)
    check_host(problem, plan)
    proven = plan.lower_bound_seconds
    if not plan.sources:  # of which the bound of the problem knows nothing
        proven = max(proven, lower_bound(problem, limit_bytes).seconds)
    return dataclasses.replace(
        plan,
        planner=planner,
        options={**options, **plan.options},
        parts=problem.parts,
        lower_bound_seconds=proven,
    )


def _problem_of(
    profile: Profile | Problem,
    cross_iteration: CrossIteration,
    splitting: Splitting,
    rules: Any,
) -> Problem:
    if not isinstance(profile, Problem):
        return make_problem(profile, cross_iteration, splitting=splitting, rules=rules)
    if not crossing_of(cross_iteration) <= crossing_of(profile.cross_iteration):
        raise OptionError(
            f'cross_iteration is {cross_iteration!r}, but the problem was made without '
            'it; give it to make_problem.'
        )
    return profile if rules is None else with_rules(profile, rules)


def with_actions(problem: Problem, actions: frozenset[Action], planner: str) -> Problem:
    """The problem for a planner that has these actions only.

    Args:
        problem: Any problem; without rules it stays what it is.
        actions: Of the planner.
        planner: Its name.

    Raises:
        OptionError: If the planner cannot obey the rules.
    """
    if not problem.rules or actions == frozenset(Action):
        return problem
    usable = np.zeros(3, bool)
    usable[[NUMBERS[action] for action in actions]] = True
    allowed = problem.arrays.allowed & usable
    arrays = dataclasses.replace(problem.arrays, allowed=allowed)
    has = ' and '.join(action.value for action in Action if action in actions)
    refusal = f'Planner {planner!r} cannot obey the rules, for all it does is {has}'
    for m in np.flatnonzero(~arrays.allowed.any(axis=1)):
        storage = problem.maps[m]
        says = '; '.join(
            str(r) for r in problem.rules if r.names(storage.label, storage.producer)
        )
        raise OptionError(
            f'{refusal}: {storage.label}, made by operation {storage.producer}, is '
            f"under {says}. Planner 'hybrid' has every action."
        )
    try:
        check_limits(problem.rules, arrays)
    except OptionError as error:
        raise OptionError(f'{refusal}. {error}') from None
    return dataclasses.replace(problem, arrays=arrays, bounds={})


# -- what each rule costs -----------------------------------------------------
def price_rules(
    problem: Problem,
    memory_limit: int | str,
    planner: str,
    seconds: float | None = None,
    **options: Any,
) -> tuple[RuleCost, ...]:
    """What each rule of a problem costs, by one more search for each.

    Args:
        problem: Under its rules.
        memory_limit: As for :func:`.make_plan`.
        planner: Name of the planner.
        seconds: What its plan with all rules takes; None: this is searched, too.
        options: Of the planner.

    Raises:
        InfeasibleError: If there is no plan with all rules.
        OptionError: If the planner cannot obey them.
    """
    if not problem.rules:
        return ()
    if seconds is None:
        seconds = make_plan(problem, memory_limit, planner, **options).predicted_seconds
    return tuple(
        _price(problem, rule, memory_limit, planner, seconds, options)
        for rule in problem.rules
    )


def _price(
    problem: Problem,
    rule: Rule,
    memory_limit: int | str,
    planner: str,
    seconds: float,
    options: dict[str, Any],
) -> RuleCost:
    which = named(rule, problem.maps)
    without = with_rules(problem, tuple(r for r in problem.rules if r is not rule))
    cost = None
    try:
        plan = make_plan(without, memory_limit, planner, **options)
        cost = seconds - plan.predicted_seconds
    except (InfeasibleError, OptionError):  # the search is no worse for a rule more
        pass
    return RuleCost(
        pattern=rule.pattern,
        says=rule.says,
        maps=int(which.sum()),
        nbytes=int(problem.arrays.size[np.flatnonzero(which)].sum()),
        seconds=cost,
        share=cost / seconds if cost and seconds else 0.0,
    )
