"""Compiled: times from positions.

One lane for the host, which issues everything, one for compute, one per copy
direction.
"""

from __future__ import annotations

import numpy as np
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.simulation import work
from chainer_hybridmem.planning.simulation.arrays import ProblemArrays
from chainer_hybridmem.planning.simulation.work import IN, LEAVE, NEED, OUT, Work

_floats = types.float64[::1]


@compiled(inline=True, counted=False, uses=(work,))
def list_by(
    position: np.ndarray, swap_out: np.ndarray, heads: np.ndarray, following: np.ndarray
) -> None:
    """Lists of swapped maps per position, each by number."""
    heads[:] = -1
    for m in range(len(position) - 1, -1, -1):
        if swap_out[m] >= 0:
            following[m] = heads[position[m]]
            heads[position[m]] = m


@compiled(inline=True, counted=False, uses=(work,))
def _list_swap_ins(w: Work) -> None:
    """Lists of swapped maps per start of their swap-in, in order of need."""
    heads, following, tails = w.heads[IN], w.following[IN], w.tails
    swap_in = w.swap_in
    need_heads, need_following = w.heads[NEED], w.following[NEED]
    heads[:] = -1
    for k in range(len(w.replay_seconds)):
        m = need_heads[k]
        while m >= 0:
            at = swap_in[m]
            if heads[at] < 0:
                heads[at] = m
            else:
                following[tails[at]] = m
            following[m] = -1
            tails[at] = m
            m = need_following[m]


@compiled(
    types.float64(ProblemArrays.compiled, _floats, _floats, Work.compiled),
    apart=True,
    counted=False,
    uses=(work,),
)
def time_lanes(
    a: ProblemArrays, out_seconds: np.ndarray, in_seconds: np.ndarray, w: Work
) -> float:
    """Start of every operation and copy for the positions in ``w``; the total.

    Before operation k, in this order: the host issues what comes before it,
    swap-outs start, releases wait for their copy, swap-ins start, needed maps are
    waited for, replays run. What the program's thread spends on copies that start takes
    its time then, where issuing is computing. Time passes in one place, from the end of
    one copy to the next, because copies slow each other and compute down.
    """
    heads, following = w.heads, w.following
    swap_out = w.swap_out
    list_by(swap_out, swap_out, heads[OUT], following[OUT])
    list_by(w.release, swap_out, heads[LEAVE], following[LEAVE])
    list_by(w.needed, swap_out, heads[NEED], following[NEED])
    _list_swap_ins(w)
    began, ended, stalls = w.began, w.ended, w.stalls
    host_stall, start, stop = w.host_stall, w.start, w.stop
    alone, copies = w.alone, w.copies
    head, tail, ends_at = w.head, w.tail, w.ends_at
    seconds, host_seconds = a.seconds, a.host_seconds
    replay_seconds = w.replay_seconds
    replay_host = w.replay_host_seconds
    duplex, shares = a.duplex_share, (a.out_compute_share, a.in_compute_share)
    alike = shares[0] == 1.0 and shares[1] == 1.0
    stalls[:] = 0.0
    ended[:] = -1.0
    ends_at[:] = np.inf  # of the copy under way; infinite: the lane is idle
    head[:] = 0
    tail[:] = 0
    now, host = 0.0, 0.0
    for k in range(len(seconds)):
        moving = 0.0
        for stage in range(4):
            # What is waited for: the host, copies out, copies in, compute.
            lane, target, until, speed = stage - 1, -1, np.inf, 1.0
            if stage == 0:
                until = max(now, host)
                host_stall[k] = until - now
            elif stage == 3:
                start[k] = now
                if not alike:
                    for beside in range(2):
                        if ends_at[beside] < np.inf:
                            speed *= shares[beside]
                until = now + (replay_seconds[k] + seconds[k] + moving) / speed
            else:
                m = heads[OUT if lane == 0 else IN, k]
                while m >= 0:
                    host += a.issue_seconds[m]
                    moving += a.move_seconds[m]
                    copies[lane, tail[lane]] = m
                    tail[lane] += 1
                    alone[lane, m] = out_seconds[m] if lane == 0 else in_seconds[m]
                    if ends_at[lane] == np.inf:
                        began[lane, m] = now
                        ends_at[lane] = now + alone[lane, m]
                        if duplex < 1 and ends_at[1 - lane] < np.inf:
                            ends_at[lane] = now + alone[lane, m] / duplex
                            left = ends_at[1 - lane] - now
                            ends_at[1 - lane] = now + left / duplex
                    m = following[OUT if lane == 0 else IN, m]
                target = heads[LEAVE if lane == 0 else NEED, k]
                if target < 0:
                    continue
            while True:
                if stage == 1 or stage == 2:
                    while target >= 0 and ended[lane, target] >= 0:
                        if ended[lane, target] > now:
                            stalls[lane, target] = ended[lane, target] - now
                            now = ended[lane, target]
                        target = following[LEAVE if lane == 0 else NEED, target]
                    if target < 0:
                        break
                first = 0 if ends_at[0] <= ends_at[1] else 1
                moment = ends_at[first]
                if moment > until:
                    break
                # A copy ends, and the next one of its lane starts.
                other = 1 - first
                shared = duplex < 1 and ends_at[other] < np.inf
                ended[first, copies[first, head[first]]] = moment
                head[first] += 1
                if head[first] < tail[first]:
                    m = copies[first, head[first]]
                    began[first, m] = moment
                    ends_at[first] = moment + alone[first, m]
                    if shared:
                        ends_at[first] = moment + alone[first, m] / duplex
                    continue
                ends_at[first] = np.inf
                if shared:
                    ends_at[other] = moment + (ends_at[other] - moment) * duplex
                if stage == 3 and not alike:
                    until = moment + (until - moment) * shares[first]
            if stage == 0 or stage == 3:
                now = until
        stop[k] = now
        host += replay_host[k] + host_seconds[k]
    return max(now, host)
