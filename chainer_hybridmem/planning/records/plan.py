"""Types only: what happens to each feature map.

A plan is static: every action stands at a position of the operation order, so
that the memory load at every moment follows from the plan alone, whatever the
copies' real speed. Positions are "before operation k" as in
:mod:`chainer_hybridmem.planning.records.profile`; -1 means "never".

::

    forward                       backward
    p ---- last use ---- R ....... T ---- N ------- D
    |      |             |         |      |         |
    made   swap-out      released  swap-   needed   dropped
           starts                  in       (waited  for good
                                   starts   for)
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.units import format_bytes, format_seconds


class Action(enum.Enum):
    """What is done with a feature map between forward and backward."""

    KEEP = 'keep'
    SWAP = 'swap'
    RECOMPUTE = 'recompute'


FOR_REPLAYS = 'keep for replays'  # what people read of a source


class Tier(enum.Enum):
    """Where the host copy of a swapped map lies."""

    RAM = 'ram'
    DISK = 'disk'


@dataclasses.dataclass(frozen=True, slots=True)
class MapPlan:
    """The fate of one feature map.

    Attributes:
        storage (int): Id of the storage in the profile.
        action (Action): Keep, swap or recompute.
        swap_out_before (int): The copy to the host starts before this
            operation (swap only).
        release_before (int): Its memory is free before this operation: the
            copy is waited for if need be (swap, recompute).
        swap_in_before (int): Memory is taken and the copy to the device starts
            before this operation (swap only).
        needed_before (int): It is complete before this operation: the copy is
            waited for, or a replay has made it (swap, recompute).
        drop_before (int): It is dropped for good before this operation; -1
            leaves it to the graph, as in-core training does.
        tier (Tier): Where its host copy lies (swap only).
    """

    storage: int
    action: Action
    swap_out_before: int = -1
    release_before: int = -1
    swap_in_before: int = -1
    needed_before: int = -1
    drop_before: int = -1
    tier: Tier = Tier.RAM


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """One forward operation run again.

    Attributes:
        before (int): Backward operation before which it runs.
        operation (int): The forward operation.
        keeps (tuple of int): Storages it makes that stay: feature maps whose
            ``needed_before`` is this position.
        frees (tuple of int): Storages of this chain that are not needed any
            more after this replay, in the order they are dropped.
    """

    before: int
    operation: int
    keeps: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What backward never reads and forward would drop: it stays for replays.

    Attributes:
        storage (int): Id of the storage in the profile.
        drop_before (int): It is dropped before this backward operation, after the last
            replay that reads it.
    """

    storage: int
    drop_before: int


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One function that runs in parts; as in :class:`.profile.Split`.

    Attributes:
        operation (int): The operation it belongs to.
        function (int): Which of its functions that have a rule.
        name (str): The function's class.
        cut (str): What is cut.
        parts (int): Into how many.
        exact (bool): Whether every bit is as if it were not cut.
    """

    operation: int
    function: int
    name: str
    cut: str
    parts: int
    exact: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """Decisions for one iteration and what they are predicted to cost.

    Attributes:
        planner (str): Name of the planner.
        options (dict): Options it ran with.
        profile_fingerprint (str): :meth:`Profile.fingerprint` of its profile.
        memory_limit_bytes (int): The limit it keeps.
        maps (tuple of MapPlan): One per feature map of the profile.
        replays (tuple of Replay): In order of execution.
        predicted_seconds (float): Simulated time of one iteration.
        predicted_peak_bytes (int): Highest load at any moment.
        in_core_seconds (float): Time without any swap or recompute.
        lower_bound_seconds (float): No executable plan is faster; a plan without
            sources speaks of plans without, unless its planner has looked for them.
        planning_seconds (float): Time the search took.
        simulations (int): Candidates simulated.
        host_limit_bytes (int or None): Most bytes of host copies in RAM that it was
            made for; None is without a limit.
        parts (tuple of Part): Functions that run in parts.
        rules (tuple of pairs): Patterns and rules that it obeys; see
            ``planning/records/rules.py``.
        sources (tuple of Source): What stays for replays alone.
    """

    planner: str
    options: dict[str, Any]
    profile_fingerprint: str
    memory_limit_bytes: int
    maps: tuple[MapPlan, ...]
    replays: tuple[Replay, ...]
    predicted_seconds: float
    predicted_peak_bytes: int
    in_core_seconds: float
    lower_bound_seconds: float
    planning_seconds: float = 0.0
    simulations: int = 0
    host_limit_bytes: int | None = None
    parts: tuple[Part, ...] = ()
    rules: tuple[tuple[str, str], ...] = ()
    sources: tuple[Source, ...] = ()

    def __repr__(self) -> str:
        counts = ', '.join(f'{self.count(a)} {a.value}' for a in Action)
        return (
            f'<Plan of {self.planner} for {format_bytes(self.memory_limit_bytes)}: '
            f'{counts}; predicted {format_seconds(self.predicted_seconds)}>'
        )

    @property
    def overhead(self) -> float:
        """Predicted time over the in-core time, minus 1."""
        if self.in_core_seconds <= 0:
            return 0.0
        return self.predicted_seconds / self.in_core_seconds - 1

    @property
    def gap(self) -> float:
        """Predicted time over the proven lower bound, minus 1."""
        if self.lower_bound_seconds <= 0:
            return 0.0
        return self.predicted_seconds / self.lower_bound_seconds - 1

    def count(self, action: Action) -> int:
        """Number of feature maps with this action."""
        return sum(m.action is action for m in self.maps)

    def action_bytes(self, profile: Profile, action: Action) -> int:
        """Bytes of all feature maps with this action."""
        return sum(
            profile.storages[m.storage].nbytes for m in self.maps if m.action is action
        )

    def source_bytes(self, profile: Profile) -> int:
        """Bytes of all that stays for replays alone."""
        return sum(profile.storages[s.storage].nbytes for s in self.sources)

    def tier_bytes(self, profile: Profile, tier: Tier) -> int:
        """Bytes of the host copies in a tier, which stay for the whole iteration."""
        return sum(
            profile.storages[m.storage].nbytes
            for m in self.maps
            if m.action is Action.SWAP and m.tier is tier
        )
