"""How functions of the running graph can be run again.

Note: [iterations that change]
    Recipes stay known with the function they belong to: what a plan has dropped is
    made again as that plan would, also after an iteration has left it. An iteration may
    go on with another plan: functions that have run follow the recipes of that one.

Note: [later iterations]
    A second backward may come over a graph after an update (the two losses of a GAN).
    What has been dropped cannot be made again then, for parameters are others. Once a
    backward over an older graph has been seen, what it asks for is copied out instead
    of dropped. So is what functions read that a backward function has called, from the
    start. After updates the iteration is planned without recomputation. A function
    whose parameters have been updated since is never run again.

Note: [written meanwhile]
    The program may write into an array after a function has read it, and plain
    Chainer's backward reads what that function has made of it. So the recorded trial
    compares what functions have read once more when a map leaves or backward begins:
    nothing is recomputed from what has changed. In later iterations every map that a
    replay makes again is compared with what was dropped (fingerprints, [checked
    replays]). A function that did not draw random numbers when it was recorded may do
    so later: what it makes then is copied out instead of dropped. A replay runs under
    Chainer's configuration of its forward.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Collection, Hashable
from typing import Any

from chainer_hybridmem.chainer_access import graph, owners
from chainer_hybridmem.devices.protocol import Array, Device
from chainer_hybridmem.execution.functions import LiveFunction
from chainer_hybridmem.execution.live_maps import LiveMaps
from chainer_hybridmem.execution.table import ActionTable
from chainer_hybridmem.recompute import drawing, dropout_states, trust
from chainer_hybridmem.records.profile import Recipe, SlotKind


class Recipes:
    """Keeps what replays need from each function that runs.

    Args:
        device (Device): Where the feature maps are.
        maps (LiveMaps): Knows the functions, and what never leaves.
        may_drop (bool): Whether maps may be dropped and made again without a plan.

    Attributes:
        prepares (bool): Whether functions of this iteration may be run again.
    """

    def __init__(self, device: Device, maps: LiveMaps, may_drop: bool) -> None:
        self._device = device
        self._maps = maps
        self._may_drop = may_drop
        self._may_switch = False
        self._on_gpu = device.kind == 'cuda'
        if self._on_gpu:
            dropout_states.watch()
        self._table: ActionTable | None = None
        self._replayed: Collection[int] | None = None  # operations; None: any
        self._running: dict[int, LiveFunction] = {}  # by number, of this iteration
        self._drawn: Hashable = None  # see drawing.position, before a forward
        self._leaves: weakref.WeakKeyDictionary[Any, Array] = (
            weakref.WeakKeyDictionary()
        )  # what replays read in place of arrays that change, by node
        self.prepares = False

    # -- iterations -----------------------------------------------------------
    def begin(self, table: ActionTable | None, may_switch: bool) -> None:
        """Starts an iteration.

        Args:
            table: The plan; None if there is none.
            may_switch: Whether the iteration may go on with another plan.
        """
        self._may_switch = may_switch
        self._running = {}
        self._follow(table)

    def switch(self, table: ActionTable) -> None:
        """Goes on with another plan; see [iterations that change]."""
        self._follow(table)
        for number, known in self._running.items():
            function = known()
            if function is not None:
                self._look_up(number, function, known)

    def end(self) -> None:
        """No plan is followed from here on."""
        self._follow(None)

    def _follow(self, table: ActionTable | None) -> None:
        self._table = table
        always = self._may_drop or self._may_switch
        self._replayed = None if table is None or always else table.replayed
        # Replays run functions that no plan names, if these make only views.
        self.prepares = table is not None and (
            self._may_switch
            or (not table.passive and (self._may_drop or bool(table.replayed)))
        )

    # -- while forward runs ---------------------------------------------------
    def prepare(self, k: int, function: Any) -> None:
        """Before forward operation k: keeps the function as it is, with its recipe."""
        known = self._maps.functions.know(function)
        known.keep_pristine(graph.pristine(function))
        self._look_up(k, function, known)

    def _look_up(self, k: int, function: Any, known: LiveFunction) -> None:
        assert self._table is not None
        recipe = self._table.recipes.get(k)
        if recipe is not None:
            if not trust.is_trusted(function):  # it was when the plan was made
                known.note_drawn()
            covered = [self._running.get(other) for other in recipe.covers[:-1]]
            known.follow(recipe, covered)
            known.forget_drawing_recipe()

    def prepare_without_plan(self, function: Any, recipe: Recipe) -> None:
        """Before a forward function: keeps it as it is, with a recipe of its own."""
        known = self._maps.functions.know(function)
        known.keep_pristine(graph.pristine(function))
        known.follow(recipe, ())
        self.start_drawing()

    def start_drawing(self) -> None:
        """The forward begins: what is drawn from here on, it draws."""
        self._drawn = drawing.position(self._on_gpu)

    def forget_drawing(self) -> None:
        """It does not matter what the forward to come draws."""
        self._drawn = None

    def finish_drawing(self, function: Any) -> None:
        """The forward has computed; see [written meanwhile]."""
        drawn, self._drawn = self._drawn, None
        if drawn is not None and drawing.position(self._on_gpu) != drawn:
            self._maps.functions.know(function).note_drawn()

    def guard_replay(self) -> contextlib.AbstractContextManager[Any]:
        """Around a replay: cuDNN's generators and their ratios stay as they are."""
        return dropout_states.set_back() if self._on_gpu else contextlib.nullcontext()

    def note_run(self, k: int, known: LiveFunction) -> None:
        """A function is operation k of this iteration."""
        self._running[k] = known

    def keep_leaves(self, k: int, function: Any) -> None:
        """Copies running statistics that the next forward changes.

        Args:
            k: Number of the operation; nothing is copied if no replay runs it.
            function: The function.
        """
        if not self.may_replay(k):
            return
        for node in function.inputs:
            array = graph.node_array(node) if node.creator_node is None else None
            if array is None or owners.is_parameter(node):
                continue
            if self._device.arrays.allocation_id(array) in self._maps.permanent:
                # The device does not count the session's own copies.
                self._leaves[node] = contextvars.Context().run(array.copy)

    # -- questions ------------------------------------------------------------
    def may_replay(self, k: int) -> bool:
        """Whether forward operation k of this iteration may be run again."""
        return self.prepares and (self._replayed is None or k in self._replayed)

    @property
    def all_dead(self) -> bool:
        """Whether no function of the iteration is in a graph any more."""
        return all(known() is None for known in self._running.values())

    def find_running(self, operation: int) -> LiveFunction | None:
        """The function of this iteration with a number."""
        return self._running.get(operation)

    def find_leaf(self, node: Any) -> Array | None:
        """What replays read in place of a node's array."""
        return self._leaves.get(node)

    def find_maker(self, reference: graph.SlotRef) -> Any:
        """The function that makes an array again exactly, if there is one."""
        node = reference.node
        function = reference.function if node is None else node.creator_node
        known = self._maps.functions.find(function)
        recipe = None if known is None else known.recipe
        if known is None or recipe is None or not recipe.exact:
            return None
        if known.pristine is None:  # no plan was followed then
            return None
        # A replay begins with some attributes, as with the mask of a dropout.
        given = reference.slot.kind is SlotKind.ATTRIBUTE
        return None if given and reference.slot.key in recipe.attributes else function
