"""What rules say about maps that leave without a plan.

As far as memory allows: maps that are to be kept, or not to be swapped, leave when
nothing else is left; maps that are not to be recomputed are copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from chainer_hybridmem.chainer_access import graph
from chainer_hybridmem.execution.live_map import LiveMap
from chainer_hybridmem.records.plan import Action
from chainer_hybridmem.records.rules import Rules

MOST_REMEMBERED = 10_000  # names of functions


class _Wish(NamedTuple):
    """What rules say about the maps of one function.

    Attributes:
        stays (bool): Whether they leave last.
        copied (bool): Whether they are never dropped to be made again.
    """

    stays: bool
    copied: bool


_NOTHING = _Wish(False, False)


class PassiveRules:
    """Knows what rules say about the functions of the running graph.

    Args:
        rules (tuple of Rule): What the user says.

    Attributes:
        active (bool): Whether there are rules to be noted.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = tuple(rule for rule in rules if rule.most_bytes is None)
        self._by_name: dict[tuple[str, int], _Wish] = {}
        self._by_function: graph.ByOwner[_Wish] = graph.ByOwner()
        self.active = bool(self._rules)

    def note(self, function: Any, label: str, operation: int) -> None:
        """A forward function is about to run; without rules nothing is noted.

        Args:
            function: The function.
            label: Its path and name.
            operation: Its number in the iteration.
        """
        if not self.active:
            return
        name = label, operation
        wish = self._by_name.get(name)
        if wish is None:
            if len(self._by_name) >= MOST_REMEMBERED:
                self._by_name.clear()
            wish = self._by_name[name] = self._find_wish(label, operation)
        if wish != _NOTHING:
            self._by_function[function] = wish

    def _find_wish(self, label: str, operation: int) -> _Wish:
        named = [rule for rule in self._rules if rule.names(label, operation)]
        return _Wish(
            any(
                Action.SWAP not in r.actions and Action.KEEP in r.actions for r in named
            ),
            any(Action.RECOMPUTE not in rule.actions for rule in named),
        )

    def _wishes_for(self, live: LiveMap) -> list[_Wish]:
        """What is said about the functions that have made a map."""
        if not self.active:
            return []
        found = []
        for reference in live.slots:
            node = reference.node
            maker = reference.function if node is None else node.creator_node
            wish = None if maker is None else self._by_function.get(maker)
            if wish is not None:
                found.append(wish)
        return found

    def stays(self, live: LiveMap) -> bool:
        """Whether a map leaves only if nothing else can."""
        return any(wish.stays for wish in self._wishes_for(live))

    def is_copied(self, live: LiveMap) -> bool:
        """Whether a map that leaves is copied, not made again."""
        return any(wish.copied for wish in self._wishes_for(live))
