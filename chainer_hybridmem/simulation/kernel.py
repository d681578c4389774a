"""The compiled inner loop: positions from actions, times from positions.

Two steps, each linear in the operations for a bounded number of maps alive:

``schedule``
    decides *where* everything happens, from memory alone: the released-by
    position of each swap-out, replays, and each swap-in as early as memory
    allows, in order of need (Ito et al., section 4.3).
``times``
    decides *when*: one compute lane, one lane per copy direction.

Notation as in :mod:`chainer_hybridmem.simulation.problem`; ``-1`` is "never".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.simulation.problem import Arrays

KEEP, SWAP, RECOMPUTE = 0, 1, 2
# Kinds of entries in a replay program.
RUN, STAY, FREE = 0, 1, 2


class Positions(NamedTuple):
    """Where each map is released, taken back and dropped; (M,) int64 each."""

    swap_out: np.ndarray
    release: np.ndarray
    swap_in: np.ndarray
    needed: np.ndarray
    drop: np.ndarray
    program: np.ndarray  # (P, 3): position, RUN/STAY/FREE, operation or item
    replay_seconds: np.ndarray  # (n,)
    peak_bytes: int
    worst: int  # operation with the highest load


class Times(NamedTuple):
    """When operations run and copies are under way, in seconds."""

    total_seconds: float
    start: np.ndarray  # (n,) compute start, replays included
    release_stall: np.ndarray  # (M,) compute waited for this swap-out
    need_stall: np.ndarray  # (M,) compute waited for this swap-in
    out_start: np.ndarray  # (M,)
    out_end: np.ndarray  # (M,)
    in_start: np.ndarray  # (M,)
    in_end: np.ndarray  # (M,)


@compiled()
def _order_by(keys: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Indices of chosen entries, by ascending key, ties by index."""
    picked = np.nonzero(chosen)[0]
    return picked[np.argsort(keys[picked], kind='mergesort')]


@compiled()
def _forward(a: Arrays, action: np.ndarray, limit: int, release: np.ndarray) -> Any:
    """Release positions during forward; highest load and its operation.

    A finished swap-out is released only when memory is asked for, oldest
    first, and all are at the first backward operation (Ito et al., section
    3.1: backward starts when every swap-out has finished).
    """
    b0 = a.first_backward
    n_maps = len(action)
    born = np.argsort(a.producer[:n_maps], kind='mergesort')
    queue = _order_by(a.copy_from, action == SWAP)
    dropped = _order_by(a.release_from, action == RECOMPUTE)
    load, peak, worst = 0, 0, 0
    born_at, drop_at, head = 0, 0, 0
    for k in range(b0):
        while drop_at < len(dropped) and a.release_from[dropped[drop_at]] <= k:
            load -= a.size[dropped[drop_at]]
            release[dropped[drop_at]] = a.release_from[dropped[drop_at]]
            drop_at += 1
        i = head
        while load + a.fixed_peak[k] > limit and i < len(queue):
            m = queue[i]
            if a.copy_from[m] > k:
                break
            if release[m] < 0 and a.release_from[m] <= k:
                release[m] = k
                load -= a.size[m]
            i += 1
        while head < len(queue) and release[queue[head]] >= 0:
            head += 1
        if load + a.fixed_peak[k] > peak:
            peak, worst = load + a.fixed_peak[k], k
        while born_at < n_maps and a.producer[born[born_at]] <= k:
            load += a.size[born[born_at]]
            born_at += 1
    for m in range(n_maps):
        if action[m] != KEEP and release[m] < 0:
            release[m] = b0
    return peak, worst


@compiled()
def _chain(
    a: Arrays,
    n_maps: int,
    target: int,
    available: np.ndarray,
    mark: np.ndarray,
    stamp: int,
    chain: np.ndarray,
    length: int,
) -> int:
    """Appends the operations to replay for one item, sources first.

    ``mark[operation] == stamp`` says that it is in this chain already: the
    memo without which residual networks cost exponential time. Returns the
    new length, or -1 if an operation on the way has no recipe.
    """
    stack = np.empty(2 * len(a.seconds) + 2, np.int64)
    stack[0] = a.producer[target]
    top = 1
    while top > 0:
        op = stack[top - 1]
        if mark[op] == stamp:
            top -= 1
            continue
        if a.recipe_seconds[op] < 0:
            return -1
        pushed = False
        for j in range(a.input_ptr[op], a.input_ptr[op + 1]):
            item = a.inputs[j]
            source = a.producer[item]
            if not available[item] and mark[source] != stamp:
                if source >= op or top >= len(stack):
                    return -1
                stack[top] = source
                top += 1
                pushed = True
                break
        if not pushed:
            mark[op] = stamp
            chain[length] = op
            length += 1
            top -= 1
    return length


