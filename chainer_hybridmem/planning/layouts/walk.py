"""Profile, or profile and plan, to memory trace.

The loads of these traces are those of :func:`~.records.validation.check_plan`
to the byte, operation by operation, and the same rules made them: what the plan
releases, swaps in, replays and drops before an operation, then the operation's own
recorded events.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from chainer_hybridmem.errors import FormatError, PlanError
from chainer_hybridmem.planning.layouts.trace import Trace, check_trace
from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan, Replay
from chainer_hybridmem.planning.records.profile import Category, Profile, Storage
from chainer_hybridmem.planning.records.splits import in_parts
from chainer_hybridmem.planning.records.validation import check_plan


def in_core_trace(profile: Profile) -> Trace:
    """The iteration of plain Chainer: feature maps stay until the graph dies.

    Raises:
        FormatError: If the profile frees more than it starts with.
    """
    return _Walk(profile, None).run()


def planned_trace(profile: Profile, plan: Plan) -> Trace:
    """The iteration under a plan.

    Raises:
        PlanError: If the plan cannot be executed.
        FormatError: If the profile frees more than it starts with.
    """
    fingerprint = profile.fingerprint()
    if plan.profile_fingerprint != fingerprint:
        raise PlanError(
            f'The plan was made for profile {plan.profile_fingerprint}, this is '
            f'profile {fingerprint}; plan again with `hybridmem plan`.'
        )
    check_plan(profile, plan)
    return _Walk(in_parts(profile, plan.parts), plan).run()


class _Writer:
    """Buffers and events of the trace.

    Attributes:
        sizes (list of int): Bytes of each buffer.
        names (list of str): What each is called; those of one name are numbered.
        events (list of int): As in :class:`.trace.Trace`.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.names: list[str] = []
        self.events: list[int] = []
        self._copies: Counter[str] = Counter()  # buffers of one name

    def add(self, nbytes: int, name: str) -> int:
        """A new buffer that is there already."""
        copies = self._copies[name]
        self.sizes.append(nbytes)
        self.names.append(f'{name}.{copies}' if copies else name)
        self._copies[name] += 1
        return len(self.sizes) - 1

    def malloc(self, nbytes: int, name: str) -> int:
        """A new buffer that is allocated now."""
        buffer = self.add(nbytes, name)
        self.events.append(buffer + 1)
        return buffer

    def free(self, buffer: int) -> None:
        """Frees a buffer."""
        self.events.append(-(buffer + 1))


