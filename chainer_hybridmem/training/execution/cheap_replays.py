"""Swap or recompute without a plan: what is cheaper for one map that leaves.

Note: [recomputing without a plan]
    A map that leaves in passive mode is dropped where making it again takes less time
    than copying it out and in. The functions that make it have been tried in this
    session: their replays give the same bits, and take so many seconds per byte. What
    an iteration does that has never been recorded is not known. So a replay begins
    only with what the program cannot change meanwhile: maps that the graph alone has,
    and parameters. Before these are updated, what is made of them comes back. What
    differs all the same is an error (fingerprints, [checked replays]). What backward
    has read already goes without a copy where a replay can make it again of maps alone.
    Capuchin's passive mode (Peng et al. 2020, section 4.2) swaps whatever it evicts;
    Dynamic Tensor Rematerialization (Kirisame et al. 2021) recomputes it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from chainer_hybridmem.training.chainer_access import owners
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.execution.live_maps import LiveMaps
from chainer_hybridmem.training.execution.replayer import Restorer

MostSeconds = Callable[[int], float]  # that replays may take for so many bytes
LARGEST_SHARE = 1 / 4  # of the limit that one chain of replays may take


class CheapReplays:
    """Knows which maps are dropped and made again although no plan says so.

    Args:
        device (Device): Has the memory.
        maps (LiveMaps): Every feature map.
        restorer (Restorer): Makes maps again.

    Attributes:
        most_seconds (callable or None): Seconds that replays may take instead of
            copying so many bytes; None as long as nothing may be dropped.
    """

    def __init__(self, device: Device, maps: LiveMaps, restorer: Restorer) -> None:
        self._device = device
        self._maps = maps
        self._restorer = restorer
        self._untrusted: list[weakref.ref[Any]] = []  # functions
        self._touched: weakref.WeakSet[Any] = weakref.WeakSet()  # nodes they read
        self._rules: dict[int, Any] = {}  # update rules with our hook
        self._dropped: weakref.WeakSet[LiveMap] = weakref.WeakSet()
        self._depend = False  # some of them are made of parameters
        self.most_seconds: MostSeconds | None = None

    def choose(self, most_seconds: MostSeconds | None) -> None:
        """Starts an iteration, in which maps may be dropped, or none."""
        self.most_seconds = most_seconds
        self._untrusted = [one for one in self._untrusted if one() is not None]

    def note_untrusted(self, function: Any) -> None:
        """A function that is about to run may write into what it reads."""
        self._untrusted.append(weakref.ref(function))

    def _find_touched(self) -> weakref.WeakSet[Any]:
        """Nodes of which functions of the program have read the arrays."""
        untrusted, self._untrusted = self._untrusted, []
        for reference in untrusted:
            function = reference()
            if function is not None and function.inputs is not None:
                self._touched.update(function.inputs)
        return self._touched

    # -- one map --------------------------------------------------------------
    def is_cheaper(self, live: LiveMap) -> bool:
        """Whether a map costs less to make again than to copy out and in."""
        if (
            self.most_seconds is None
            or live.state is not State.RESIDENT
            or live.host.valid
            or live.outlives
        ):
            return False
        function = self._restorer.find_maker(live)
        if function is None or live.held_by_program or not live.slots.is_exclusive():
            return False
        # What backward has read already comes back for a second backward only.
        most_seconds = self.most_seconds(live.nbytes) if live.uses else math.inf
        parameters = self._walk(live, function, most_seconds)
        if parameters is None or (parameters and not live.uses):
            return False  # for they will be others then
        self._note_dropped(live, parameters)
        return True

    def _walk(
        self, live: LiveMap, function: Any, most_seconds: float
    ) -> list[Any] | None:
        """Looks at every function that a chain of replays would run.

        Args:
            live: What it makes.
            function: The last one.
            most_seconds: It may take.

        Returns:
            list of Parameter: What it reads beside maps; None if it takes longer, or
            something could change what it reads.
        """
        touched, seconds, peak_bytes = self._find_touched(), 0.0, 0
        most_bytes = self._device.memory.limit_bytes * LARGEST_SHARE
        parameters = []
        for index, (other, sources) in enumerate(self._chain(live, function)):
            known = self._maps.functions.find(other)
            if sources is None or known is None or known.recipe is None or known.drew:
                return None
            recipe = known.recipe
            seconds += recipe.seconds
            peak_bytes = max(peak_bytes, recipe.peak_bytes)
            taken_bytes = peak_bytes + index * live.nbytes
            if seconds >= most_seconds or taken_bytes > most_bytes:
                return None
            if recipe.covers or recipe.attributes:
                return None
            for node in sources:
                if owners.is_parameter(node):
                    parameters.append(node.get_variable_or_none())
                elif (
                    node.creator_node is None
                    or node in touched
                    or node.get_variable_or_none() is not None
                ):
                    return None
        return parameters

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

    # -- without room on the host ---------------------------------------------
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
        self.most_seconds = None
