"""An independent checker of plans, slow and simple on purpose.

It shares no code with the simulator: it walks through the recorded events with
sets of what is present, and gives exact reasons.
"""

from __future__ import annotations

import itertools

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan, Replay, Tier
from chainer_hybridmem.planning.records.profile import (
    Category,
    Phase,
    Profile,
    Recipe,
    SlotKind,
    Storage,
)
from chainer_hybridmem.planning.records.rules import (
    NO_RECOMPUTE,
    check_rules,
    named_maps,
    runs_any,
    silent_functions,
)
from chainer_hybridmem.planning.records.splits import in_parts


def check_plan(
    profile: Profile,
    plan: Plan,
    limit_bytes: int | None = None,
    host_limit_bytes: int | None = None,
) -> list[int]:
    """Checks that a plan can be executed and keeps its limit.

    Args:
        profile: The recorded iteration.
        plan: The plan to check.
        limit_bytes: Most bytes at any moment; None takes no notice of memory.
        host_limit_bytes: Most bytes of host copies in RAM; None takes no notice.

    Returns:
        list of int: Highest load while each operation runs, what is done
        before it included.

    Raises:
        PlanError: Naming the rule, the position and the values.
    """
    profile = in_parts(profile, plan.parts)
    check_entries(profile, plan, host_limit_bytes)
    loads = Walk(profile, plan).run()
    if limit_bytes is not None:
        for index, load in enumerate(loads):
            if load > limit_bytes:
                label = profile.operations[index].label
                raise PlanError(
                    f'Operation {index} ({label}) needs {load} bytes under this plan; '
                    f'the limit is {limit_bytes}.'
                )
    return loads


def check_entries(
    profile: Profile, plan: Plan, host_limit_bytes: int | None = None
) -> None:
    """Checks what can be told without a :class:`Walk`, as :func:`check_plan` does.

    Args:
        profile: The recorded iteration, with functions in parts as the plan has them.
        plan: The plan to check.
        host_limit_bytes: As there.
    """
    _check_order(profile, plan)
    _check_host(profile, plan, host_limit_bytes)
    _check_replays(profile, plan)
    _check_sources(profile, plan)
    check_obedience(profile, plan)


def _check_order(profile: Profile, plan: Plan) -> None:
    n = len(profile.operations)
    decided: set[int] = set()
    for entry in plan.maps:
        if not 0 <= entry.storage < len(profile.storages):
            raise PlanError(f'The plan names storage {entry.storage}: not there.')
        storage = profile.storages[entry.storage]
        if not (storage.plannable or storage.persistent):
            raise PlanError(f'Storage {entry.storage} is not a feature map to plan.')
        if storage.persistent:
            _check_persistent(entry, n)
        if entry.storage in decided:
            raise PlanError(f'The plan decides twice about storage {entry.storage}.')
        decided.add(entry.storage)
        _check_fields(entry, n)
        if entry.action is not Action.KEEP:
            _check_steps(entry, storage)
        if entry.action is Action.SWAP:
            _check_copy(entry, storage, profile.first_backward)


def _check_fields(entry: MapPlan, n: int) -> None:
    """Checks that only the fields of its own action are set."""
    if entry.tier is Tier.DISK and entry.action is not Action.SWAP:
        raise PlanError(
            f'Feature map {entry.storage}: its tier is {entry.tier.value!r}, but '
            f'action {entry.action.value!r} copies nothing.'
        )
    for name in _unused_fields(entry.action):
        if getattr(entry, name) != -1:
            raise PlanError(
                f'Feature map {entry.storage}: {name} is {getattr(entry, name)}, '
                f'but action {entry.action.value!r} has none; -1 was expected.'
            )
    if not -1 <= entry.drop_before <= n:
        raise PlanError(
            f'Feature map {entry.storage}: drop_before ({entry.drop_before}) lies '
            f'outside the {n} operations.'
        )


