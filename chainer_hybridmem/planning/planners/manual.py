"""What the user says, in the manner of GeePS (Cui et al. 2016).

A mapping from names to actions. A name is a pattern (``*``, ``?``, ``[...]``) for the
label of a feature map: the path of its link and the function that makes it, such as
``/blocks/1/convs/0/Convolution2DFunction``, or for one of several with the same label,
with ``@`` and the number of the operation that makes it: ``/ReLU@5``. Of several
patterns for the same map the last one counts, so that exceptions come after the rule.
What no pattern names is kept.
Swap-ins start as early as memory allows.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

import numpy as np

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import KEEP, NUMBERS, Search
from chainer_hybridmem.planning.simulation.obedience import has_no_choice
from chainer_hybridmem.planning.simulation.problem import Problem


def manual(
    problem: Problem, limit_bytes: int, actions: Mapping[str, str] | None = None
) -> Plan:
    """Does with each feature map what a mapping says.

    Args:
        problem: What to plan.
        limit_bytes: Memory limit.
        actions: ``'keep'``, ``'swap'`` or ``'recompute'`` by pattern. None keeps
            everything.

    Raises:
        InfeasibleError: If that does not fit.
        OptionError: If a pattern names nothing, an action is none, or a map that
            cannot be made again is to be recomputed.
    """
    chosen = check_actions(actions)
    search = Search(problem, limit_bytes, barrier=False)
    action, decided = search.fill(KEEP), np.zeros(len(problem.maps), bool)
    for pattern, what in chosen.items():
        named = _named(problem, pattern)
        if what is Action.RECOMPUTE:
            _check_recomputable(problem, pattern, named)
        action[named] = NUMBERS[what]
        decided |= named
    obeyed = search.obeyed(action)
    for m in np.flatnonzero(decided & (obeyed != action)):
        storage = problem.maps[m]
        raise OptionError(
            f"Planner 'manual' cannot obey the rules and do with {storage.label}, made "
            f'by operation {storage.producer}, what its actions say; change one of '
            'them.'
        )
    options = {'actions': {name: what.value for name, what in chosen.items()}}
    return search.finish('manual', search.evaluate(action), **options)


class Actions:
    """The option of planner ``manual``."""

    def check(self, name: str, value: Any) -> dict[str, str]:
        return {pattern: what.value for pattern, what in check_actions(value).items()}


def check_actions(actions: Any) -> dict[str, Action]:
    """The mapping with actions for their names; None is an empty one.

    Raises:
        OptionError: If it is no mapping, or an action has no such name.
    """
    if actions is None:
        return {}
    if not isinstance(actions, Mapping):
        raise OptionError(
            f'actions is {actions!r}; a mapping from patterns to actions is needed, '
            f"such as {{'*Convolution2DFunction': 'swap'}}."
        )
    known = [action.value for action in Action]
    result: dict[str, Action] = {}
    for pattern, name in actions.items():
        if name not in known:
            raise OptionError(
                f'The action for {pattern!r} is {name!r}; one of {", ".join(known)} '
                f'is needed.'
            )
        result[str(pattern)] = Action(name)
    return result


def _named(problem: Problem, pattern: str) -> np.ndarray:
    """(M,) whether the pattern names each map, of those that it can decide about."""
    labels = [storage.label for storage in problem.maps]
    named = [
        fnmatch.fnmatchcase(storage.label, pattern)
        or fnmatch.fnmatchcase(f'{storage.label}@{storage.producer}', pattern)
        for storage in problem.maps
    ]
    if labels and not any(named):
        close = difflib.get_close_matches(pattern, sorted(set(labels)), 3, 0.3)
        hint = f' Some there are: {", ".join(close)}.' if close else ''
        raise OptionError(
            f'No feature map of {len(labels)} is called {pattern!r}.{hint} '
            f'`hybridmem plan PROFILE --memory-limit 100% --maps` lists all.'
        )
    decided: np.ndarray = np.array(named, bool) & ~has_no_choice(problem.arrays)
    return decided


def _check_recomputable(problem: Problem, pattern: str, named: np.ndarray) -> None:
    for m in np.flatnonzero(named & ~problem.recomputable):
        storage = problem.maps[m]
        forbidden = ', or a rule forbids it' if problem.rules else ''
        raise OptionError(
            f'{pattern!r} is to be recomputed, but {storage.label} ({storage.nbytes} '
            f'bytes) cannot be made again exactly{forbidden}; swap or keep it.'
        )


PLANNERS = (
    Planner(
        'manual',
        manual,
        source='in the manner of GeePS, Cui et al. 2016',
        options={'actions': Actions()},
        acts_always=True,
        needs_options=True,
    ),
)
