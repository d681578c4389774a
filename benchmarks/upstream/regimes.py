"""Every feature map leaves, whatever the program: what Chainer's tests are run under.

There is no profile here and no plan: a hook drives the executor as a session does,
and says after each operation what becomes of the maps that it has left in the
graph. Recipes come from the package's own trial replays. Freed memory is filled
with NaN, so that whoever reads what has left finds out.
"""

from __future__ import annotations

import collections
import pathlib
import random
import sys
import weakref
from typing import Any

import chainer

from chainer_hybridmem.planning.records.plan import Replay
from chainer_hybridmem.planning.records.profile import Recipe, Slot, SlotKind
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.devices.cuda.device import CudaDevice
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.execution import Executor
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.execution.table import ActionTable
from chainer_hybridmem.training.execution.verifier import Followed, Verifier
from chainer_hybridmem.training.recompute import fused_replays, trust
from chainer_hybridmem.training.recording import trials
from chainer_hybridmem.training.recording.trials import Walker, try_fused, try_replay

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / 'tests'))

from support.hostile import poisoned_blocks
from support.native_faults import NativeFaults

__all__ = ['REGIMES', 'Regime', 'install', 'open_device', 'poisoned_blocks']

LIMIT_BYTES = 2**40  # nothing is refused: the regime says what leaves
GPU_BYTES = 2**32  # as little as nothing refuses
REGIMES = ('swap', 'recompute', 'random')


def open_device(kind: str) -> Device:
    """The device that counts what the tests allocate.

    Args:
        kind: ``'host'`` or ``'cuda'``.
    """
    trials.TIMED_RUNS = 1  # nobody looks at the times of trial replays
    return CudaDevice(GPU_BYTES) if kind == 'cuda' else HostDevice(LIMIT_BYTES)


def install(device: Device) -> None:
    """Counts allocations from here on, and poisons what is freed on the host."""
    device.memory.install(lambda missing_bytes: None)
    if isinstance(device, HostDevice):
        NativeFaults(device.memory).poison_freed()


