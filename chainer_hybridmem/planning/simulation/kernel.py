"""The compiled inner loop: positions from actions, times from positions.

Two steps, each linear in the operations and in the length of the replays:

``evaluate``
    decides *where* everything happens: in forward, finished swap-outs are
    released when memory is asked for, oldest first; in backward, replays come
    just in time, swap-outs still under way are released as they finish, and
    swap-ins start as early as memory allows, in order of need (Ito et al.,
    section 4.3). Then it asks :func:`.lanes.time_lanes`. ``judge`` asks it
    once or twice.
:func:`.lanes.time_lanes`
    decides *when*.

Both write into a :class:`.work.Work` and run compiled as a whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.simulation import (
    arrays,
    lanes,
    obedience,
    replays,
    work,
)
from chainer_hybridmem.planning.simulation.arrays import ProblemArrays
from chainer_hybridmem.planning.simulation.lanes import list_by, time_lanes
from chainer_hybridmem.planning.simulation.obedience import breaks_rules
from chainer_hybridmem.planning.simulation.replays import lay_out_replays
from chainer_hybridmem.planning.simulation.work import (
    KEEP,
    NEED,
    RECOMPUTE,
    SWAP,
    Result,
    Work,
)


# -- where swap-ins begin -----------------------------------------------------
@compiled(inline=True, counted=False, uses=(work,))
def place_swap_ins(a: ProblemArrays, limit: int, lead: np.ndarray, w: Work) -> Any:
    """Swap-ins as early as memory allows, in order of need; the highest load.

    No swap-in starts before an earlier one, so what is before its start is settled.
    ``record`` lists, among the positions after that, those with no higher load behind
    them: only these can stop a swap-in, and a swap-in adds to all of them (``added``).
    """
    load, extra = w.load, w.extra
    release, swap_in = w.release, w.swap_in
    need_heads, need_following = w.heads[NEED], w.following[NEED]
    record = w.record
    size, fixed_peak = a.size, a.fixed_peak
    n, b0 = len(a.seconds), a.first_backward
    peak, worst = 0, 0
    previous, added, first, records = b0, 0, 0, 0
    for at in range(b0, n):
        m = need_heads[at]
        while m >= 0:
            room = limit - size[m] - added
            k = min(at, max(previous, lead[at], release[m]))
            while first < records and (record[first] < k or load[record[first]] > room):
                q = record[first]
                first += 1
                k = max(k, q + 1)
                if load[q] + added > peak:
                    peak, worst = load[q] + added, q
            added += size[m]
            swap_in[m] = previous = k
            m = need_following[m]
        load[at] += max(fixed_peak[at], extra[at]) - added
        while first < records and load[record[records - 1]] < load[at]:
            records -= 1
        record[records] = at
        records += 1
    for r in range(first, records):
        if load[record[r]] + added > peak:
            peak, worst = load[record[r]] + added, record[r]
    return peak, worst


# -- where swapped maps leave, and where their host copies lie ----------------
@compiled(inline=True, counted=False, uses=(work,))
def share_out_host(
    a: ProblemArrays,
    action: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    w: Work,
) -> float:
    """Host copies go to RAM while it has room for them, then to the disk.

    Who is needed first comes first: early maps have the longest time to come back.
    Returns the seconds to add where there is no disk: so many that no search keeps
    such a candidate, and fewer the less there is too much, so that it finds out.
    """
    room, total, beyond = a.host_limit, 0, 0
    for i in range(len(action)):
        m = a.by_host[i]
        w.on_disk[m] = action[m] == SWAP and a.size[m] > room
        w.out_seconds[m], w.in_seconds[m] = out_seconds[m], in_seconds[m]
        total += a.size[m]
        if w.on_disk[m]:
            beyond += a.size[m]
            if out_seconds[m] > 0:  # a copy for nothing is for nothing anywhere
                w.out_seconds[m] = a.disk_out_seconds[m]
            if in_seconds[m] > 0:
                w.in_seconds[m] = a.disk_in_seconds[m]
        elif action[m] == SWAP:
            room -= a.size[m]
    return a.beyond_seconds * (1.0 + beyond / total) if beyond > 0 else 0.0


@compiled(inline=True, counted=False, uses=(work,))
def leave_in_forward(
    a: ProblemArrays, action: np.ndarray, limit: int, out_seconds: np.ndarray, w: Work
) -> Any:
    """Release positions during forward: peak, its operation, time at the end.

    A finished swap-out is released only when memory is asked for, oldest first.
    """
    release, out_end = w.release, w.ended[0]
    size, release_from, copy_from = a.size, a.release_from, a.copy_from
    by_copy, by_release, by_producer = a.by_copy, a.by_release, a.by_producer
    fixed_peak, seconds, producer = a.fixed_peak, a.seconds, a.producer
    b0, n_maps = a.first_backward, len(action)
    load, peak, worst = 0, 0, 0
    born, dropped, started, head = 0, 0, 0, 0
    now, link_free = 0.0, 0.0
    while born < n_maps and producer[by_producer[born]] < 0:
        load += size[by_producer[born]]
        born += 1
    for k in range(b0):
        while started < n_maps and copy_from[by_copy[started]] <= k:
            m = by_copy[started]
            if action[m] == SWAP:
                link_free = max(now, link_free) + out_seconds[m]
                out_end[m] = link_free
            started += 1
        while dropped < n_maps and release_from[by_release[dropped]] <= k:
            m = by_release[dropped]
            if action[m] >= RECOMPUTE:
                load -= size[m]
                release[m] = release_from[m]
            dropped += 1
        i = head
        while load + fixed_peak[k] > limit and i < started:
            m = by_copy[i]
            if action[m] == SWAP and release[m] < 0 and release_from[m] <= k:
                release[m] = k
                load -= size[m]
                now = max(now, out_end[m])
            i += 1
        while head < started:
            m = by_copy[head]
            if action[m] == SWAP and release[m] < 0:
                break
            head += 1
        if load + fixed_peak[k] > peak:
            peak, worst = load + fixed_peak[k], k
        while born < n_maps and producer[by_producer[born]] <= k:
            load += size[by_producer[born]]
            born += 1
        now += seconds[k]
    while started < n_maps:
        m = by_copy[started]
        if action[m] == SWAP:
            link_free = max(now, link_free) + out_seconds[m]
            out_end[m] = link_free
        started += 1
    return peak, worst, now


@compiled(inline=True, counted=False, uses=(work,))
def leave_in_backward(
    a: ProblemArrays, action: np.ndarray, limit: int, now: float, w: Work
) -> None:
    """Release positions in backward: as swap-outs finish, sooner where memory asks.

    Without a barrier, backward begins while copies are still under way.
    ``load`` gets what they hold until then.
    """
    release = w.release
    out_end = w.ended[0]
    load, extra = w.load, w.extra
    need_heads, need_following = w.heads[NEED], w.following[NEED]
    by_copy, size, fixed_peak = a.by_copy, a.size, a.fixed_peak
    n_maps = len(action)
    held, head = 0, 0
    for m in range(n_maps):
        if action[m] == SWAP and release[m] < 0:
            held += size[m]
    for k in range(a.first_backward, len(a.seconds)):
        if held == 0:
            break
        m = need_heads[k]
        while m >= 0:  # needed at once: it has to have left before
            if release[m] < 0:
                release[m] = k
                held -= size[m]
                now = max(now, out_end[m])
            m = need_following[m]
        need = load[k] + max(fixed_peak[k], extra[k])
        while head < n_maps:
            m = by_copy[head]
            if action[m] == SWAP and release[m] < 0:
                if out_end[m] > now and need + held <= limit:
                    break
                release[m] = k
                held -= size[m]
                now = max(now, out_end[m])
            head += 1
        load[k] += held
        now += w.replay_seconds[k] + a.seconds[k]


# -- the whole ----------------------------------------------------------------
# Share of a least time that no rounding of sums can make too much.
SURELY = 1 - 1e-9
# What is compiled into an evaluation; see ``uses`` of :func:`.jit.compiled`.
PARTS = (arrays, lanes, obedience, replays, work)


_i64, _f64, _bool = types.int64, types.float64, types.boolean


@compiled(
    types.Tuple((_f64, _i64, _i64, _i64, _bool))(
        ProblemArrays.compiled,
        _i64[::1],
        _i64,
        _i64[::1],
        _f64[::1],
        _f64[::1],
        _bool,
        _bool,
        _f64,
        Work.compiled,
    ),
    apart=True,
    counted=False,
    uses=PARTS,
)
def evaluate(
    a: ProblemArrays,
    action: np.ndarray,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    collective: bool,
    barrier: bool,
    ceiling: float,
    w: Work,
) -> Result:
    """Positions and times for an assignment of actions.

    What does not fit, or takes longer than ``ceiling`` for sure, is given up as soon
    as that is known: the positions are then unfinished, and the peak is what it was
    so far. With an infinite ceiling nothing is given up.

    Args:
        a: The problem's arrays. If host copies in RAM are limited, this shares it out.
        action: (M,) KEEP, SWAP, RECOMPUTE, LATE or PASSED.
        limit: Memory limit in bytes.
        lead: (n,) earliest position at which a swap-in that is needed at an
            operation may start.
        out_seconds: (M,) seconds of each swap-out.
        in_seconds: (M,) seconds of each swap-in.
        collective: Whether what a replay passes stays when it is needed later
            and memory allows (Capuchin's collective recompute).
        barrier: Whether backward starts when every swap-out has finished (Ito
            et al., section 3.1).
        ceiling: Seconds above which it does not matter how many.
        w: Where positions and times go.

    Returns:
        tuple: The fields of an :class:`.Outcome`; it fits if the seconds are finite.
    """
    b0, n_maps = a.first_backward, len(action)
    load = w.load
    w.replay_seconds[:] = 0
    w.replay_host_seconds[:] = 0
    load[:] = 0
    w.extra[:] = 0
    w.mark[:] = -1
    for m in range(n_maps):
        w.release[m] = w.swap_in[m] = -1
        w.made[m], w.passed[m] = False, 0
        w.swap_out[m] = a.copy_from[m] if action[m] == SWAP else -1
    beyond = 0.0
    if a.tiered:
        beyond = share_out_host(a, action, out_seconds, in_seconds, w)
        out_seconds, in_seconds = w.out_seconds, w.in_seconds
    peak, worst, now = leave_in_forward(a, action, limit, out_seconds, w)
    hasty, least = ceiling < np.inf, now + a.backward_seconds + beyond
    if hasty and (peak > limit or least * SURELY > ceiling):
        return np.inf, peak, worst, 0, collective

    # Loads that must be there: each map over its own uses.
    for m in range(n_maps):
        first = b0 if action[m] == KEEP else a.first_use[m]
        w.needed[m] = -1 if action[m] == KEEP else first
        w.drop[m] = a.last_use[m] + 1
        load[first] += a.size[m]
        load[w.drop[m]] -= a.size[m]
        if action[m] >= RECOMPUTE and w.release[m] < 0:
            w.release[m] = b0
    entries = lay_out_replays(a, action, limit, collective, w)
    if entries < 0:
        return np.inf, limit + 1, -1 - entries, 0, collective
    if hasty and (least + w.replay_seconds[b0:].sum()) * SURELY > ceiling:
        return np.inf, peak, worst, entries, collective
    heads, following = w.heads[NEED], w.following[NEED]
    list_by(w.needed, w.swap_out, heads, following)
    if barrier:
        for m in range(n_maps):
            if action[m] == SWAP and w.release[m] < 0:
                w.release[m] = b0
    else:
        leave_in_backward(a, action, limit, now, w)
    high, where = place_swap_ins(a, limit, lead, w)
    if high > peak:
        peak, worst = high, where
    if peak > limit:
        return np.inf, peak, worst, entries, collective
    seconds = time_lanes(a, out_seconds, in_seconds, w) + beyond
    return seconds, peak, worst, entries, collective


@compiled(
    types.Tuple((_f64, _i64, _i64, _i64, _bool))(
        ProblemArrays.compiled,
        _i64[::1],
        _i64,
        _i64[::1],
        _f64[::1],
        _f64[::1],
        _bool,
        _f64,
        Work.compiled,
    ),
    apart=True,
    counted=False,
    uses=PARTS,
)
def judge(
    a: ProblemArrays,
    action: np.ndarray,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    barrier: bool,
    ceiling: float,
    w: Work,
) -> Result:
    """What ``evaluate`` says: replays keep what they pass, unless that does not fit.

    Without retention no chain is shorter: what forward's memory or ``ceiling`` has
    ruled out needs no second look. What breaks a rule does not fit.
    """
    if a.ruled and breaks_rules(a, action):
        return np.inf, limit + 1, 0, 0, True
    outcome = evaluate(
        a, action, limit, lead, out_seconds, in_seconds, True, barrier, ceiling, w
    )
    _, peak, worst, entries, _ = outcome
    if peak <= limit or entries == 0:
        return outcome
    if ceiling < np.inf and worst < a.first_backward:
        return outcome
    bare = evaluate(
        a, action, limit, lead, out_seconds, in_seconds, False, barrier, ceiling, w
    )
    return bare if bare[1] < peak else outcome
