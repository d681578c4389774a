"""Compiled: what is replayed before which backward operation, and what stays of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.simulation import work
from chainer_hybridmem.planning.simulation.arrays import ProblemArrays
from chainer_hybridmem.planning.simulation.work import (
    FREE,
    LATE,
    RECOMPUTE,
    RUN,
    STAY,
    SWAP,
    Work,
)


@compiled(inline=True, counted=False, uses=(work,))
def _at_hand(
    present: np.ndarray,
    action: np.ndarray,
    made: np.ndarray,
    drop: np.ndarray,
    n_maps: int,
    item: int,
    k: int,
) -> bool:
    """Whether an item is there before operation k without a replay."""
    if item >= n_maps:
        return bool(present[item])
    return bool(action[item] < RECOMPUTE or (made[item] and k < drop[item]))


@compiled(inline=True, counted=False, uses=(work,))
def _make_chain(
    a: ProblemArrays, action: np.ndarray, target: int, k: int, length: int, w: Work
) -> int:
    """Appends the operations to replay for one item, sources first.

    ``mark[operation] == k`` says that it is in this chain already: the memo
    without which residual networks cost exponential time. Returns the new
    length, or -1 if an operation on the way has no recipe.
    """
    stack, mark, chain, made = w.stack, w.mark, w.chain, w.made
    drop = w.drop
    present, inputs, input_ptr, producer = a.present, a.inputs, a.input_ptr, a.producer
    recipe_seconds, n_maps = a.recipe_seconds, len(action)
    stack[0] = producer[target]
    top = 1
    while top > 0:
        op = stack[top - 1]
        if mark[op] == k:
            top -= 1
            continue
        if recipe_seconds[op] < 0:
            return -1
        pushed = False
        for j in range(input_ptr[op], input_ptr[op + 1]):
            item = inputs[j]
            source = producer[item]
            if mark[source] == k or _at_hand(
                present, action, made, drop, n_maps, item, k
            ):
                continue
            if source >= op or top >= len(stack):
                return -1
            stack[top] = source
            top += 1
            pushed = True
            break
        if not pushed:
            mark[op] = k
            chain[length] = op
            length += 1
            top -= 1
    return length


@compiled(inline=True, counted=False, uses=(work,))
def _hold_sources(
    a: ProblemArrays, action: np.ndarray, k: int, length: int, w: Work
) -> None:
    """Sources must be there at k: bring swapped ones early, keep all longer."""
    load = w.load
    needed, drop = w.needed, w.drop
    made, chain = w.made, w.chain
    inputs, input_ptr, size, present = a.inputs, a.input_ptr, a.size, a.present
    n_maps = len(action)
    for i in range(length):
        for j in range(input_ptr[chain[i]], input_ptr[chain[i] + 1]):
            m = inputs[j]
            if m >= n_maps:
                continue
            if not _at_hand(present, action, made, drop, n_maps, m, k):
                continue
            if action[m] == SWAP and k < needed[m]:
                load[k] += size[m]
                load[needed[m]] -= size[m]
                needed[m] = k
            if drop[m] <= k:
                for q in range(drop[m], k + 1):
                    load[q] += size[m]
                load[k + 1] -= size[m]
                drop[m] = k + 1


@compiled(inline=True, counted=False, uses=(work,))
def choose_stays(
    a: ProblemArrays,
    action: np.ndarray,
    limit: int,
    k: int,
    length: int,
    collective: bool,
    w: Work,
) -> None:
    """Which products of a chain stay: the targets, and what will be needed later.

    The latter only while memory allows, nearest need (end of the chain) first.
    ``record`` lists the positions from k on whose load is above that of all before
    them, as far as a product has asked, and ``rise`` by how much. What stays lifts all
    before its use: the records behind that rise by less, or are none any more.
    """
    load = w.load
    made, chain, uses, stays = w.made, w.chain, w.uses, w.stays
    record, rise, passed = w.record, w.rise, w.passed
    products, product_ptr, size = a.products, a.product_ptr, a.size
    inputs, input_ptr = a.inputs, a.input_ptr
    fixed_peak, first_use, n_maps = a.fixed_peak, a.first_use, len(action)
    asked, here, highest, records = k + 1, load[k], load[k] + fixed_peak[k], 0
    for i in range(length - 1, -1, -1):
        op = chain[i]
        for j in range(product_ptr[op], product_ptr[op + 1]):
            item = products[j]
            uses[item] = 0
            stays[item] = False
            if item >= n_maps or action[item] < RECOMPUTE or made[item]:
                continue
            if not a.read[item]:
                continue
            use = first_use[item]
            goes = action[item] == LATE or action[item] - LATE > passed[item]
            if use == k:
                stays[item] = True
            elif collective and use > k and not goes:
                room = limit - size[item]
                while asked < use and highest <= room:
                    here += load[asked]
                    if here + fixed_peak[asked] > highest:
                        record[records] = asked
                        rise[records] = here + fixed_peak[asked] - highest
                        highest += rise[records]
                        records += 1
                    asked += 1
                behind, most = records, highest
                while behind > 0 and record[behind - 1] >= use:
                    behind -= 1
                    most -= rise[behind]
                if most > room:
                    continue
                stays[item] = True
                load[k] += size[item]
                load[use] -= size[item]
                if asked == use:
                    here += size[item]
                lift = size[item]
                for r in range(behind, records):
                    less = min(lift, rise[r])
                    rise[r] -= less
                    lift -= less
                highest += lift
                if lift > 0:
                    records = behind
    for i in range(length):
        for j in range(input_ptr[chain[i]], input_ptr[chain[i] + 1]):
            uses[inputs[j]] += 1


@compiled(inline=True, counted=False, uses=(work,))
def _undo_stays(a: ProblemArrays, k: int, length: int, w: Work) -> None:
    load = w.load
    chain, uses, stays = w.chain, w.uses, w.stays
    for i in range(length):
        for j in range(a.product_ptr[chain[i]], a.product_ptr[chain[i] + 1]):
            item = a.products[j]
            if stays[item] and a.first_use[item] > k:
                load[k] -= a.size[item]
                load[a.first_use[item]] += a.size[item]
        for j in range(a.input_ptr[chain[i]], a.input_ptr[chain[i] + 1]):
            uses[a.inputs[j]] = 0


@compiled(inline=True, counted=False, uses=(work,))
def _write(program: np.ndarray, entries: int, k: int, kind: int, what: int) -> int:
    if entries < len(program):
        program[entries, 0] = k
        program[entries, 1] = kind
        program[entries, 2] = what
    return entries + 1


@compiled(inline=True, counted=False, uses=(work,))
def _run_chain(
    a: ProblemArrays, action: np.ndarray, k: int, length: int, entries: int, w: Work
) -> Any:
    """The replays of one chain in order; highest load on the way."""
    chain, uses, stays, made = w.chain, w.uses, w.stays, w.made
    drop = w.drop
    products, product_ptr, size = a.products, a.product_ptr, a.size
    inputs, input_ptr, present = a.inputs, a.input_ptr, a.present
    recipe_peak, program, n_maps = a.recipe_peak, w.program, len(action)
    now = a.fixed_start[k] + w.load[k]
    for i in range(length):
        for j in range(product_ptr[chain[i]], product_ptr[chain[i] + 1]):
            if stays[products[j]]:
                now -= size[products[j]]
    high = now
    for i in range(length):
        op = chain[i]
        high = max(high, now + recipe_peak[op])
        entries = _write(program, entries, k, RUN, op)
        for j in range(product_ptr[op], product_ptr[op + 1]):
            item = products[j]
            if stays[item]:
                now += size[item]
                entries = _write(program, entries, k, STAY, item)
            elif uses[item] > 0 and not _at_hand(
                present, action, made, drop, n_maps, item, k
            ):
                now += size[item]
            else:  # no replay needs it, or it is there already
                entries = _write(program, entries, k, FREE, item)
        for j in range(input_ptr[op], input_ptr[op + 1]):
            item = inputs[j]
            uses[item] -= 1
            if uses[item] > 0 or stays[item]:
                continue
            if not _at_hand(present, action, made, drop, n_maps, item, k):
                now -= size[item]
                entries = _write(program, entries, k, FREE, item)
    return high, entries


@compiled(
    types.int64(
        ProblemArrays.compiled,
        types.int64[::1],
        types.int64,
        types.boolean,
        Work.compiled,
    ),
    apart=True,
    counted=False,
    uses=(work,),
)
def lay_out_replays(
    a: ProblemArrays, action: np.ndarray, limit: int, collective: bool, w: Work
) -> int:
    """Replays before each backward operation that needs them.

    ``load`` comes as differences from position to position; here it becomes the
    loads themselves, up to where replays have been laid out. Returns the number of
    entries of the program, or -1 - k if the chain before operation k has no recipe
    somewhere.
    """
    by_use, first_use, producer = a.by_use, a.first_use, a.producer
    made, mark, chain, stays, uses = (
        w.made,
        w.mark,
        w.chain,
        w.stays,
        w.uses,
    )
    products, product_ptr, load = a.products, a.product_ptr, w.load
    n_maps = len(action)
    entries = 0
    t = 0
    summed = a.first_backward
    while t < n_maps:
        k = first_use[by_use[t]]
        length = 0
        while t < n_maps and first_use[by_use[t]] == k:
            m = by_use[t]
            t += 1
            absent = action[m] >= RECOMPUTE and not made[m] and a.read[m]
            if absent and mark[producer[m]] != k:
                length = _make_chain(a, action, m, k, length, w)
                if length < 0:
                    return int(-1 - k)
        if length == 0:
            continue
        while summed < k:
            summed += 1
            load[summed] += load[summed - 1]
        _hold_sources(a, action, k, length, w)
        choose_stays(a, action, limit, k, length, collective, w)
        high, written = _run_chain(a, action, k, length, entries, w)
        if high > limit and collective:  # staying was too much: pass without
            _undo_stays(a, k, length, w)
            choose_stays(a, action, limit, k, length, False, w)
            high, written = _run_chain(a, action, k, length, entries, w)
        entries = written
        w.extra[k] = high - w.load[k]
        spent, host = 0.0, 0.0
        for i in range(length):
            op = chain[i]
            spent += a.recipe_seconds[op]
            host += a.host_seconds[op]
            for j in range(product_ptr[op], product_ptr[op + 1]):
                item = products[j]
                if item < n_maps:
                    w.passed[item] += 1
                    if stays[item]:
                        made[item] = True
                        w.needed[item] = k
                stays[item] = False
                uses[item] = 0
        w.replay_seconds[k] = spent
        w.replay_host_seconds[k] = host
    for q in range(summed, len(a.seconds)):
        load[q + 1] += load[q]
    return entries