def _check_steps(entry: MapPlan, storage: Storage) -> None:
    """What happens to a map that leaves happens in order."""
    steps: list[tuple[str, int]] = [
        ('last forward use', max((storage.producer, *storage.forward_uses))),
        ('release_before', entry.release_before - 1),
        ('needed_before', entry.needed_before - 1),
        ('first backward use', min(storage.backward_uses) - 1),
        ('drop_before', entry.drop_before - 1),
    ]
    if entry.action is Action.SWAP:
        steps[1:1] = [('swap_out_before', entry.swap_out_before - 1)]
        steps[3:3] = [('swap_in_before', entry.swap_in_before - 1)]
    for (left, a), (right, b) in itertools.pairwise(steps):
        if a > b:
            raise PlanError(
                f'Feature map {entry.storage}: {left} ({a + 1}) must not come '
                f'after {right} ({b + 1}).'
            )


def _check_copy(entry: MapPlan, storage: Storage, first_backward: int) -> None:
    """A copy waits for the program, unless that holds the map through forward."""
    start, held_until = entry.swap_out_before, storage.releasable_from
    if start < held_until <= first_backward:
        raise PlanError(
            f'Feature map {entry.storage} is copied before operation {start}, but the '
            f'program holds it until {held_until}.'
        )


def _check_host(profile: Profile, plan: Plan, limit_bytes: int | None) -> None:
    """Every copy keeps its space all through the iteration."""
    on_disk = in_ram = 0
    for entry in plan.maps:
        if entry.action is Action.SWAP:
            nbytes = profile.storages[entry.storage].nbytes
            on_disk += nbytes if entry.tier is Tier.DISK else 0
            in_ram += nbytes if entry.tier is Tier.RAM else 0
    if on_disk and profile.disk_link is None:
        raise PlanError(
            f'The plan swaps {on_disk} bytes to the disk, but the profile has no disk '
            'link.'
        )
    if limit_bytes is not None and in_ram > limit_bytes:
        raise PlanError(
            f'Host copies take {in_ram} bytes of RAM under this plan; the host limit '
            f'is {limit_bytes}.'
        )


def _check_persistent(entry: MapPlan, n: int) -> None:
    """What crosses iterations is neither made again nor dropped."""
    if entry.action is Action.RECOMPUTE:
        raise PlanError(f'Storage {entry.storage} is recomputed, but nothing makes it.')
    if entry.drop_before not in (-1, n):
        raise PlanError(
            f'Storage {entry.storage} is dropped before operation {entry.drop_before}, '
            f'but the next iteration needs it; {n} was expected.'
        )


def _unused_fields(action: Action) -> tuple[str, ...]:
    copies = ('swap_out_before', 'swap_in_before')
    if action is Action.KEEP:
        return (*copies, 'release_before', 'needed_before')
    return copies if action is Action.RECOMPUTE else ()


def _check_replays(profile: Profile, plan: Plan) -> None:
    n, b0 = len(profile.operations), profile.first_backward
    recipes = {recipe.operation: recipe for recipe in profile.recipes}
    decided = {entry.storage for entry in plan.maps}
    for replay in plan.replays:
        if not b0 <= replay.before < n:
            raise PlanError(
                f'Operation {replay.operation} is replayed before operation '
                f'{replay.before}; backward runs from {b0} to {n - 1}.'
            )
        recipe = recipes.get(replay.operation)
        if recipe is None or not recipe.exact:
            raise PlanError(
                f'Operation {replay.operation} is replayed but not repeatable.'
            )
        for storage in replay.keeps:
            if storage not in decided or storage not in made_by(recipe):
                raise PlanError(
                    f'The replay of operation {replay.operation} before operation '
                    f'{replay.before} keeps storage {storage}, which it does not make.'
                )


def _check_sources(profile: Profile, plan: Plan) -> None:
    """What stays for replays is made by one of them, and forward has dropped it."""
    n, b0 = len(profile.operations), profile.first_backward
    makers = {s: recipe for recipe in profile.recipes for s in _outputs_of(recipe)}
    firsts = profile.operations[b0].first_event if b0 < n else len(profile.events)
    decided = {entry.storage for entry in plan.maps}
    for source in plan.sources:
        maker = makers.get(source.storage)
        if maker is None or not maker.exact or source.storage in decided:
            raise PlanError(
                f'Storage {source.storage} stays for replays, but no exact replay has '
                'it as an output that no plan decides about.'
            )
        decided.add(source.storage)
        if not 0 <= profile.storages[source.storage].freed_at < firsts:
            raise PlanError(
                f'Storage {source.storage} stays for replays, but forward does not '
                'drop it.'
            )
        if not b0 <= source.drop_before <= n:
            raise PlanError(
                f'Storage {source.storage} stays for replays until operation '
                f'{source.drop_before}; backward runs from {b0} to {n - 1}.'
            )


