"""Several processes on one link to host memory: the reference for shared links.

Independent of ``planning/simulation/lanes.py``: every rank walks through the positions
of its plan by itself, and time passes for all of them at once, from one event to the
next. What is under way is work that is left, at a speed that holds until the next
event:

- A copy first has its latency, which uses nothing of the link, then its bytes. Of the
  ranks whose bytes are on the link in a direction, each has an equal share.
- While copies of both directions are under way, of any rank, each direction carries
  ``duplex_share`` of what it could.
- Compute of a rank is slower beside its own copies only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.simulation import Problem

CLOSE = 1e-12  # of a second: what is left of rounding


@dataclasses.dataclass
class Copy:
    """A copy that waits for its lane or is under way."""

    latency: float
    seconds: float  # of its bytes, at the whole rate of the link
    done: bool = False


class Rank:
    """One process: its compute, its host, its two queues of copies."""

    def __init__(self, problem: Problem, plan: Plan, starts: Sequence[float]) -> None:
        self.problem, self.plan = problem, plan
        self.earliest = list(starts)
        self.queues: tuple[list[Copy], list[Copy]] = ([], [])
        self.work = 0.0  # seconds of compute that are left
        self.until = -math.inf  # moment that is waited for
        self.awaited: Copy | None = None
        self.ends: list[float] = []
        self.starts: list[float] = []

    def iteration(self, now: list[float]) -> Iterator[None]:
        """Walks through an iteration; pauses where it waits. ``now`` holds the time."""
        a, link = self.problem.arrays, self.problem.profile.link
        sizes = {s.id: s.nbytes for s in self.problem.maps}
        seconds = {r.operation: r.seconds for r in self.problem.profile.recipes}
        swapped = [m for m in self.plan.maps if m.action is Action.SWAP]
        out = {m.storage: Copy(link.latency_seconds,
                               sizes[m.storage] / link.d2h_bytes_per_second)
               for m in swapped}  # fmt: skip
        back = {m.storage: Copy(link.latency_seconds,
                                sizes[m.storage] / link.h2d_bytes_per_second)
                for m in swapped}  # fmt: skip
        host = now[0]
        ins = sorted(swapped, key=lambda m: (m.swap_in_before, m.needed_before))
        for op in self.problem.profile.operations:
            k = op.index
            self.until = host
            if host > now[0]:
                yield
            for m in swapped:
                if m.swap_out_before == k:
                    self.queues[0].append(out[m.storage])
                    host += a.issue_seconds[0]
            for m in swapped:
                if m.release_before == k:
                    self.awaited = out[m.storage]
                    if not self.awaited.done:
                        yield
            for m in ins:
                if m.swap_in_before == k:
                    self.queues[1].append(back[m.storage])
                    host += a.issue_seconds[0]
            for m in swapped:
                if m.needed_before == k:
                    self.awaited = back[m.storage]
                    if not self.awaited.done:
                        yield
            replays = [r.operation for r in self.plan.replays if r.before == k]
            self.work = op.device_seconds + sum(seconds[r] for r in replays)
            if self.work > 0:
                yield
            host += op.host_seconds
            host += sum(
                self.problem.profile.operations[r].host_seconds for r in replays
            )
        self.until = host
        if host > now[0]:
            yield

    @property
    def waiting(self) -> bool:
        return self.awaited is not None and not self.awaited.done


def run(
    problem: Problem,
    plans: Sequence[Plan],
    offsets: Sequence[float],
    iterations: int = 1,
    late: int = 1,
) -> list[Rank]:
    """Runs ranks that share one link; the whole link is that of ``problem``.

    Args:
        problem: One process, with the link that all of them share.
        plans: Of each rank.
        offsets: Seconds after which each rank begins.
        iterations: Of each rank.
        late: An iteration begins when all ranks have ended the one so many before: 1
            is synchronous training, 2 is with double buffering.
    """
    ranks = [
        Rank(problem, plan, [start]) for plan, start in zip(plans, offsets, strict=True)
    ]
    now = [0.0]
    walks: list[Iterator[None] | None] = [None] * len(ranks)
    link = problem.profile.link
    shares = link.d2h_compute_share, link.h2d_compute_share

    def may_begin(rank: Rank) -> bool:
        number = len(rank.starts)
        if number >= iterations or now[0] < rank.earliest[0] - CLOSE:
            return False
        return all(len(other.ends) >= number + 1 - late for other in ranks)

    def proceed() -> None:
        """Lets every rank go on that waits for nothing more."""
        again = True
        while again:
            again = False
            for r, rank in enumerate(ranks):
                if walks[r] is None and may_begin(rank):
                    rank.starts.append(now[0])
                    walks[r] = rank.iteration(now)
                walk = walks[r]
                if walk is None:
                    continue
                if rank.waiting or rank.work > 0 or rank.until > now[0] + CLOSE:
                    continue
                again = True
                if next(walk, True):
                    rank.ends.append(now[0])
                    walks[r] = None

    proceed()
    while any(len(rank.ends) < iterations for rank in ranks):
        busy = [any(rank.queues[d] for rank in ranks) for d in (0, 1)]
        slowed = link.duplex_share if all(busy) else 1.0
        on_link = [
            sum(
                1 for rank in ranks if rank.queues[d] and rank.queues[d][0].latency <= 0
            )
            for d in (0, 1)
        ]
        step = math.inf
        speeds = []
        for r, rank in enumerate(ranks):
            speed = 1.0
            for d in (0, 1):
                if rank.queues[d]:
                    copy = rank.queues[d][0]
                    speed *= shares[d]
                    left = (
                        copy.latency / slowed
                        if copy.latency > 0
                        else copy.seconds * on_link[d] / slowed
                    )
                    step = min(step, left)
            speeds.append(speed)
            if walks[r] is None:
                if rank.earliest[0] > now[0] and not rank.starts:
                    step = min(step, rank.earliest[0] - now[0])
            elif rank.work > 0:
                step = min(step, rank.work / speed)
            elif rank.until > now[0]:
                step = min(step, rank.until - now[0])
        assert step < math.inf, 'nothing goes on'
        now[0] += step
        for rank, speed in zip(ranks, speeds, strict=True):
            if rank.work > 0:
                rank.work -= step * speed
                rank.work = 0.0 if rank.work < CLOSE else rank.work
            for d in (0, 1):
                if not rank.queues[d]:
                    continue
                copy = rank.queues[d][0]
                if copy.latency > 0:
                    copy.latency -= step * slowed
                    copy.latency = 0.0 if copy.latency < CLOSE else copy.latency
                else:
                    copy.seconds -= step * slowed / on_link[d]
                    copy.seconds = 0.0 if copy.seconds < CLOSE else copy.seconds
                if copy.latency <= 0 and copy.seconds <= 0:
                    copy.done = True
                    rank.queues[d].pop(0)
        proceed()
    return ranks


def seconds_of(problem: Problem, plan: Plan, ranks: int, delta: float = 0.0) -> float:
    """From the first begin to the last end of one synchronous iteration."""
    offsets = [r * delta for r in range(ranks)]
    found = run(problem, [plan] * ranks, offsets)
    return max(rank.ends[-1] for rank in found)


def steady_seconds(
    problem: Problem, plan: Plan, offsets: Sequence[float], iterations: int = 12
) -> float:
    """Seconds per iteration with double buffering, over the second half."""
    found = run(problem, [plan] * len(offsets), offsets, iterations, late=2)
    half = iterations // 2
    last = max(rank.ends[-1] for rank in found)
    middle = max(rank.ends[half - 1] for rank in found)
    return (last - middle) / (iterations - half)
