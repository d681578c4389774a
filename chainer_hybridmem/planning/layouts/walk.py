"""Profile, or profile and plan, to memory trace.

The walk is that of the checker (:mod:`~.records.validation`), written down: so loads
are those of :func:`~.records.validation.check_plan` to the byte. What the plan releases
before an operation comes first, then what it swaps in and replays, then the operation's
own recorded events.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from chainer_hybridmem.errors import FormatError, PlanError
from chainer_hybridmem.planning.layouts.trace import Trace, check_sizes
from chainer_hybridmem.planning.records.plan import Plan, Replay
from chainer_hybridmem.planning.records.profile import (
    Category,
    Profile,
    Recipe,
    Storage,
)
from chainer_hybridmem.planning.records.splits import in_parts
from chainer_hybridmem.planning.records.validation import Walk, check_entries, made_by

_NOTHING = Plan('', {}, '', 0, (), (), 0.0, 0, 0.0, 0.0)  # is done, as by plain Chainer


def in_core_trace(profile: Profile) -> Trace:
    """The iteration of plain Chainer: feature maps stay until the graph dies.

    Raises:
        FormatError: If the profile frees more than it starts with.
    """
    return _Writer(profile, _NOTHING).write()


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
            f'profile {fingerprint}; name its own, or plan again with `hybridmem plan`.'
        )
    profile = in_parts(profile, plan.parts)
    check_entries(profile, plan)
    return _Writer(profile, plan).write()


class _Writer(Walk):
    """Writes buffers and events while the checker walks through the iteration."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        super().__init__(profile, plan)
        self._sizes: list[int] = []  # as in :class:`.trace.Trace`, and likewise below
        self._names: list[str] = []  # those of one name are numbered
        self._events: list[int] = []
        self._starts: list[int] = []
        self._copies: Counter[str] = Counter()  # buffers of one name
        self._alive: dict[int, list[int]] = defaultdict(list)  # storage to buffers
        self._crossing: dict[int, int] = {}  # storage to its buffer before operation 0
        self._what = 's'  # what a storage is that comes: recorded, swapped in, replayed

    def write(self) -> Trace:
        """The whole iteration."""
        self._start()
        self.run()
        check_sizes(self._sizes)
        return Trace(
            tuple(self._sizes),
            tuple(self._events),
            tuple(self._names),
            self._carried(),
            tuple(self._starts),
        )

    # -- buffers -------------------------------------------------------------------

    def _add(self, nbytes: int, name: str) -> int:
        """A new buffer that is there already."""
        copies = self._copies[name]
        self._sizes.append(nbytes)
        self._names.append(f'{name}.{copies}' if copies else name)
        self._copies[name] += 1
        return len(self._sizes) - 1

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
            buffer = self._add(storage.nbytes, f's{storage.id}')
            self._alive[storage.id].append(buffer)
            if storage.id in self.entries:
                self._crossing[storage.id] = buffer
        if rest:
            self._add(rest, 'initial')

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
        sizes, events = self._sizes, self._events
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
            (self._alive[storage][-1], buffer)
            for storage, buffer in self._crossing.items()
            if buffer in freed
        ]

    # -- the walk ------------------------------------------------------------------

    def _gain(self, storage: int) -> None:
        super()._gain(storage)
        buffer = self._add(self._nbytes(storage), f'{self._what}{storage}')
        self._alive[storage].append(buffer)
        self._events.append(buffer + 1)

    def _lose(self, storage: int) -> None:
        super()._lose(storage)
        self._events.append(-(self._alive[storage].pop() + 1))

    def _let_go(self, k: int) -> None:
        super()._let_go(k)
        self._starts.append(len(self._events))
        self._what = 'in'

    def _replay(self, k: int) -> int:
        self._what = 're'
        return super()._replay(k)

    def _make(self, replay: Replay, recipe: Recipe) -> None:
        super()._make(replay, recipe)
        workspace = recipe.peak_bytes - sum(map(self._nbytes, made_by(recipe)))
        if workspace > 0:
            name = f'ws{replay.before}.{replay.operation}'
            buffer = self._add(workspace, name)
            self._events += [buffer + 1, -(buffer + 1)]

    def _during(self, k: int) -> int:
        self._what = 's'
        return super()._during(k)
