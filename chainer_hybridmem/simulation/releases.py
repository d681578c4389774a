"""Compiled: where swapped maps leave, and where their host copies lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.simulation import work
from chainer_hybridmem.simulation.arrays import Arrays
from chainer_hybridmem.simulation.work import NEED, RECOMPUTE, SWAP, Work


@compiled(inline=True, counted=False, uses=(work,))
def share_out_host(
    a: Arrays,
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
    a: Arrays, action: np.ndarray, limit: int, out_seconds: np.ndarray, w: Work
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
            if action[m] == RECOMPUTE:
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
    a: Arrays, action: np.ndarray, limit: int, now: float, w: Work
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