def _outputs_of(recipe: Recipe) -> list[int]:
    """What comes out of the function itself; an attribute cannot be held."""
    made = zip(recipe.products, recipe.sources, strict=True)
    return [storage for storage, slot in made if slot.kind is SlotKind.OUTPUT]


def made_by(recipe: Recipe) -> list[int]:
    """What a replay allocates; what it starts with (a mask) it does not make."""
    return [s for s in recipe.products if s not in recipe.inputs]


class Walk:
    """Walks once through the iteration with sets of what is present."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.profile = profile
        self.entries = {entry.storage: entry for entry in plan.maps}
        self.recipes = {recipe.operation: recipe for recipe in profile.recipes}
        self.first_backward = profile.first_backward
        self._index(plan)
        self.persistent = {
            s for s in self.entries if profile.storages[s].persistent
        }  # there from the start, and counted with it
        self.present = set(self.persistent)  # planned maps with memory on the device
        self.complete = set(self.persistent)  # ... whose contents are there
        self.passing: set[int] = set()  # made by a replay, to be freed soon
        self.sources = {source.storage for source in plan.sources}
        self.load = profile.initial_bytes
        self.gone: set[int] = set()
        self.graph_held: list[int] = []  # freed once the graph has died

    def _index(self, plan: Plan) -> None:
        """What happens at each position, in the plan's order."""
        self.changing: dict[int, list[MapPlan]] = {}
        self.read_forward: dict[int, list[int]] = {}
        self.read_backward: dict[int, list[int]] = {}
        self.replays: dict[int, list[Replay]] = {}
        for entry in self.entries.values():
            positions = {entry.release_before, entry.swap_in_before}
            positions |= {entry.needed_before, entry.drop_before}
            for k in sorted(positions):
                self.changing.setdefault(k, []).append(entry)
            storage = self.profile.storages[entry.storage]
            for k in sorted(set(storage.forward_uses)):
                self.read_forward.setdefault(k, []).append(entry.storage)
            for k in sorted(set(storage.backward_uses)):
                self.read_backward.setdefault(k, []).append(entry.storage)
        for replay in plan.replays:
            self.replays.setdefault(replay.before, []).append(replay)
        self.ending: dict[int, list[int]] = {}
        for source in plan.sources:
            self.ending.setdefault(source.drop_before, []).append(source.storage)

    def run(self) -> list[int]:
        loads = []
        for op in self.profile.operations:
            before = self._before(op.index)
            loads.append(max(before, self._during(op.index)))
            forward = op.phase is Phase.FORWARD
            users = self.read_forward if forward else self.read_backward
            for storage in users.get(op.index, ()):
                if storage not in self.complete:
                    raise PlanError(
                        f'Operation {op.index} ({op.label}) uses feature map '
                        f'{storage}, which is not there.'
                    )
        return loads

    def _nbytes(self, storage: int) -> int:
        return self.profile.storages[storage].nbytes

    def _gain(self, storage: int) -> None:
        self.load += self._nbytes(storage)

    def _lose(self, storage: int) -> None:
        self.load -= self._nbytes(storage)

    def _raised(self, highest: int, replay_bytes: int = 0) -> int:
        """The highest load of the operation, that of this moment included."""
        return max(highest, self.load + replay_bytes)

    def _take(self, storage: int) -> None:
        if storage in self.present:
            raise PlanError(f'Feature map {storage} is taken twice.')
        self.present.add(storage)
        self._gain(storage)

    def _leave(self, storage: int) -> None:
        if storage not in self.present:
            raise PlanError(f'Feature map {storage} is released twice.')
        self.present.discard(storage)
        self.complete.discard(storage)
        self._lose(storage)

    def _before(self, k: int) -> int:
        """What the plan does before operation k; the highest load on the way."""
        self._let_go(k)
        changing = self.changing.get(k, ())
        for entry in changing:
            if entry.swap_in_before == k and entry.action is Action.SWAP:
                self._take(entry.storage)
        for entry in changing:
            if entry.needed_before == k and entry.action is Action.SWAP:
                if entry.storage not in self.present:
                    raise PlanError(
                        f'Feature map {entry.storage} is needed before operation {k}, '
                        f'but it is not there.'
                    )
                self.complete.add(entry.storage)
        return self._replay(k)

    def _let_go(self, k: int) -> None:
        """What the plan frees before operation k."""
        for storage in self.ending.get(k, ()):
            self._lose(storage)
            self.gone.add(storage)
        for entry in self.changing.get(k, ()):
            if entry.release_before == k and entry.action is not Action.KEEP:
                self._check_not_held(entry.storage, k)
                self._leave(entry.storage)
            if entry.drop_before == k:
                self._check_not_held(entry.storage, k)
                self._leave(entry.storage)

    def _check_not_held(self, storage: int, k: int) -> None:
        released_from = self.profile.storages[storage].releasable_from
        if k < released_from:
            raise PlanError(
                f'Feature map {storage} is released before operation {k}, but the '
                f'program holds it until {released_from}.'
            )

    def _replay(self, k: int) -> int:
        highest = self._raised(self.load)
        for replay in self.replays.get(k, ()):
            recipe = self.recipes[replay.operation]
            self._check_sources(recipe, k)
            highest = self._raised(highest, recipe.peak_bytes)
            self._make(replay, recipe)
            for storage in replay.frees:
                if storage not in self.passing:
                    raise PlanError(f'Storage {storage} is freed but not there.')
                self.passing.discard(storage)
                self._lose(storage)
        if self.passing:
            raise PlanError(
                f'Storages {sorted(self.passing)} stay behind after the replays '
                f'before operation {k}.'
            )
        return highest

    def _make(self, replay: Replay, recipe: Recipe) -> None:
        """What a replay makes."""
        for storage in made_by(recipe):
            if storage in replay.keeps:
                self._keep_product(self.entries[storage], replay.before)
                continue
            if storage in self.passing:
                raise PlanError(f'Storage {storage} is made twice in one chain.')
            self.passing.add(storage)
            self._gain(storage)

    def _keep_product(self, entry: MapPlan, k: int) -> None:
        if entry.needed_before != k or entry.action is not Action.RECOMPUTE:
            raise PlanError(
                f'Feature map {entry.storage} is kept by a replay before operation '
                f'{k}, but its plan says {entry}.'
            )
        self._take(entry.storage)
        self.complete.add(entry.storage)

    def _check_sources(self, recipe: Recipe, k: int) -> None:
        for source in recipe.inputs:
            planned = source in self.entries
            there = source in self.complete if planned else source not in self.gone
            if not there and source not in self.passing:
                raise PlanError(
                    f'The replay of operation {recipe.operation} before operation '
                    f'{k} needs storage {source}, which is not there.'
                )

    def _during(self, k: int) -> int:
        """The operation's own events; the highest load on the way."""
        highest = self._raised(self.load)
        for position in range(*self.profile.span_of(k)):
            if position == self.profile.graph_end_event:
                self._graph_dies()
            event = self.profile.events[position]
            storage = abs(event) - 1
            if event > 0:
                self._gain(storage)
                if storage in self.entries:
                    self.present.add(storage)
                    self.complete.add(storage)
            elif storage not in self.entries and storage not in self.sources:
                graph_lives = position < self.profile.graph_end_event
                if graph_lives and self._left_to_graph(storage):
                    self.graph_held.append(storage)
                else:
                    self._lose(storage)
                    self.gone.add(storage)
            highest = self._raised(highest)
        return highest

    def _left_to_graph(self, storage: int) -> bool:
        """Whether only the recording's swapping has freed it this early."""
        item, b0 = self.profile.storages[storage], self.first_backward
        if item.category is not Category.FEATURE_MAP or item.producer < 0:
            return False
        last = max((item.producer, *item.forward_uses))
        return bool(item.backward_uses) and last < b0 <= min(item.backward_uses)

    def _graph_dies(self) -> None:
        for storage in sorted(self.present - self.persistent):
            if self.entries[storage].drop_before < 0:
                self._leave(storage)
        for storage in self.graph_held:
            self._lose(storage)
        self.gone.update(self.graph_held)
        self.graph_held = []


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
