"""Which actions each map may have, and what the kernel checks: rules as flat arrays.

Note: [no choice]
    What Chainer holds when backward begins cannot leave before: the inputs of the first
    backward function. A plan keeps it, drops it after its last use, and no rule is
    about it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import Profile, Storage
from chainer_hybridmem.planning.records.rules import (
    Rule,
    Rules,
    check_names,
    runs_any,
    silent_functions,
)
from chainer_hybridmem.planning.simulation import work
from chainer_hybridmem.planning.simulation.arrays import (
    ProblemArrays,
    find_recomputable,
)
from chainer_hybridmem.planning.simulation.work import KEEP, RECOMPUTE, SWAP
from chainer_hybridmem.units import format_bytes

NUMBERS = {Action.KEEP: KEEP, Action.SWAP: SWAP, Action.RECOMPUTE: RECOMPUTE}
# What stands for an action that a map may not have.
_INSTEAD = np.array([[SWAP, RECOMPUTE], [RECOMPUTE, KEEP], [SWAP, KEEP]])
_KEPT = np.array([action == KEEP for action in range(3)])


def named(rule: Rule, maps: tuple[Storage, ...]) -> np.ndarray:
    """(M,) whether a rule names each map; what crosses iterations has none."""
    return np.array(
        [s.producer >= 0 and rule.names(s.label, s.producer) for s in maps], bool
    )


def with_free_choice(a: ProblemArrays) -> ProblemArrays:
    """The arrays with what maps may do that no rule names."""
    stays = has_no_choice(a)
    allowed = np.ones((len(stays), 3), bool)
    allowed[:, RECOMPUTE] = find_recomputable(a)
    allowed[stays] = _KEPT
    allowed[~a.read, SWAP] = False
    ruled = not (a.read.all() and not stays.any())
    return dataclasses.replace(a, allowed=allowed, ruled=ruled)


def has_no_choice(a: ProblemArrays) -> np.ndarray:
    """(M,) which maps cannot leave before backward begins; see [no choice]."""
    stuck: np.ndarray = (a.release_from > a.first_backward) & a.read
    return stuck


def rule_arrays(
    a: ProblemArrays, profile: Profile, maps: tuple[Storage, ...], rules: Rules
) -> ProblemArrays:
    """The arrays of a problem without rules under these.

    Raises:
        OptionError: If a rule names nothing, or if the rules leave a map nothing.
    """
    check_names(rules, profile)
    silent = silent_functions(rules, profile)
    seconds = a.recipe_seconds.copy()
    for recipe in profile.recipes:
        if runs_any(recipe, silent):
            seconds[recipe.operation] = -1.0
    a = with_free_choice(dataclasses.replace(a, recipe_seconds=seconds))
    allowed = _choice_under(rules, maps, a)
    limits = _limits_of(rules, maps, a.read & ~has_no_choice(a))
    a = dataclasses.replace(a, ruled=True, allowed=allowed, **limits)
    check_limits(rules, a)
    return a


def _choice_under(
    rules: Rules, maps: tuple[Storage, ...], a: ProblemArrays
) -> np.ndarray:
    """(M, 3) which actions the rules leave to each map, of those that it has.

    Raises:
        OptionError: If they leave none to a map.
    """
    allowed: np.ndarray = a.allowed.copy()
    stays = has_no_choice(a)
    for rule in rules:
        about = named(rule, maps) & ~stays & a.read
        for action, number in NUMBERS.items():
            if action not in rule.actions:
                allowed[about, number] = False
    for m in np.flatnonzero(~allowed.any(axis=1)):
        storage = maps[m]
        says = '; '.join(str(r) for r in rules if named(r, (storage,))[0])
        cannot = (
            '' if a.allowed[m, RECOMPUTE] else ', and it cannot be made again exactly'
        )
        raise OptionError(
            f'The rules leave nothing to do with {storage.label} ({storage.nbytes} '
            f'bytes, made by operation {storage.producer}){cannot}: {says}.'
        )
    return allowed


def _limits_of(
    rules: Rules, maps: tuple[Storage, ...], chosen: np.ndarray
) -> dict[str, Any]:
    """The groups of all rules that limit what is kept, of what has a choice."""
    members = [
        np.flatnonzero(named(r, maps) & chosen)
        for r in rules
        if r.most_bytes is not None
    ]
    most = [r.most_bytes for r in rules if r.most_bytes is not None]
    return {
        'kept_pointers': np.cumsum([0, *map(len, members)]).astype(np.int64),
        'kept_members': np.concatenate([np.zeros(0, np.int64), *members]),
        'kept_most': np.array(most, np.int64),
    }


def check_limits(rules: Rules, a: ProblemArrays) -> None:
    """Checks that what has to be kept is within every limit.

    Raises:
        OptionError: With the bytes of both.
    """
    limited = [rule for rule in rules if rule.most_bytes is not None]
    stuck = ~(a.allowed[:, SWAP] | a.allowed[:, RECOMPUTE])
    for g, rule in enumerate(limited):
        group = a.kept_members[a.kept_pointers[g] : a.kept_pointers[g + 1]]
        needed = int(a.size[group][stuck[group]].sum())
        if rule.most_bytes is not None and needed > rule.most_bytes:
            raise OptionError(
                f'Rule {str(rule)!r} cannot hold: {format_bytes(needed)} ({needed} '
                'bytes) of what it names can only be kept.'
            )


def keeps_everything(a: ProblemArrays) -> bool:
    """Whether the rules allow what plain Chainer does."""
    if not a.ruled:
        return True
    in_python: Any = getattr(breaks_rules, 'py_func', breaks_rules)  # it is inlined
    return not in_python(a, np.full(len(a.allowed), KEEP, np.int64))


def obeyed(a: ProblemArrays, action: np.ndarray) -> np.ndarray:
    """The assignment, changed where the rules do not allow it.

    Maps whose action is forbidden leave in another way, or stay if they may not leave.
    Of a group that keeps too much, what forward makes first leaves.
    """
    if not a.ruled:
        return action
    maps = np.arange(len(action))
    allowed = a.allowed[maps, np.minimum(action, RECOMPUTE)]
    if allowed.all() and not len(a.kept_most):
        return action
    result: np.ndarray = action.copy()
    for choice in _INSTEAD.T:
        forbidden = ~a.allowed[maps, np.minimum(result, RECOMPUTE)]
        result[forbidden] = choice[np.minimum(action[forbidden], RECOMPUTE)]
    for g, most_bytes in enumerate(a.kept_most.tolist()):
        group = a.kept_members[a.kept_pointers[g] : a.kept_pointers[g + 1]]
        kept = group[result[group] == KEEP]
        excess = int(a.size[kept].sum()) - most_bytes
        for m in kept[np.argsort(a.producer[kept], kind='stable')].tolist():
            if excess <= 0:
                break
            if a.allowed[m, SWAP] or a.allowed[m, RECOMPUTE]:
                result[m] = SWAP if a.allowed[m, SWAP] else RECOMPUTE
                excess -= int(a.size[m])
    return result


@compiled(inline=True, counted=False, uses=(work,))
def breaks_rules(a: ProblemArrays, action: np.ndarray) -> bool:
    """Whether an assignment breaks a rule."""
    for m in range(len(action)):
        if not a.allowed[m, min(action[m], RECOMPUTE)]:
            return True
    for g in range(len(a.kept_most)):
        kept = 0
        for i in range(a.kept_pointers[g], a.kept_pointers[g + 1]):
            m = a.kept_members[i]
            if action[m] == KEEP:
                kept += a.size[m]
        if kept > a.kept_most[g]:
            return True
    return False
