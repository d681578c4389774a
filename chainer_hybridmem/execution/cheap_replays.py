"""Drops beside a plan what the host has no room for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from chainer_hybridmem.chainer_access import owners
from chainer_hybridmem.execution.live_map import LiveMap, State
from chainer_hybridmem.execution.live_maps import LiveMaps
from chainer_hybridmem.execution.replayer import Restorer


class CheapReplays:
    """Knows which maps are dropped and made again although no plan says so.

    Args:
        maps (LiveMaps): Every feature map.
        restorer (Restorer): Makes maps again.
    """

    def __init__(self, maps: LiveMaps, restorer: Restorer) -> None:
        self._maps = maps
        self._restorer = restorer
        self._rules: dict[int, Any] = {}  # update rules with our hook
        self._dropped: weakref.WeakSet[LiveMap] = weakref.WeakSet()
        self._depend = False  # some of them are made of parameters

    def _chain(
        self, live: LiveMap, maker: Any
    ) -> Iterator[tuple[Any, list[Any] | None]]:
        """Yields every function that a replay runs, and the nodes that each reads.

        Args:
            live: What the replay makes.
            maker: The last function, which comes first.
        """
        functions = [maker]
        for function in functions:  # grows
            sources = self._restorer.find_sources(function)
            yield function, sources
            for node in sources or ():
                creator = node.creator_node
                if creator is None or any(creator is other for other in functions):
                    continue
                if not self._has(node, live):
                    functions.append(creator)

    def _has(self, node: Any, leaving: LiveMap) -> bool:
        """Whether a node's array is there, or comes back by a copy.

        An array that is no map may become one, and leave, before the replay.
        """
        live = self._maps.find_of_node(node)
        return live is not None and live is not leaving and live.state is not State.GONE

    def can_make(self, live: LiveMap) -> bool:
        """Whether a map can be made again when a backward is expected to read it.

        Before parameters that it is made of change, it comes back.

        Args:
            live: It is to be dropped, because the host has no room.
        """
        maker, parameters = self._restorer.find_maker(live), []
        if maker is None:
            return False
        for _, sources in self._chain(live, maker):
            if sources is None:
                return False
            for node in sources:
                if owners.is_parameter(node):
                    parameters.append(node.get_variable_or_none())
        self._note_dropped(live, parameters)
        return True

    def is_needless(self, live: LiveMap) -> bool:
        """Whether no known backward needs a map, nor what is made again of it."""
        return not live.is_awaited and not self._is_source(live, self._maps)

    def needs(self, live: LiveMap) -> bool:
        """Whether what has been dropped here is made again of a map."""
        return self._is_source(live, self._dropped)

    def _is_source(self, live: LiveMap, others: Iterable[LiveMap]) -> bool:
        return any(
            other.state is State.GONE
            and other.is_awaited
            and other.slots.are_alive()
            and self._is_made_of(other, live)
            for other in others
        )

    def _is_made_of(self, gone: LiveMap, live: LiveMap) -> bool:
        maker = self._restorer.find_maker(gone)
        return maker is not None and any(
            self._maps.find_of_node(node) is live
            for _, sources in self._chain(gone, maker)
            for node in sources or ()
        )

    # -- before an update -----------------------------------------------------
    def _note_dropped(self, live: LiveMap, parameters: list[Any]) -> None:
        """A map is about to be dropped, which is made of parameters and maps."""
        self._dropped.add(live)
        for parameter in parameters:
            self._depend = True
            rule = parameter.update_rule
            if rule is not None and id(rule) not in self._rules:
                owners.call_before_update(rule, weakref.WeakMethod(self.settle))
                self._rules[id(rule)] = rule

    def settle(self) -> None:
        """Makes again what has been dropped here and is still to be read.

        Parameters are about to change.
        """
        if not self._depend:
            return
        self._depend = False
        dropped, self._dropped = self._dropped, weakref.WeakSet()
        for live in list(self._maps):  # in their order
            if live not in dropped or live.state is not State.GONE:
                continue
            if live.is_awaited and live.slots.are_alive():
                live.outlive()
                self._restorer.make_before_update(live)

    def close(self) -> None:
        """Watches no update any more."""
        for rule in self._rules.values():
            owners.stop_calling_before_update(rule)
        self._rules.clear()