class _Walk:
    """Writes events while walking through the iteration once."""

    def __init__(self, profile: Profile, plan: Plan | None) -> None:
        self.profile = profile
        self.entries = {e.storage: e for e in plan.maps} if plan is not None else {}
        self.recipes = {recipe.operation: recipe for recipe in profile.recipes}
        self.first_backward = profile.first_backward
        self.writer = _Writer()
        self.starts: list[int] = []
        self.alive: dict[int, int] = {}  # storage to buffer
        self.passing: dict[int, int] = {}  # likewise, made by a replay for a while
        self.present: set[int] = set()  # planned maps on the device
        self.crossing: dict[int, int] = {}  # storage to its buffer before operation 0
        self.held: list[int] = []  # to be freed when the graph dies
        self.changing: dict[int, list[MapPlan]] = defaultdict(list)
        self.replays: dict[int, list[Replay]] = defaultdict(list)
        for entry in self.entries.values():
            positions = (entry.release_before, entry.swap_in_before, entry.drop_before)
            for k in sorted(set(positions)):
                self.changing[k].append(entry)
        for replay in plan.replays if plan is not None else ():
            self.replays[replay.before].append(replay)
        self.sources = set[int]()  # what stays for replays
        self.ending: dict[int, list[int]] = defaultdict(list)
        for source in plan.sources if plan is not None else ():
            self.sources.add(source.storage)
            self.ending[source.drop_before].append(source.storage)

    def run(self) -> Trace:
        self._start()
        for op in self.profile.operations:
            self._before(op.index)
            self._during(op.index)
        trace = Trace(
            tuple(self.writer.sizes),
            tuple(self.writer.events),
            tuple(self.writer.names),
            self._carried(),
            tuple(self.starts),
        )
        check_trace(trace)
        return trace

    # -- buffers -------------------------------------------------------------------

    def _malloc(self, storage: int, what: str = 's') -> int:
        nbytes = self.profile.storages[storage].nbytes
        return self.writer.malloc(nbytes, f'{what}{storage}')

    def _free(self, storage: int) -> None:
        self.writer.free(self.alive.pop(storage))

    def _start(self) -> None:
        """What is there before the iteration: what it frees, and the rest."""
        there = [s for s in self.profile.storages if self._there_before(s)]
        rest = self.profile.initial_bytes - sum(s.nbytes for s in there)
        if rest < 0:  # what nothing frees may have been counted elsewhere
            there = [s for s in there if self._leaves(s)]
            rest = self.profile.initial_bytes - sum(s.nbytes for s in there)
        if rest < 0:
            raise FormatError(
                f'The profile cannot be laid out: it frees {-rest} bytes more than '
                f'the {self.profile.initial_bytes} it starts with. Record it again.'
            )
        for storage in there:
            self.alive[storage.id] = self.writer.add(storage.nbytes, f's{storage.id}')
            if storage.id in self.entries:
                self.present.add(storage.id)
                self.crossing[storage.id] = self.alive[storage.id]
        if rest:
            self.writer.add(rest, 'initial')

    def _there_before(self, item: Storage) -> bool:
        """Whether it is a buffer of its own; states that stay are one with the rest."""
        stays = item.category is Category.OPTIMIZER_STATE and not self._leaves(item)
        return item.allocated_at < 0 and not stays

    def _leaves(self, item: Storage) -> bool:
        return item.freed_at >= 0 or item.id in self.entries

    def _carried(self) -> tuple[tuple[int, int], ...]:
        """Pairs what stays behind with what the iteration starts with and frees.

        Of several with one size it is not known which is which; they are taken in
        order, and their lifetimes made to cover each other by the layout.
        """
        sizes, events = self.writer.sizes, self.writer.events
        born = {e - 1 for e in events if e > 0}
        freed = [-e - 1 for e in events if e < 0]
        pairs = self._returned(set(freed))
        known = {buffer for pair in pairs for buffer in pair}
        taken: dict[int, list[int]] = defaultdict(list)
        for buffer in freed:
            if buffer not in born and buffer not in known:
                taken[sizes[buffer]].append(buffer)
        gone = known.union(freed)
        for event in events:
            buffer = event - 1
            if event > 0 and buffer not in gone and taken[sizes[buffer]]:
                pairs.append((buffer, taken[sizes[buffer]].pop(0)))
        return tuple(pairs)

    def _returned(self, freed: set[int]) -> list[tuple[int, int]]:
        """What crosses iterations and has left: where it is back, and where it was."""
        return [
            (self.alive[storage], buffer)
            for storage, buffer in self.crossing.items()
            if buffer in freed
        ]

    # -- the walk ------------------------------------------------------------------

    def _before(self, k: int) -> None:
        for storage in self.ending.get(k, ()):
            self._free(storage)
        changing = self.changing.get(k, ())
        for entry in changing:
            if entry.release_before == k and entry.action is not Action.KEEP:
                self._leave(entry.storage)
            if entry.drop_before == k:
                self._leave(entry.storage)
        self.starts.append(len(self.writer.events))
        for entry in changing:
            if entry.swap_in_before == k and entry.action is Action.SWAP:
                self.alive[entry.storage] = self._malloc(entry.storage, 'in')
                self.present.add(entry.storage)
        for replay in self.replays.get(k, ()):
            self._replay(replay)

    def _leave(self, storage: int) -> None:
        self.present.discard(storage)
        self._free(storage)

    def _replay(self, replay: Replay) -> None:
        recipe = self.recipes[replay.operation]
        made = [s for s in recipe.products if s not in recipe.inputs]
        for storage in made:
            buffer = self._malloc(storage, 're')
            if storage in replay.keeps:
                self.alive[storage] = buffer
                self.present.add(storage)
            else:
                self.passing[storage] = buffer
        products = sum(self.profile.storages[s].nbytes for s in made)
        workspace = recipe.peak_bytes - products
        if workspace > 0:
            name = f'ws{replay.before}.{replay.operation}'
            self.writer.free(self.writer.malloc(workspace, name))
        for storage in replay.frees:
            self.writer.free(self.passing.pop(storage))

    def _during(self, k: int) -> None:
        events = self.profile.events
        for position in range(*self.profile.span_of(k)):
            if position == self.profile.graph_end_event:
                self._graph_dies()
            event = events[position]
            storage = abs(event) - 1
            if event > 0:
                self.alive[storage] = self._malloc(storage)
                if storage in self.entries:
                    self.present.add(storage)
            elif storage not in self.entries and storage not in self.sources:
                self._recorded_free(storage, position)

    def _recorded_free(self, storage: int, position: int) -> None:
        graph_lives = position < self.profile.graph_end_event
        item = self.profile.storages[storage]
        if graph_lives and self._left_to_graph(item):
            self.held.append(storage)
        else:
            self._free(storage)

    def _left_to_graph(self, item: Storage) -> bool:
        """Whether only the recording's swapping has freed it this early."""
        if item.category is not Category.FEATURE_MAP or item.producer < 0:
            return False
        if not item.backward_uses:
            return False
        last = max((item.producer, *item.forward_uses))
        return last < self.first_backward <= min(item.backward_uses)

    def _graph_dies(self) -> None:
        for storage in sorted(self.present):
            persistent = self.profile.storages[storage].persistent
            if self.entries[storage].drop_before < 0 and not persistent:
                self._leave(storage)
        for storage in self.held:
            self._free(storage)
        self.held = []
