"""What crosses iterations: parameters and states that may leave in between."""

from __future__ import annotations

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.records.profile import PERSISTENT, Category, Profile

CrossIteration = bool | str
STATES, ALL = 'states', 'all'
CROSSINGS: dict[CrossIteration, frozenset[Category]] = {
    False: frozenset(),
    STATES: frozenset({Category.OPTIMIZER_STATE}),
    ALL: PERSISTENT,
    True: PERSISTENT,
}


def crossing_of(cross_iteration: CrossIteration) -> frozenset[Category]:
    """What may leave between its uses of two iterations.

    Args:
        cross_iteration: ``'states'`` for optimizer states, ``'all'`` or True for
            parameters as well, False for nothing.

    Raises:
        OptionError: If it is something else.
    """
    if isinstance(cross_iteration, bool | str) and cross_iteration in CROSSINGS:
        return CROSSINGS[cross_iteration]
    raise OptionError(
        f'cross_iteration is {cross_iteration!r}; False, True, {STATES!r} or {ALL!r} '
        'is needed.'
    )


def decided_by(profile: Profile, plan: Plan) -> CrossIteration:
    """What crosses iterations under a plan, as ``make_problem`` wants it."""
    kinds = {
        profile.storages[entry.storage].category
        for entry in plan.maps
        if 0 <= entry.storage < len(profile.storages)
    }
    if Category.PARAMETER in kinds:
        return ALL
    return STATES if Category.OPTIMIZER_STATE in kinds else False
