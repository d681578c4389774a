"""Whether a plan obeys the rules that it names: read from the plan alone."""

from __future__ import annotations

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.records.plan import Action, Plan
from chainer_hybridmem.records.profile import Profile
from chainer_hybridmem.records.rules import (
    NO_RECOMPUTE,
    check_rules,
    named_maps,
    runs_any,
    silent_functions,
)


def check_obedience(profile: Profile, plan: Plan) -> None:
    """Checks that a plan obeys the rules that it names.

    Raises:
        PlanError: Naming the rule and the feature map.
    """
    if not plan.rules:
        return
    recipes = {recipe.operation: recipe for recipe in profile.recipes}
    rules = check_rules(plan.rules)
    silent = silent_functions(rules, profile)
    for replay in plan.replays:
        if runs_any(recipes[replay.operation], silent):
            label = profile.operations[replay.operation].label
            raise PlanError(
                f'Operation {replay.operation} ({label}) is replayed before operation '
                f'{replay.before}, but a rule says {NO_RECOMPUTE!r} about it.'
            )
    for rule in rules:
        kept_bytes = 0
        for entry in named_maps(rule, profile, plan.maps):
            storage = profile.storages[entry.storage]
            if entry.action not in rule.actions:
                raise PlanError(
                    f'Feature map {entry.storage} ({storage.label}) has action '
                    f'{entry.action.value!r}, but a rule forbids it: {rule}.'
                )
            kept_bytes += storage.nbytes if entry.action is Action.KEEP else 0
        if rule.most_bytes is not None and kept_bytes > rule.most_bytes:
            raise PlanError(
                f'The plan keeps {kept_bytes} bytes where a rule allows '
                f'{rule.most_bytes}: {rule}.'
            )