@compiled()
def schedule(
    a: Arrays,
    action: np.ndarray,
    limit: int,
    lead: np.ndarray,
    collective: bool,
) -> Any:
    """Positions for an assignment of actions.

    Args:
        a: The problem's arrays.
        action: (M,) KEEP, SWAP or RECOMPUTE.
        limit: Memory limit in bytes.
        lead: (n,) earliest position at which a swap-in that is needed at an
            operation may start.
        collective: Whether what a replay passes stays when it is needed later
            and memory allows (Capuchin's collective recompute).

    Returns:
        Positions. Feasible if ``peak_bytes <= limit`` and ``worst >= 0``.
    """
    n, b0, n_maps = len(a.seconds), a.first_backward, len(action)
    n_items = len(a.size)
    release = np.full(n_maps, -1, np.int64)
    swap_in = np.full(n_maps, -1, np.int64)
    needed = np.full(n_maps, -1, np.int64)
    drop = np.full(n_maps, -1, np.int64)
    swap_out = np.where(action == SWAP, a.copy_from, -1)
    replay_seconds = np.zeros(n)
    peak, worst = _forward(a, action, limit, release)

    # Loads that must be there: each map over its own uses.
    load = np.zeros(n + 1, np.int64)
    for m in range(n_maps):
        first = b0 if action[m] == KEEP else a.first_use[m]
        needed[m] = -1 if action[m] == KEEP else first
        drop[m] = a.last_use[m] + 1
        for k in range(first, drop[m]):
            load[k] += a.size[m]

    # Replays, in order of need.
    chain_extra = np.zeros(n + 1, np.int64)  # above what is loaded at k
    program = np.empty((64, 3), np.int64)
    written = 0
    mark = np.full(n, -1, np.int64)
    available = a.present.copy()
    count = np.zeros(n_items, np.int64)
    stays = np.zeros(n_items, np.bool_)
    made = np.zeros(n_maps, np.bool_)
    chain = np.empty(n, np.int64)
    position = np.empty(n, np.int64)
    targets = _order_by(a.first_use, action == RECOMPUTE)
    t = 0
    while t < len(targets):
        k = a.first_use[targets[t]]
        begin = t
        while t < len(targets) and a.first_use[targets[t]] == k:
            t += 1
        # What is at hand at this position without a replay.
        for m in range(n_maps):
            if action[m] == RECOMPUTE:
                available[m] = made[m] and needed[m] <= k < drop[m]
            else:
                available[m] = True
        length = 0
        for i in range(begin, t):
            if not available[targets[i]] and mark[a.producer[targets[i]]] != k:
                length = _chain(
                    a, n_maps, targets[i], available, mark, k, chain, length
                )
                if length < 0:
                    return Positions(
                        swap_out, release, swap_in, needed, drop,
                        program[:0], replay_seconds, limit + 1, k,
                    )  # fmt: skip
        if length == 0:
            continue
        for i in range(length):
            position[chain[i]] = i
            # Sources must be there: bring swapped ones early, keep all longer.
            for j in range(a.input_ptr[chain[i]], a.input_ptr[chain[i] + 1]):
                m = a.inputs[j]
                if m < n_maps and available[m]:
                    if action[m] == SWAP and k < needed[m]:
                        for q in range(k, needed[m]):
                            load[q] += a.size[m]
                        needed[m] = k
                    for q in range(drop[m], k + 1):
                        load[q] += a.size[m]
                    drop[m] = max(drop[m], k + 1)
        for attempt in range(2):
            keep_passing = collective and attempt == 0
            # Who stays: the targets, and what will be needed later, nearest
            # need (the end of the chain) first.
            for i in range(length - 1, -1, -1):
                op = chain[i]
                for j in range(a.product_ptr[op], a.product_ptr[op + 1]):
                    item = a.products[j]
                    count[item] = 0
                    stays[item] = False
                    if item >= n_maps or action[item] != RECOMPUTE or made[item]:
                        continue
                    if a.first_use[item] == k:
                        stays[item] = True
                    elif keep_passing and a.first_use[item] > k:
                        fits = True
                        for q in range(k, a.first_use[item]):
                            if load[q] + a.fixed_peak[q] + a.size[item] > limit:
                                fits = False
                                break
                        if fits:
                            stays[item] = True
                            for q in range(k, a.first_use[item]):
                                load[q] += a.size[item]
            for i in range(length):
                for j in range(a.input_ptr[chain[i]], a.input_ptr[chain[i] + 1]):
                    count[a.inputs[j]] += 1
            # The highest load on the way.
            now = a.fixed_start[k] + load[k]
            for i in range(length):
                for j in range(a.product_ptr[chain[i]], a.product_ptr[chain[i] + 1]):
                    if stays[a.products[j]]:
                        now -= a.size[a.products[j]]
            high = now
            first_entry = written
            for i in range(length):
                op = chain[i]
                high = max(high, now + a.recipe_peak[op])
                entries = 2 + (a.product_ptr[op + 1] - a.product_ptr[op])
                entries += a.input_ptr[op + 1] - a.input_ptr[op]
                while written + entries > len(program):
                    grown = np.empty((2 * len(program), 3), np.int64)
                    grown[:written] = program[:written]
                    program = grown
                program[written] = (k, RUN, op)
                written += 1
                for j in range(a.product_ptr[op], a.product_ptr[op + 1]):
                    item = a.products[j]
                    if stays[item]:
                        now += a.size[item]
                        program[written] = (k, STAY, item)
                        written += 1
                    elif count[item] > 0 and not available[item]:
                        now += a.size[item]
                    else:  # nobody needs it, or it is there already
                        program[written] = (k, FREE, item)
                        written += 1
                for j in range(a.input_ptr[op], a.input_ptr[op + 1]):
                    item = a.inputs[j]
                    count[item] -= 1
                    if count[item] == 0 and not stays[item] and not available[item]:
                        now -= a.size[item]
                        program[written] = (k, FREE, item)
                        written += 1
            if high <= limit or not keep_passing:
                break
            # Staying was too much: undo and pass without.
            written = first_entry
            for i in range(length):
                for j in range(a.product_ptr[chain[i]], a.product_ptr[chain[i] + 1]):
                    item = a.products[j]
                    if stays[item] and a.first_use[item] > k:
                        for q in range(k, a.first_use[item]):
                            load[q] -= a.size[item]
        chain_extra[k] = high - load[k]
        for i in range(length):
            replay_seconds[k] += a.recipe_seconds[chain[i]]
            for j in range(a.product_ptr[chain[i]], a.product_ptr[chain[i] + 1]):
                item = a.products[j]
                if item < n_maps and stays[item]:
                    made[item] = True
                    needed[item] = k
                stays[item] = False
                count[item] = 0

    # Swap-ins as early as memory allows, in order of need.
    need = np.empty(n, np.int64)
    for k in range(b0, n):
        need[k] = load[k] + max(a.fixed_peak[k], chain_extra[k])
    previous = b0
    for m in _order_by(needed, action == SWAP):
        k = needed[m]
        earliest = max(previous, lead[k])
        while k > earliest and need[k - 1] + a.size[m] <= limit:
            k -= 1
            need[k] += a.size[m]
        swap_in[m] = k
        previous = k
    for k in range(b0, n):
        if need[k] > peak:
            peak, worst = need[k], k
    return Positions(
        swap_out, release, swap_in, needed, drop,
        program[:written], replay_seconds, peak, worst,
    )  # fmt: skip