class _Numbers(dict[Slot, int]):
    """A new storage id whenever the executor asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0

    def get(self, slot: Any, default: Any = None) -> int:
        self.last += 1
        return self.last


class _All(set[int]):
    """Any operation: which ones is not known in advance."""

    def __contains__(self, operation: object) -> bool:
        return True


class _Iteration:
    """What functions of one iteration have in common, as their origin."""


class _Running:
    """A forward operation between its two hooks."""

    def __init__(self, k: int, function: Any, newest: int, names: set[str]) -> None:
        self.k = k
        self.function = weakref.ref(function)
        self.newest = newest  # allocation before it
        self.names = names  # of attribute arrays before it
        self.inputs: tuple[Any, ...] | None = None


class Regime(chainer.FunctionHook):
    """Makes the feature maps of one test leave and come back.

    Args:
        device: From :func:`open_device`.
        regime: One of :data:`REGIMES`.
        seed: What the random plan is drawn from.

    Attributes:
        counts: Maps swapped, dropped and kept, replays and trials.
    """

    name = 'hybridmem-upstream'

    def __init__(self, device: Device, regime: str, seed: str) -> None:
        self.device = device
        self.counts: collections.Counter[str] = collections.Counter()
        self._regime = regime
        self._chance = random.Random(seed)
        self._walker = Walker(device, timed=True)
        self._executor = Executor(device, minimum_map_bytes=1)
        self._verifier: Verifier | None = None
        self._table = self._new_table()
        self._position = 0
        self._last: _Running | None = None
        self._in_backward = self._backward_seen = False
        self._actions: dict[int, str] = {}  # by allocation
        self._makers: dict[int, tuple[Any, Slot]] = {}  # by allocation
        self._positions: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )
        self._held: list[Any] = []  # leaves that replays begin with

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        counters = self._executor.counters
        self.counts['replays'] += counters.replays
        self._follow()
        self._executor.close()
        self._executor.abandon()

    def _follow(self) -> None:
        """Every bit that backward reads is compared, as `verify=True` does."""
        if self._verifier is not None:
            self.counts['verified'] += self._verifier.verdict.maps
        self._executor.observers.discard(self._verifier)
        self._verifier = Verifier(chainer.Chain(), lambda: Followed(None, None))
        self._executor.observers.add(self._verifier)

    def _new_table(self) -> ActionTable:
        def lists() -> Any:
            return collections.defaultdict(list)

        return ActionTable(
            swap_outs=lists(), releases=lists(), drops=lists(), for_good=set(),
            unique=set(), unique_bytes=0,
            swap_ins=lists(), needs=lists(), replays=lists(), replayed=_All({-1}),
            busy=_All({-1}), swapped=set(), storage_of=_Numbers(), recipes={},
            crossing={}, update=-1, acting=_All({-1}), tiers={},
            growth_bytes=1 << 60,  # nothing of older graphs stays
        )  # fmt: skip

    # -- hooks, as in a session -----------------------------------------------
    def forward_preprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """Completes the operation before, then acts."""
        if not chainer.config.enable_backprop:
            self._executor.restore_maps(function)
            return
        self._complete_last()
        if self._in_backward:
            self._last = _Running(-1, function, 0, set())
            return
        if self._backward_seen or not self._position:
            self.counts['replays'] += self._executor.counters.replays
            self._table = self._new_table()
            self._executor.ledger.begin(_Iteration())
            self._executor.begin(self._table, {})
            self._follow()
            self._position, self._backward_seen = 0, False
        k = self._position
        self._position += 1
        self._executor.before_forward(k, function)
        owns = self.device.arrays.owns
        names = {name for name, _ in graph.attribute_arrays(function, owns)}
        memory: Any = self.device.memory
        newest = memory.ident_of(memory.allocate(1))
        self._last = _Running(k, function, newest, names)
        self._positions[function] = k

    def forward_postprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """Holds the inputs for a trial replay."""
        last = self._last
        if last is None or last.k < 0 or last.function() is not function:
            return
        if self._regime != 'swap':
            last.inputs = in_data

    def backward_preprocess(
        self, function: Any, in_data: tuple[Any, ...], out_grad: tuple[Any, ...]
    ) -> None:
        """Brings back what backward reads."""
        self._complete_last()
        self._in_backward = self._backward_seen = True
        k = self._position
        self._position += 1
        if self._regime != 'random' or self._chance.random() < 0.5:
            self._plan_return(k, function)
        self._executor.before_backward(k, function)
        # Only what this iteration's plan knows may leave again: it has storages.
        for live in self._executor.maps.find(function):
            if live.storage >= 0 and live.allocation in self._actions:
                self._leave(live, k + 1)

    def backward_postprocess(
        self, function: Any, in_data: tuple[Any, ...], out_grad: tuple[Any, ...]
    ) -> None:
        """Everything that has been read leaves again."""
        self._complete_last()
        self._executor.after_backward(self._position - 1, function)
        self._in_backward = False

    # -- what leaves ----------------------------------------------------------
    def _complete_last(self) -> None:
        last, self._last = self._last, None
        function = last.function() if last is not None else None
        if last is None or function is None:
            return
        self._executor.complete(last.k, function)
        if last.k < 0:
            self._evict_passive(function)
            return
        if last.inputs is not None:
            self._try(last, function)
        for live in self._executor.maps.find(function):
            self._actions.setdefault(live.allocation, self._draw(live))
            # What a caller holds is not dropped: arguments are let go of one later.
            dropped = self._actions[live.allocation] == 'recompute'
            held = dropped and not live.is_alone()
            self._leave(live, self._position + held)

    def _evict_passive(self, function: Any) -> None:
        """What no plan knows leaves as it does when memory is short."""
        for live in self._executor.maps.find(function):
            if live.storage < 0 and live not in self._executor.evictor.busy:
                self._executor.evictor.evict(live)
                self.counts['evict'] += 1

    def _draw(self, live: LiveMap) -> str:
        regime = self._regime
        if regime == 'random':
            regime = self._chance.choice(('swap', 'recompute', 'evict', 'keep'))
        if regime == 'recompute' and not self._may_drop(live):
            regime = 'swap'
        self.counts[regime] += 1
        return regime

    def _leave(self, live: LiveMap, k: int) -> None:
        """Writes down that a map leaves before operation k."""
        action, table = self._actions[live.allocation], self._table
        if action == 'recompute':
            table.drops[k].append(live.storage)
        elif action == 'swap':
            table.swap_outs[k].append(live.storage)
            table.releases[k].append(live.storage)
            table.drops[k].append(live.storage)  # what after_backward looks at
        elif action == 'evict' and not self._in_backward:
            self._executor.evictor.evict(live)

    # -- recipes --------------------------------------------------------------
    def _try(self, last: _Running, function: Any) -> None:
        """Finds out how a function's products can be made again."""
        assert last.inputs is not None
        if not trust.may_replay(function):
            self.counts['untrusted'] += 1
            return
        device, executor = self.device, self._executor
        owns, identify = device.arrays.owns, device.arrays.allocation_id
        arrays = dict(zip(function.inputs, last.inputs, strict=True))
        made = {
            name: array
            for name, array in graph.attribute_arrays(function, owns)
            if name not in last.names
        }
        self.counts['trials'] += 1
        covered: list[Any] = []
        verdict = None
        if fused_replays.find_candidates(function):
            functions = fused_replays.find_candidates(function)[-1]

            def fetch(node: Any) -> Any:
                array = arrays.get(node)
                array = graph.node_array(node) if array is None else array
                if array is None:
                    raise fused_replays.NoFusedReplayError('an input has left')
                return array

            if all(f in self._positions for f in functions):
                verdict = try_fused(functions, fetch, device, self._walker)
                covered = list(functions)
        if verdict is None or not verdict.exact:
            before, covered = executor.functions.know(function).pristine, []
            verdict = try_replay(
                before, function, last.inputs, made, device, self._walker
            )
        if verdict is None or not verdict.exact:
            return
        covers = tuple(sorted(self._positions[f] for f in covered))
        recipe = Recipe(
            last.k, (), (), (), verdict.attributes, 0.0, 0, True, covers,
            verdict.formula,
        )  # fmt: skip
        known = executor.functions.know(function)
        known.follow(recipe, [executor.functions.know(f) for f in covered[:-1]])
        for node in self._reads(function):
            variable = node.get_variable_or_none()
            if node.creator_node is None and variable is not None:
                self._held.append(variable)
        products = {}
        for index, array in enumerate(graph.output_arrays(function)):
            products[identify(array)] = Slot(last.k, SlotKind.OUTPUT, index)
        for name, array in made.items():
            if name in verdict.made if covers else name not in verdict.attributes:
                products[identify(array)] = Slot(last.k, SlotKind.ATTRIBUTE, name)
        for allocation, slot in products.items():
            if allocation > last.newest:
                self._makers[allocation] = weakref.ref(function), slot
                self.counts['products'] += 1

    def _reads(self, function: Any) -> list[Any]:
        """Nodes that the replay of a function reads."""
        covered = self._executor.functions.know(function).covered
        return fused_replays.find_inputs([*(f() for f in covered), function])

    def _may_drop(self, live: LiveMap) -> bool:
        maker, _ = self._makers.get(live.allocation, (None, None))
        return maker is not None and self._reachable(maker(), {})

    def _reachable(self, function: Any, known: dict[Any, bool]) -> bool:
        """Whether a replay finds what it reads, now and later."""
        if function not in known:
            known[function] = self._finds_all(function, known)
        return known[function]

    def _finds_all(self, function: Any, known: dict[Any, bool]) -> bool:
        live = self._executor.functions.find(function)
        if function is None or live is None or live.recipe is None:
            return False
        for node in self._reads(function):
            read = self._executor.maps.find_of_node(node)
            if read is not None and self._actions.get(read.allocation) != 'recompute':
                continue  # it stays, or has a copy
            if node.creator_node is None:
                if node.get_variable_or_none() is None:
                    return False
            elif not self._reachable(node.creator_node, known):
                return False
        return True

    # -- what comes back ------------------------------------------------------
    def _plan_return(self, k: int, function: Any) -> None:
        """Writes down what comes back before backward operation k."""
        table, gone = self._table, []
        for live in self._executor.maps.find(function):
            if live.storage < 0:
                continue  # of an older iteration: the executor restores it
            if live.state is State.AWAY:
                table.swap_ins[k].append(live.storage)
                table.needs[k].append(live.storage)
            elif live.state is State.GONE:
                gone.append(live)
        if gone:
            table.replays[k].extend(self._replays(k, gone))

    def _replays(self, k: int, gone: list[LiveMap]) -> list[Replay]:
        executor = self._executor
        order: list[Any] = []
        reads: dict[int, set[int]] = {}

        def visit(function: Any) -> None:
            if function in order:
                return
            read = reads[self._positions[function]] = set()
            for node in self._reads(function):
                live = executor.maps.find_of_node(node)
                if live is not None:
                    read.add(live.storage)
                missing = graph.node_array(node) is None
                if missing and (live is None or live.state is State.GONE):
                    visit(node.creator_node)
            order.append(function)

        for live in gone:
            visit(self._makers[live.allocation][0]())
        replays, wanted = [], {live.storage for live in gone}
        passing: set[int] = set()
        for index, function in enumerate(order):
            operation = self._positions[function]
            products = self._products(function)
            recipe = executor.functions.know(function).recipe
            assert recipe is not None
            self._table.recipes[operation] = Recipe(
                operation, (), tuple(products), tuple(products.values()),
                recipe.attributes, 0.0, 0, True, recipe.covers, recipe.formula,
            )  # fmt: skip
            keeps = tuple(s for s in products if s in wanted)
            passing.update(s for s in products if s not in wanted)
            later = set().union(
                *(reads[self._positions[other]] for other in order[index + 1 :])
            )
            frees = tuple(sorted(passing - later))
            passing -= set(frees)
            replays.append(Replay(k, operation, keeps, frees))
        return replays

    def _products(self, function: Any) -> dict[int, Slot]:
        """Sources of the living maps that a function makes, by storage."""
        return {
            live.storage: self._makers[live.allocation][1]
            for live in self._executor.maps
            if live.storage >= 0
            and live.allocation in self._makers
            and self._makers[live.allocation][0]() is function
        }
