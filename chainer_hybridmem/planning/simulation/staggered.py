"""Equal processes on one link that are not in lockstep.

Synchronous training begins every iteration together, so lockstep is all there is: see
docs/internals/simulator.md. With double buffering (ChainerMN's ``double_buffering``)
gradients are summed one iteration late: processes may be half an iteration apart, and
while one copies out in its forward, another copies in in its backward. Then each has a
larger share of the link.

The link is shared among the processes whose bytes are on it in a direction; latencies
use nothing of it. Everything else is as in :func:`.lanes.time_lanes`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.records.plan import Plan, Tier
from chainer_hybridmem.planning.records.sharing import share_link, share_links
from chainer_hybridmem.planning.simulation.problem import Problem, with_profile
from chainer_hybridmem.planning.simulation.timeline import (
    find_moving,
    positions_from_plan,
    run_lanes,
)
from chainer_hybridmem.planning.simulation.work import Work

HOST, SUBMIT, AWAIT, COMPUTE = 0, 1, 2, 3
LANES = 'd2h', 'h2d', 'compute'
CLOSE = 1e-12  # seconds: what is left of rounding
NO_SPANS = np.zeros((0, 4))
ITERATIONS = 12  # of which the second half counts
SPREADS = 0.0, 0.3, 0.4, 0.5, 0.6, 0.7  # of an iteration, between the two halves


class Staggered(NamedTuple):
    """What equal processes reach that begin one after the other.

    Attributes:
        seconds (float): Per iteration, once it repeats itself.
        offsets (tuple of float): Seconds after which each of them begins first.
    """

    seconds: float
    offsets: tuple[float, ...]


class LaneSpan(NamedTuple):
    """Something that runs in one process.

    Attributes:
        rank (int): Of the process.
        lane (str): ``'d2h'``, ``'h2d'`` or ``'compute'``.
        begin (float): Seconds.
        end (float): Seconds.
    """

    rank: int
    lane: str
    begin: float
    end: float


class _IterationSteps(NamedTuple):
    """One iteration as steps.

    Shapes: S steps, C copies in each direction, in order of their queues.
    """

    kind: np.ndarray  # (S,) int64: HOST, SUBMIT, AWAIT or COMPUTE
    lane: np.ndarray  # (S,) int64: 0 out, 1 back
    place: np.ndarray  # (S,) int64: of the copy in its queue
    seconds: np.ndarray  # (S,) float64 of compute, or what the host needs
    host: np.ndarray  # (S,) float64, what the host needs for it
    latency: np.ndarray  # (2, C) float64
    on_link: np.ndarray  # (2, C) float64, seconds of the bytes on the whole link


def stagger(problem: Problem, plan: Plan, ranks: int) -> Staggered:
    """The best of some ways to begin: one half later, or all evenly spread.

    Args:
        problem: One process; however many its link is shared by, all of it is divided
            among ``ranks``.
        plan: Of each process.
        ranks: How many processes.
    """
    half = with_profile(problem, share_links(problem.profile, max(1, ranks // 2)))
    seconds = run_lanes(half, positions_from_plan(half, plan))
    ways = [tuple(r % 2 * spread for r in range(ranks)) for spread in SPREADS]
    ways += [tuple(2 * spread * r / ranks for r in range(ranks)) for spread in SPREADS]
    found = []
    for way in dict.fromkeys(ways):
        offsets = tuple(begin * seconds for begin in way)
        found.append(Staggered(staggered_seconds(problem, plan, offsets), offsets))
    return min(found)


def staggered_seconds(
    problem: Problem,
    plan: Plan,
    offsets: tuple[float, ...],
    iterations: int = ITERATIONS,
) -> float:
    """Seconds per iteration with double buffering, once it repeats itself.

    A process begins an iteration when it has ended the one before, and all have ended
    the one before that.

    Args:
        problem: One process; however many its link is shared by, all of it is divided
            among those there are.
        plan: Of each process.
        offsets: Seconds after which each process begins first.
        iterations: How many are simulated, two at least; the second half counts.

    Raises:
        PlanError: If the plan is for another profile.
    """
    ends = _run_ranks(problem, plan, offsets, iterations)
    half = iterations // 2
    return float(ends[-1] - ends[half - 1]) / (iterations - half)


def synchronous_seconds(
    problem: Problem, plan: Plan, offsets: tuple[float, ...]
) -> float:
    """Seconds of an iteration that ends for all when it has ended for the last one.

    Args:
        problem: As for :func:`staggered_seconds`.
        plan: Of each process.
        offsets: Seconds after which each process begins, in every iteration.

    Raises:
        PlanError: If the plan is for another profile.
    """
    return float(_run_ranks(problem, plan, offsets, 1)[0])


def find_spans(
    problem: Problem, plan: Plan, offsets: tuple[float, ...], iterations: int
) -> tuple[LaneSpan, ...]:
    """What runs when in each process, as in :func:`staggered_seconds`.

    Args:
        problem: As there.
        plan: Of each process.
        offsets: Seconds after which each process begins first.
        iterations: How many are simulated.

    Raises:
        PlanError: If the plan is for another profile.
    """
    lengths = (len(problem.maps), len(problem.maps), len(problem.arrays.seconds))
    spans = np.zeros((len(offsets) * iterations * sum(lengths), 4))
    _run_ranks(problem, plan, offsets, iterations, spans)
    return tuple(
        LaneSpan(int(rank), LANES[int(lane)], float(begin), float(end))
        for rank, lane, begin, end in spans.tolist()
        if end > begin
    )


def _run_ranks(
    problem: Problem,
    plan: Plan,
    offsets: tuple[float, ...],
    iterations: int,
    spans: np.ndarray = NO_SPANS,
) -> np.ndarray:
    """(iterations,) moments at which all processes have ended an iteration.

    Fills ``spans``, as far as there is place.
    """
    whole = with_profile(problem, share_links(problem.profile, 1))
    link = whole.profile.link
    shares = link.duplex_share, link.d2h_compute_share, link.h2d_compute_share
    starts = np.array(offsets, np.float64)
    ends = np.full((len(starts), iterations), np.inf)
    _run(_program(whole, plan), starts, shares, ends, spans)
    moments: np.ndarray = ends.max(axis=0)
    return moments


def _program(problem: Problem, plan: Plan) -> _IterationSteps:
    """The steps of an iteration, in the order of :func:`.lanes.time_lanes`."""
    work = positions_from_plan(problem, plan)
    a, moving = problem.arrays, find_moving(problem, work)
    swapped = np.nonzero(work.swap_out >= 0)[0].tolist()
    outs = sorted(swapped, key=lambda m: (int(work.swap_out[m]), m))
    ins = sorted(swapped, key=lambda m: (int(work.swap_in[m]), int(work.needed[m]), m))
    places = [{m: i for i, m in enumerate(queue)} for queue in (outs, ins)]
    steps: list[tuple[int, int, int, float, float]] = []
    for k in range(len(a.seconds)):
        steps.append((HOST, 0, 0, 0.0, 0.0))
        for lane, starts, waits in (
            (0, work.swap_out, work.release),
            (1, work.swap_in, work.needed),
        ):
            for m in (outs, ins)[lane]:
                if starts[m] == k:
                    issue = float(a.issue_seconds[m])
                    steps.append((SUBMIT, lane, places[lane][m], 0.0, issue))
            for m in swapped:
                if waits[m] == k:
                    steps.append((AWAIT, lane, places[lane][m], 0.0, 0.0))
        compute = float(a.seconds[k] + work.replay_seconds[k] + moving[k])
        host = float(a.host_seconds[k] + work.replay_host_seconds[k])
        steps.append((COMPUTE, 0, 0, compute, host))
    steps.append((HOST, 0, 0, 0.0, 0.0))
    numbers = np.array([step[:3] for step in steps], np.int64).T.copy()
    seconds = np.array([step[3:] for step in steps], np.float64).T.copy()
    return _IterationSteps(
        numbers[0],
        numbers[1],
        numbers[2],
        seconds[0],
        seconds[1],
        *_copies(problem, (outs, ins), work),
    )


def _copies(
    problem: Problem, queues: tuple[list[int], list[int]], work: Work
) -> tuple[np.ndarray, np.ndarray]:
    """Latencies, and seconds of the bytes on the whole link."""
    profile = problem.profile
    links = {Tier.RAM: share_link(profile.link, 1)}
    if profile.disk_link is not None:
        links[Tier.DISK] = share_link(profile.disk_link, 1)
    latency = np.zeros((2, len(queues[0])))
    on_link = np.zeros_like(latency)
    for lane, queue in enumerate(queues):
        for i, m in enumerate(queue):
            link = links[Tier.DISK if work.on_disk[m] else Tier.RAM]
            rate = (link.d2h_bytes_per_second, link.h2d_bytes_per_second)[lane]
            latency[lane, i] = link.latency_seconds
            on_link[lane, i] = problem.maps[m].nbytes / rate
    return latency, on_link


@compiled()
def _run(
    p: _IterationSteps,
    starts: np.ndarray,
    shares: tuple[float, float, float],
    ends: np.ndarray,
    spans: np.ndarray,
) -> None:
    """Writes the moments at which iterations end into ``ends``, (ranks, iterations).

    And (rank, lane, begin, end) into ``spans``, (rows, 4); lane 2 is compute.
    """
    n, iterations = ends.shape
    done = np.zeros(n, np.int64)  # iterations that have ended
    step = np.full(n, -1)  # of the program; -1: between iterations
    until = starts.copy()  # what is waited for
    work = np.zeros(n)  # of compute, left
    host = np.zeros(n)
    first = np.zeros((n, 2), np.int64)  # the copy under way
    last = np.zeros((n, 2), np.int64)  # the end of the queue
    latency = np.zeros((n, 2))  # of the copy under way, left
    on_link = np.zeros((n, 2))
    began = np.zeros((n, 3))  # what is under way in each lane
    written = 0  # of the spans
    duplex = shares[0]
    now = 0.0
    while True:
        # Everyone goes on that waits for nothing more.
        moved = True
        while moved:
            moved = False
            for r in range(n):
                if work[r] > 0 or until[r] > now + CLOSE or done[r] == iterations:
                    continue
                if step[r] < 0:
                    if done.min() < done[r] - 1:
                        continue
                    step[r], host[r], moved = 0, now, True
                    first[r], last[r] = 0, 0
                while step[r] < len(p.kind):
                    s = step[r]
                    lane, place = p.lane[s], p.place[s]
                    if p.kind[s] == AWAIT and first[r, lane] <= place:
                        break
                    step[r] += 1
                    moved = True
                    if p.kind[s] == SUBMIT:
                        if first[r, lane] == last[r, lane]:
                            latency[r, lane] = p.latency[lane, place]
                            on_link[r, lane] = p.on_link[lane, place]
                            began[r, lane] = now
                        last[r, lane] += 1
                        host[r] += p.host[s]
                    elif p.kind[s] == HOST and host[r] > now:
                        until[r] = host[r]
                        break
                    elif p.kind[s] == COMPUTE:
                        host[r] += p.host[s]
                        work[r] = p.seconds[s]
                        began[r, 2] = now
                        if work[r] > 0:
                            break
                ended = step[r] == len(p.kind) and work[r] <= 0
                if ended and until[r] <= now + CLOSE:
                    ends[r, done[r]] = now
                    done[r] += 1
                    step[r] = -1
                    moved = True
        if done.min() == iterations:
            return
        # How fast it all goes until the next event.
        busy = np.zeros(2, np.int64)
        sharing = np.zeros(2, np.int64)
        for r in range(n):
            for lane in range(2):
                if first[r, lane] < last[r, lane]:
                    busy[lane] += 1
                    sharing[lane] += latency[r, lane] <= 0
        slowed = duplex if busy[0] > 0 and busy[1] > 0 else 1.0
        span = np.inf
        for r in range(n):
            speed = 1.0
            for lane in range(2):
                if first[r, lane] < last[r, lane]:
                    speed *= shares[1 + lane]
                    left = latency[r, lane]
                    if left <= 0:
                        left = on_link[r, lane] * sharing[lane]
                    span = min(span, left / slowed)
            if work[r] > 0:
                span = min(span, work[r] / speed)
            elif until[r] > now:
                span = min(span, until[r] - now)
        now += span
        for r in range(n):
            speed = 1.0
            for lane in range(2):
                if first[r, lane] == last[r, lane]:
                    continue
                speed *= shares[1 + lane]
                if latency[r, lane] > 0:
                    latency[r, lane] -= span * slowed
                else:
                    on_link[r, lane] -= span * slowed / sharing[lane]
                if latency[r, lane] <= CLOSE and on_link[r, lane] <= CLOSE:
                    if written < len(spans):
                        spans[written, 0], spans[written, 1] = r, lane
                        spans[written, 2], spans[written, 3] = began[r, lane], now
                        written += 1
                    began[r, lane] = now
                    first[r, lane] += 1
                    place = first[r, lane]
                    if place < last[r, lane]:
                        latency[r, lane] = p.latency[lane, place]
                        on_link[r, lane] = p.on_link[lane, place]
                elif latency[r, lane] <= CLOSE:
                    latency[r, lane] = 0.0
            if work[r] > 0:
                work[r] -= span * speed
                if work[r] <= CLOSE:
                    work[r] = 0.0
                    if written < len(spans):
                        spans[written, 0], spans[written, 1] = r, 2
                        spans[written, 2], spans[written, 3] = began[r, 2], now
                        written += 1
