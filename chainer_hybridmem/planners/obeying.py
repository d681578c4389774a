"""Which planners can obey which rules: those that have an action for every map."""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.records.plan import Action
from chainer_hybridmem.simulation.obedience import NUMBERS, check_limits
from chainer_hybridmem.simulation.problem import Problem, with_choice


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
    arrays = problem.arrays._replace(allowed=problem.arrays.allowed & usable)
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
    return with_choice(problem, arrays)