@compiled()
def _bucket(position: np.ndarray, rank: np.ndarray, n: int) -> Any:
    """Linked lists of maps per operation, in order of ``rank``."""
    head = np.full(n + 1, -1, np.int64)
    following = np.full(len(position), -1, np.int64)
    for i in range(len(rank) - 1, -1, -1):
        m = rank[i]
        if position[m] >= 0:
            following[m] = head[position[m]]
            head[position[m]] = m
    return head, following


@compiled()
def times(
    seconds: np.ndarray,
    positions: Positions,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
) -> Any:
    """Start of every operation and copy for given positions.

    Before operation k, in this order: swap-outs start, releases wait for
    their copy, swap-ins start, needed maps are waited for, replays run.
    """
    n, n_maps = len(seconds), len(positions.release)
    start = np.zeros(n)
    out_start, out_end = np.zeros(n_maps), np.zeros(n_maps)
    in_start, in_end = np.zeros(n_maps), np.zeros(n_maps)
    release_stall, need_stall = np.zeros(n_maps), np.zeros(n_maps)
    swapped = positions.swap_out >= 0
    by_out = _order_by(positions.swap_out, swapped)
    by_need = _order_by(positions.needed, swapped)
    out_head, out_next = _bucket(positions.swap_out, by_out, n)
    free_head, free_next = _bucket(positions.release, by_out, n)
    in_head, in_next = _bucket(positions.swap_in, by_need, n)
    need_head, need_next = _bucket(positions.needed, by_need, n)
    now, d2h_free, h2d_free = 0.0, 0.0, 0.0
    for k in range(n):
        m = out_head[k]
        while m >= 0:
            out_start[m] = max(now, d2h_free)
            out_end[m] = d2h_free = out_start[m] + out_seconds[m]
            m = out_next[m]
        m = free_head[k]
        while m >= 0:
            if out_end[m] > now:
                release_stall[m] = out_end[m] - now
                now = out_end[m]
            m = free_next[m]
        m = in_head[k]
        while m >= 0:
            in_start[m] = max(now, h2d_free)
            in_end[m] = h2d_free = in_start[m] + in_seconds[m]
            m = in_next[m]
        m = need_head[k]
        while m >= 0:
            if in_end[m] > now:
                need_stall[m] = in_end[m] - now
                now = in_end[m]
            m = need_next[m]
        start[k] = now
        now += positions.replay_seconds[k] + seconds[k]
    return Times(
        now, start, release_stall, need_stall, out_start, out_end, in_start, in_end
    )
