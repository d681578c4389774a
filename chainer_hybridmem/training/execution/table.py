"""A plan as lists of actions per operation: what the executor looks up."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from chainer_hybridmem.planning.records.plan import Action, Plan, Replay, Tier
from chainer_hybridmem.planning.records.profile import Profile, Recipe, Slot

# Of a plan's time, that copies may take which only a second backward asks for.
MOST_UNASKED = 0.01
Lists = dict[int, list[int]]
Outputs = dict[int, list[int]]  # of operations


@dataclasses.dataclass(frozen=True)
class ActionTable:
    """Storage ids per position, in order of execution.

    Attributes:
        swap_outs (dict): Copies to the host that start before an operation.
        releases (dict): Swapped maps whose memory must be free.
        drops (dict): Maps that are dropped, for good or to be recomputed.
        for_good (set): Storages of maps that are dropped and not recomputed.
        unique (set): Of these, storages that no replay makes again, and that are copied
            out therefore.
        unique_bytes (int): Size of their host copies.
        swap_ins (dict): Copies to the device that start.
        needs (dict): Swapped maps that must be complete.
        replays (dict): Replays that run.
        replayed (set): Operations that replays run again.
        busy (set): Forward operations whose maps the plan does something to.
        swapped (set): Storages that leave and come back.
        storage_of (dict): Planned storage behind a slot.
        recipes (dict): Recipe of each forward operation.
        crossing (dict): Storage of each parameter or state that moves, by its label.
        update (int): Number of the update.
        acting (set): Positions before which there is something to do.
        tiers (dict): Where the host copy of each swapped map lies.
        growth_bytes (int): Most that is taken beyond what is there at the beginning, as
            predicted; negative without a prediction.
        sources (dict): Outputs of each forward operation that stay for replays.
        source_drops (dict): Operations and outputs that have stayed long enough.
    """

    swap_outs: Lists
    releases: Lists
    drops: Lists
    for_good: set[int]
    unique: set[int]
    unique_bytes: int
    swap_ins: Lists
    needs: Lists
    replays: dict[int, list[Replay]]
    replayed: set[int]
    busy: set[int]
    swapped: set[int]
    storage_of: dict[Slot, int]
    recipes: dict[int, Recipe]
    crossing: dict[str, int]
    update: int
    acting: set[int]
    tiers: dict[int, Tier]
    growth_bytes: int
    sources: Outputs = dataclasses.field(default_factory=dict)
    source_drops: dict[int, list[tuple[int, int]]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def passive(self) -> bool:
        """Whether there is nothing to do at all."""
        return not self.acting


def compile_plan(
    profile: Profile, plan: Plan, limited_host: bool = False
) -> ActionTable:
    """Sorts a plan's actions by position.

    Args:
        profile: Of the iterations.
        plan: For them.
        limited_host: Whether the plan needs all host memory there is.
    """
    swap_ins, needs = _sort_returns(plan)
    swap_outs, releases, drops = _sort_departures(plan)
    recipes = {recipe.operation: recipe for recipe in profile.recipes}
    replays: dict[int, list[Replay]] = collections.defaultdict(list)
    for replay in plan.replays:
        replays[replay.before].append(replay)
    sources, source_drops = _sort_sources(profile, plan)
    planned = {entry.storage for entry in plan.maps}
    replayed = {replay.operation for replay in plan.replays}
    at_hand = planned | {s.id for s in profile.storages if s.freed_at < 0}
    # Should memory be short, sources are made again, and what they are made of.
    dropped = _find_dropped(plan)
    replayed |= _find_makers(recipes, at_hand - dropped, sources)
    replayed.update(*(recipes[k].covers for k in replayed))
    for_good = {
        entry.storage
        for entry in plan.maps
        if entry.action is not Action.RECOMPUTE and entry.drop_before >= 0
    }
    swapped = [entry for entry in plan.maps if entry.action is Action.SWAP]
    copied = {entry.storage for entry in swapped}
    unique: set[int] = set()
    if not limited_host:
        unique = for_good - copied - _find_remade(profile, at_hand)
    sizes = [profile.storages[storage].nbytes for storage in unique]
    if (
        sum(map(profile.link.d2h_seconds, sizes))
        > MOST_UNASKED * plan.predicted_seconds
    ):
        unique, sizes = set(), []
    stored = [(profile.storages[entry.storage], entry.storage) for entry in swapped]
    return ActionTable(
        swap_outs=swap_outs,
        releases=releases,
        drops=drops,
        for_good=for_good,
        unique=unique,
        unique_bytes=sum(sizes),
        swap_ins=swap_ins,
        needs=needs,
        replays=dict(replays),
        replayed=replayed,
        busy=replayed | _find_busy(profile, plan),
        swapped=copied,
        storage_of={
            slot: s.id for s in profile.storages if s.id in planned for slot in s.slots
        },
        recipes=recipes,
        crossing={record.label: s for record, s in stored if record.persistent},
        update=profile.first_update,
        acting={
            *swap_outs,
            *releases,
            *drops,
            *swap_ins,
            *needs,
            *replays,
            *source_drops,
        },
        sources=sources,
        source_drops=source_drops,
        tiers={entry.storage: entry.tier for entry in swapped},
        growth_bytes=plan.predicted_peak_bytes - profile.initial_bytes,
    )


def _find_remade(profile: Profile, at_hand: set[int]) -> set[int]:
    """Storages that replays make of maps of the plan, and of what nothing frees.

    A map of the plan is at hand or is made again itself.
    """
    at_hand, remade = set(at_hand), set[int]()
    for recipe in sorted(profile.recipes, key=lambda recipe: recipe.operation):
        if recipe.exact and at_hand.issuperset(recipe.inputs):
            remade.update(set(recipe.products).difference(recipe.inputs))
            at_hand.update(recipe.products)
    return remade


def _find_dropped(plan: Plan) -> set[int]:
    """Maps of which nothing may be left while replays still read a source."""
    last = max((source.drop_before for source in plan.sources), default=-1)
    return {
        entry.storage
        for entry in plan.maps
        if entry.action is not Action.SWAP and 0 <= entry.drop_before < last
    }


def _find_makers(
    recipes: dict[int, Recipe], at_hand: set[int], operations: Iterable[int]
) -> set[int]:
    """Operations, and those that make what they read and what is not at hand."""
    makers = {
        storage: recipe.operation
        for recipe in recipes.values()
        for storage in set(recipe.products).difference(recipe.inputs)
    }
    found: set[int] = set()
    waiting = list(operations)
    for operation in waiting:  # grows
        if operation not in found:
            found.add(operation)
            read = set(recipes[operation].inputs).difference(at_hand)
            waiting += [makers[storage] for storage in read if storage in makers]
    return found


def _sort_sources(
    profile: Profile, plan: Plan
) -> tuple[Outputs, dict[int, list[tuple[int, int]]]]:
    """What stays for replays alone, by operation, and when it goes."""
    outputs: Outputs = collections.defaultdict(list)
    drops: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    slots = {
        storage: slot
        for recipe in profile.recipes
        for storage, slot in zip(recipe.products, recipe.sources, strict=True)
    }
    for source in plan.sources:
        slot = slots[source.storage]
        outputs[slot.operation].append(int(slot.key))
        drops[source.drop_before].append((slot.operation, int(slot.key)))
    return dict(outputs), dict(drops)


def _find_busy(profile: Profile, plan: Plan) -> set[int]:
    """Operations with maps that leave, or that are dropped for good."""
    return {
        slot.operation
        for entry in plan.maps
        if entry.action is not Action.KEEP or entry.drop_before >= 0
        for slot in profile.storages[entry.storage].slots
    }


def _sort_returns(plan: Plan) -> tuple[Lists, Lists]:
    """Swap-ins and needs; copies are queued in order of need, as the simulator does."""
    swap_ins: Lists = collections.defaultdict(list)
    needs: Lists = collections.defaultdict(list)
    for entry in sorted(plan.maps, key=lambda m: (m.needed_before, m.storage)):
        if entry.action is Action.SWAP:
            swap_ins[entry.swap_in_before].append(entry.storage)
            needs[entry.needed_before].append(entry.storage)
    return dict(swap_ins), dict(needs)


def _sort_departures(plan: Plan) -> tuple[Lists, Lists, Lists]:
    """Swap-outs, releases and drops."""
    swap_outs: Lists = collections.defaultdict(list)
    releases: Lists = collections.defaultdict(list)
    drops: Lists = collections.defaultdict(list)
    for entry in sorted(plan.maps, key=lambda m: (m.swap_out_before, m.storage)):
        if entry.action is Action.SWAP:
            swap_outs[entry.swap_out_before].append(entry.storage)
            releases[entry.release_before].append(entry.storage)
        elif entry.action is Action.RECOMPUTE:
            drops[entry.release_before].append(entry.storage)
        if entry.drop_before >= 0:
            drops[entry.drop_before].append(entry.storage)
    return dict(swap_outs), dict(releases), dict(drops)
