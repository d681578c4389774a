"""What an iteration will need when it comes again, told from its first time.

The first iteration has less in memory than all that follow: optimizer states come with
the first update, and a link that learns its size from its input has no parameters yet.
So training can get through it, and fail in the second one, where a limit that would do
is known already.

Note: [what is promised]
    A limit at which everything is swapped and every function runs as a whole: the
    profiling iterations swap everything, and a plan exists from there on.

Note: [limits that are named]
    A program may hold more later than in the iterations that have shown what it needs:
    what an evaluation or an epoch leaves behind. So whatever names or takes a limit has
    a 64th of the in-core peak to spare beyond it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from chainer_hybridmem.planning.records.profile import (
    MINIMUM_MAP_BYTES,
    PERSISTENT,
    Category,
    Profile,
    Storage,
)
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.planning.simulation.fitting import fitted
from chainer_hybridmem.planning.simulation.in_core import in_core_peak_bytes

_SPARE = 64  # of the in-core peak, one part


def with_spare(enough_bytes: int, in_core_bytes: int) -> int:
    """A limit to name; see [limits that are named].

    Args:
        enough_bytes: What iterations seen need.
        in_core_bytes: What they need if nothing leaves.
    """
    return enough_bytes + in_core_bytes // _SPARE


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Of iterations like one that has been recorded without a plan.

    Attributes:
        initial_bytes (int): In memory when one begins.
        enough_bytes (int): At this limit it runs; see [what is promised].
        plan_bytes (int): Least memory of any plan, with functions in parts as recorded.
        plain_bytes (int or None): Peak of plain Chainer; None if it was recorded with
            functions in parts.
        kept_bytes (int): Peak with every map kept, and functions in parts as recorded.
    """

    initial_bytes: int
    enough_bytes: int
    plan_bytes: int
    plain_bytes: int | None
    kept_bytes: int

    @property
    def named_bytes(self) -> int:
        """See [limits that are named]."""
        return with_spare(self.enough_bytes, self.kept_bytes)


def forecast(draft: Profile, limit_bytes: int) -> Forecast | None:
    """What iterations like a recorded one need; None if the limit surely does.

    Args:
        draft: The recording, of an iteration without a plan.
        limit_bytes: The memory limit.
    """
    profile = repeated(draft)
    kept_bytes = in_core_peak_bytes(profile)
    if kept_bytes <= limit_bytes:
        return None
    return Forecast(
        profile.initial_bytes,
        _enough(profile),
        least_memory(make_problem(profile, splitting=False))[0],
        None if profile.functions_in_parts else kept_bytes,
        kept_bytes,
    )


def _enough(profile: Profile) -> int:
    """See [what is promised]; optimizer states stay, as they may have to."""
    problem = make_problem(_with_first_held(profile), splitting=False)
    return least_memory(problem)[0]


def need_in_parts(problem: Problem) -> int:
    """At this limit it runs, with functions in parts that do not fit as a whole.

    Only those: what fits as a whole runs so in iterations without a plan.
    """
    spare_bytes = with_spare(0, in_core_peak_bytes(problem.profile))
    limit_bytes = 0
    while True:
        profile = fitted(problem, limit_bytes + spare_bytes).profile
        enough_bytes = _enough(repeated(profile))
        if enough_bytes <= limit_bytes:
            return enough_bytes
        limit_bytes = enough_bytes


def repeated(profile: Profile) -> Profile:
    """The same iteration once more: what it has made to stay is there already."""
    stays = {
        s.id
        for s in profile.storages
        if s.producer >= 0 and s.freed_at < 0 and s.category in PERSISTENT
    }
    stays |= set(_first_gradients(profile, stays))
    if not stays:
        return profile
    passed = set(_initial_values(profile, stays))
    moved = []  # where each event is then
    events: list[int] = []
    for event in profile.events:
        moved.append(len(events))
        if event < 0 or event - 1 not in stays:
            events.append(event)
    moved.append(len(events))
    after = tuple(range(profile.first_update, len(profile.operations)))
    return dataclasses.replace(
        profile,
        events=tuple(events),
        initial_bytes=profile.initial_bytes
        + sum(profile.storages[s].nbytes for s in stays),
        graph_end_event=moved[profile.graph_end_event],
        operations=tuple(
            dataclasses.replace(op, first_event=moved[op.first_event])
            for op in profile.operations
        ),
        storages=tuple(
            dataclasses.replace(
                _moved(s, s.id in stays, moved, after),
                nbytes=0 if s.id in passed else s.nbytes,
            )
            for s in profile.storages
        ),
    )


def _moved(
    storage: Storage, stays: bool, moved: list[int], after: tuple[int, ...]
) -> Storage:
    freed_at = moved[storage.freed_at] if storage.freed_at >= 0 else -1
    if not stays:
        begin = moved[storage.allocated_at] if storage.allocated_at >= 0 else -1
        return dataclasses.replace(storage, allocated_at=begin, freed_at=freed_at)
    state = storage.category is Category.OPTIMIZER_STATE
    movable = state and storage.nbytes >= MINIMUM_MAP_BYTES
    return dataclasses.replace(
        storage,
        producer=-1,
        allocated_at=-1,
        freed_at=freed_at,
        forward_uses=(),
        backward_uses=after if movable else (),
        releasable_from=0 if movable else -1,
        slots=(),
    )


def _first_gradients(profile: Profile, stays: set[int]) -> Iterator[int]:
    """Gradients that parameters have got when they were made; cleared later."""
    for s in stays:
        parameter = profile.storages[s]
        if parameter.category is not Category.PARAMETER:
            continue
        _, end = profile.span_of(parameter.producer)
        for event in profile.events[parameter.allocated_at + 1 : end]:
            other = profile.storages[abs(event) - 1]
            outlives = other.freed_at >= end
            if event > 0 and outlives and other.nbytes == parameter.nbytes:
                yield other.id
                break


def _initial_values(profile: Profile, stays: set[int]) -> Iterator[int]:
    """What only the making of parameters has used, such as random numbers.

    Chainer makes a parameter, fills it, and makes its gradient.
    """
    made: dict[int, int] = {}  # by operation, where the last array to stay is made
    for s in stays:
        storage = profile.storages[s]
        if storage.producer < profile.first_update:  # the update makes states
            last = made.get(storage.producer, -1)
            made[storage.producer] = max(last, storage.allocated_at)
    for operation, last in made.items():
        begin, _ = profile.span_of(operation)
        for event in profile.events[begin:last]:
            storage = profile.storages[abs(event) - 1]
            if event > 0 and begin <= storage.freed_at < last:
                yield storage.id


def _with_first_held(profile: Profile) -> Profile:
    """What the first backward function reads, and nothing lets go before that.

    Chainer's backward loop has it by then, so that a recording finds it held.
    """
    b0 = profile.first_backward

    def found_held(s: Storage) -> bool:
        last = max(s.forward_uses, default=s.producer)
        return last == b0 - 1 and b0 in s.backward_uses

    return dataclasses.replace(
        profile,
        storages=tuple(
            dataclasses.replace(s, releasable_from=-1) if found_held(s) else s
            for s in profile.storages
        ),
    )
