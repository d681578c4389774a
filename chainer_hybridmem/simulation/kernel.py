"""The compiled inner loop: positions from actions, times from positions.

Two steps, each linear in the operations and in the length of the replays:

``evaluate``
    decides *where* everything happens: in forward, finished swap-outs are
    released when memory is asked for, oldest first; in backward, replays come
    just in time, swap-outs still under way are released as they finish, and
    swap-ins start as early as memory allows, in order of need (Ito et al.,
    section 4.3). Then it asks ``lanes``. ``judge`` asks it once or twice.
``lanes``
    decides *when*: one lane for the host, which issues everything, one for
    compute, one per copy direction.

Both write into a :class:`Work`, so that a search allocates nothing per candidate
and runs compiled as a whole. Notation as in
:mod:`chainer_hybridmem.simulation.problem`; ``-1`` is "never".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.simulation.problem import Arrays

KEEP, SWAP, RECOMPUTE = 0, 1, 2
# Kinds of entries in a replay program.
RUN, STAY, FREE = 0, 1, 2
# Lists of maps per position.
OUT, LEAVE, IN, NEED = 0, 1, 2, 3
# Share of a least time that no rounding of sums can make too much.
SURELY = 1 - 1e-9


class Work(NamedTuple):
    """Where one evaluation leaves its results, and its scratch space."""

    # Positions, (M,) int64 each.
    swap_out: np.ndarray
    release: np.ndarray
    swap_in: np.ndarray
    needed: np.ndarray
    drop: np.ndarray
    on_disk: np.ndarray  # (M,) bool, host copies that have no room in RAM
    program: np.ndarray  # (P, 3): position, RUN/STAY/FREE, operation or item
    replay_seconds: np.ndarray  # (n,)
    replay_host_seconds: np.ndarray  # (n,) to issue the replays
    # Times in seconds, (M,) float64 each.
    start: np.ndarray  # (n,) compute start, replays included
    stop: np.ndarray  # (n,) compute end
    host_stall: np.ndarray  # (n,) compute waited for the host
    release_stall: np.ndarray  # compute waited for this swap-out
    need_stall: np.ndarray  # compute waited for this swap-in
    out_start: np.ndarray
    out_end: np.ndarray
    in_start: np.ndarray
    in_end: np.ndarray
    # Lanes of both directions, outward first.
    began: np.ndarray  # (2, M) float64, out_start and in_start
    ended: np.ndarray  # (2, M) float64, out_end and in_end
    stalls: np.ndarray  # (2, M) float64, release_stall and need_stall
    alone: np.ndarray  # (2, M) float64, seconds on an idle link
    copies: np.ndarray  # (2, M) int64, in order of submission
    head: np.ndarray  # (2,) int64, the copy under way
    tail: np.ndarray  # (2,) int64, the end of the queue
    ends_at: np.ndarray  # (2,) float64, of the copy under way; infinite: idle
    # Scratch.
    out_seconds: np.ndarray  # (M,) float64, of each map's copy in its tier
    in_seconds: np.ndarray  # (M,) float64
    load: np.ndarray  # (n+1,) int64
    extra: np.ndarray  # (n+1,) int64, replays above what is loaded
    heads: np.ndarray  # (4, n+1) int64, first map per position
    tails: np.ndarray  # (n+1,) int64, last map per position
    following: np.ndarray  # (4, M) int64, next map of the same position
    mark: np.ndarray  # (n,) int64
    chain: np.ndarray  # (n,) int64
    stack: np.ndarray  # (2n+2,) int64
    record: np.ndarray  # (n,) int64, positions whose load stands out
    rise: np.ndarray  # (n,) int64, by how much
    uses: np.ndarray  # (M+T,) int64, readers left in a chain
    stays: np.ndarray  # (M+T,) bool
    made: np.ndarray  # (M,) bool


class Outcome(NamedTuple):
    """What an evaluation says about one assignment of actions."""

    seconds: float  # of the iteration; infinite if it does not fit
    peak_bytes: int
    worst: int  # operation with the highest load
    entries: int  # of the replay program
    collective: bool  # whether replays keep what they pass


def make_work(arrays: Arrays, program: int = 0) -> Work:
    """Space for evaluations of one problem.

    Args:
        arrays: The problem's arrays.
        program: Entries of the replay program to store.
    """
    n, n_maps, n_items = len(arrays.seconds), len(arrays.first_use), len(arrays.size)
    began, ended, stalls = (np.zeros((2, n_maps)) for _ in range(3))
    return Work(
        swap_out=np.zeros(n_maps, np.int64),
        release=np.zeros(n_maps, np.int64),
        swap_in=np.zeros(n_maps, np.int64),
        needed=np.zeros(n_maps, np.int64),
        drop=np.zeros(n_maps, np.int64),
        on_disk=np.zeros(n_maps, bool),
        program=np.zeros((program, 3), np.int64),
        replay_seconds=np.zeros(n),
        replay_host_seconds=np.zeros(n),
        start=np.zeros(n),
        stop=np.zeros(n),
        host_stall=np.zeros(n),
        release_stall=stalls[0],
        need_stall=stalls[1],
        out_start=began[0],
        out_end=ended[0],
        in_start=began[1],
        in_end=ended[1],
        began=began,
        ended=ended,
        stalls=stalls,
        alone=np.zeros((2, n_maps)),
        copies=np.zeros((2, n_maps), np.int64),
        head=np.zeros(2, np.int64),
        tail=np.zeros(2, np.int64),
        ends_at=np.zeros(2),
        out_seconds=np.zeros(n_maps),
        in_seconds=np.zeros(n_maps),
        load=np.zeros(n + 1, np.int64),
        extra=np.zeros(n + 1, np.int64),
        heads=np.zeros((4, n + 1), np.int64),
        tails=np.zeros(n + 1, np.int64),
        following=np.zeros((4, n_maps), np.int64),
        mark=np.zeros(n, np.int64),
        chain=np.zeros(n, np.int64),
        stack=np.zeros(2 * n + 2, np.int64),
        record=np.zeros(n, np.int64),
        rise=np.zeros(n, np.int64),
        uses=np.zeros(n_items, np.int64),
        stays=np.zeros(n_items, bool),
        made=np.zeros(n_maps, bool),
    )


@compiled(inline=True, counted=False)
def _share_out_host(
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


@compiled(inline=True, counted=False)
def _forward(
    a: Arrays, action: np.ndarray, limit: int, out_seconds: np.ndarray, w: Work
) -> Any:
    """Release positions during forward: peak, its operation, time at the end.

    A finished swap-out is released only when memory is asked for, oldest first.
    """
    release, out_end = w.release, w.out_end
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


@compiled(inline=True, counted=False)
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
    return action[item] != RECOMPUTE or (made[item] and k < drop[item])


@compiled(inline=True, counted=False)
def _chain(
    a: Arrays, action: np.ndarray, target: int, k: int, length: int, w: Work
) -> int:
    """Appends the operations to replay for one item, sources first.

    ``mark[operation] == k`` says that it is in this chain already: the memo
    without which residual networks cost exponential time. Returns the new
    length, or -1 if an operation on the way has no recipe.
    """
    stack, mark, chain, made, drop = w.stack, w.mark, w.chain, w.made, w.drop
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


@compiled(inline=True, counted=False)
def _hold_sources(a: Arrays, action: np.ndarray, k: int, length: int, w: Work) -> None:
    """Sources must be there at k: bring swapped ones early, keep all longer."""
    load, needed, drop, made, chain = w.load, w.needed, w.drop, w.made, w.chain
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


@compiled(inline=True, counted=False)
def _choose_stays(
    a: Arrays,
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
    them, as far as somebody has asked, and ``rise`` by how much. What stays lifts all
    before its use: the records behind that rise by less, or are none any more.
    """
    load, made, chain, uses, stays = w.load, w.made, w.chain, w.uses, w.stays
    record, rise = w.record, w.rise
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
            if item >= n_maps or action[item] != RECOMPUTE or made[item]:
                continue
            use = first_use[item]
            if use == k:
                stays[item] = True
            elif collective and use > k:
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


@compiled(inline=True, counted=False)
def _undo_stays(a: Arrays, k: int, length: int, w: Work) -> None:
    load, chain, uses, stays = w.load, w.chain, w.uses, w.stays
    for i in range(length):
        for j in range(a.product_ptr[chain[i]], a.product_ptr[chain[i] + 1]):
            item = a.products[j]
            if stays[item] and a.first_use[item] > k:
                load[k] -= a.size[item]
                load[a.first_use[item]] += a.size[item]
        for j in range(a.input_ptr[chain[i]], a.input_ptr[chain[i] + 1]):
            uses[a.inputs[j]] = 0


@compiled(inline=True, counted=False)
def _write(program: np.ndarray, entries: int, k: int, kind: int, what: int) -> int:
    if entries < len(program):
        program[entries, 0] = k
        program[entries, 1] = kind
        program[entries, 2] = what
    return entries + 1


@compiled(inline=True, counted=False)
def _run_chain(
    a: Arrays, action: np.ndarray, k: int, length: int, entries: int, w: Work
) -> Any:
    """The replays of one chain in order; highest load on the way."""
    chain, uses, stays, made, drop = w.chain, w.uses, w.stays, w.made, w.drop
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
            else:  # nobody needs it, or it is there already
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


@compiled(inline=True, counted=False)
def _replays(
    a: Arrays, action: np.ndarray, limit: int, collective: bool, w: Work
) -> int:
    """Replays before each backward operation that needs them.

    ``load`` comes as differences from position to position; here it becomes the
    loads themselves, up to where replays have been laid out. Returns the number of
    entries of the program, or -1 - k if the chain before operation k has no recipe
    somewhere.
    """
    by_use, first_use, producer = a.by_use, a.first_use, a.producer
    made, mark, chain, stays, uses = w.made, w.mark, w.chain, w.stays, w.uses
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
            absent = action[m] == RECOMPUTE and not made[m]
            if absent and mark[producer[m]] != k:
                length = _chain(a, action, m, k, length, w)
                if length < 0:
                    return -1 - k
        if length == 0:
            continue
        while summed < k:
            summed += 1
            load[summed] += load[summed - 1]
        _hold_sources(a, action, k, length, w)
        _choose_stays(a, action, limit, k, length, collective, w)
        high, written = _run_chain(a, action, k, length, entries, w)
        if high > limit and collective:  # staying was too much: pass without
            _undo_stays(a, k, length, w)
            _choose_stays(a, action, limit, k, length, False, w)
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
                if item < n_maps and stays[item]:
                    made[item] = True
                    w.needed[item] = k
                stays[item] = False
                uses[item] = 0
        w.replay_seconds[k] = spent
        w.replay_host_seconds[k] = host
    for q in range(summed, len(a.seconds)):
        load[q + 1] += load[q]
    return entries


@compiled(inline=True, counted=False)
def _list_by(
    position: np.ndarray, swap_out: np.ndarray, heads: np.ndarray, following: np.ndarray
) -> None:
    """Lists of swapped maps per position, each by number."""
    heads[:] = -1
    for m in range(len(position) - 1, -1, -1):
        if swap_out[m] >= 0:
            following[m] = heads[position[m]]
            heads[position[m]] = m


@compiled(inline=True, counted=False)
def _list_swap_ins(w: Work) -> None:
    """Lists of swapped maps per start of their swap-in, in order of need."""
    heads, following, tails, swap_in = w.heads[IN], w.following[IN], w.tails, w.swap_in
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


@compiled(inline=True, counted=False)
def _release_late(
    a: Arrays, action: np.ndarray, limit: int, now: float, w: Work
) -> None:
    """Release positions in backward: as swap-outs finish, sooner where memory asks.

    Without a barrier, backward begins while copies are still under way.
    ``load`` gets what they hold until then.
    """
    release, out_end, load, extra = w.release, w.out_end, w.load, w.extra
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


@compiled(inline=True, counted=False)
def _swap_ins(a: Arrays, limit: int, lead: np.ndarray, w: Work) -> Any:
    """Swap-ins as early as memory allows, in order of need; the highest load.

    No swap-in starts before an earlier one, so what is before its start is settled.
    ``record`` lists, among the positions after that, those with no higher load behind
    them: only these can stop a swap-in, and a swap-in adds to all of them (``added``).
    """
    load, extra, release, swap_in = w.load, w.extra, w.release, w.swap_in
    need_heads, need_following, record = w.heads[NEED], w.following[NEED], w.record
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


@compiled(counted=False)
def evaluate(
    a: Arrays,
    action: np.ndarray,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    collective: bool,
    barrier: bool,
    ceiling: float,
    w: Work,
) -> Outcome:
    """Positions and times for an assignment of actions.

    What does not fit, or takes longer than ``ceiling`` for sure, is given up as soon
    as that is known: the positions are then unfinished, and the peak is what it was
    so far. With an infinite ceiling nothing is given up.

    Args:
        a: The problem's arrays. If host copies in RAM are limited, this shares it out.
        action: (M,) KEEP, SWAP or RECOMPUTE.
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
        Outcome: It fits if ``seconds`` is finite.
    """
    b0, n_maps = a.first_backward, len(action)
    w.replay_seconds[:] = 0
    w.replay_host_seconds[:] = 0
    w.load[:] = 0
    w.extra[:] = 0
    w.mark[:] = -1
    for m in range(n_maps):
        w.release[m] = w.swap_in[m] = -1
        w.made[m] = False
        w.swap_out[m] = a.copy_from[m] if action[m] == SWAP else -1
    beyond = 0.0
    if a.tiered:
        beyond = _share_out_host(a, action, out_seconds, in_seconds, w)
        out_seconds, in_seconds = w.out_seconds, w.in_seconds
    peak, worst, now = _forward(a, action, limit, out_seconds, w)
    hasty, least = ceiling < np.inf, now + a.backward_seconds + beyond
    if hasty and (peak > limit or least * SURELY > ceiling):
        return Outcome(np.inf, peak, worst, 0, collective)

    # Loads that must be there: each map over its own uses.
    for m in range(n_maps):
        first = b0 if action[m] == KEEP else a.first_use[m]
        w.needed[m] = -1 if action[m] == KEEP else first
        w.drop[m] = a.last_use[m] + 1
        w.load[first] += a.size[m]
        w.load[w.drop[m]] -= a.size[m]
        if action[m] == RECOMPUTE and w.release[m] < 0:
            w.release[m] = b0
    entries = _replays(a, action, limit, collective, w)
    if entries < 0:
        return Outcome(np.inf, limit + 1, -1 - entries, 0, collective)
    if hasty and (least + w.replay_seconds[b0:].sum()) * SURELY > ceiling:
        return Outcome(np.inf, peak, worst, entries, collective)
    _list_by(w.needed, w.swap_out, w.heads[NEED], w.following[NEED])
    if barrier:
        for m in range(n_maps):
            if action[m] == SWAP and w.release[m] < 0:
                w.release[m] = b0
    else:
        _release_late(a, action, limit, now, w)
    high, where = _swap_ins(a, limit, lead, w)
    if high > peak:
        peak, worst = high, where
    if peak > limit:
        return Outcome(np.inf, peak, worst, entries, collective)
    seconds = lanes(a, out_seconds, in_seconds, w) + beyond
    return Outcome(seconds, peak, worst, entries, collective)


@compiled(counted=False)
def judge(
    a: Arrays,
    action: np.ndarray,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    barrier: bool,
    ceiling: float,
    w: Work,
) -> Outcome:
    """What ``evaluate`` says: replays keep what they pass, unless that does not fit.

    Without retention no chain is shorter: what forward's memory or ``ceiling`` has
    ruled out needs no second look.
    """
    outcome = evaluate(
        a, action, limit, lead, out_seconds, in_seconds, True, barrier, ceiling, w
    )
    if outcome.peak_bytes <= limit or outcome.entries == 0:
        return outcome
    if ceiling < np.inf and outcome.worst < a.first_backward:
        return outcome
    bare = evaluate(
        a, action, limit, lead, out_seconds, in_seconds, False, barrier, ceiling, w
    )
    return bare if bare.peak_bytes < outcome.peak_bytes else outcome


@compiled(counted=False)
def lanes(a: Arrays, out_seconds: np.ndarray, in_seconds: np.ndarray, w: Work) -> float:
    """Start of every operation and copy for the positions in ``w``; the total.

    Before operation k, in this order: the host issues what comes before it,
    swap-outs start, releases wait for their copy, swap-ins start, needed maps are
    waited for, replays run. Time passes in one place, from the end of one copy to
    the next, because copies slow each other and compute down.
    """
    heads, following = w.heads, w.following
    _list_by(w.swap_out, w.swap_out, heads[OUT], following[OUT])
    _list_by(w.release, w.swap_out, heads[LEAVE], following[LEAVE])
    _list_by(w.needed, w.swap_out, heads[NEED], following[NEED])
    _list_swap_ins(w)
    began, ended, alone, copies = w.began, w.ended, w.alone, w.copies
    head, tail, ends_at = w.head, w.tail, w.ends_at
    stalls, host_stall, start, stop = w.stalls, w.host_stall, w.start, w.stop
    seconds, host_seconds = a.seconds, a.host_seconds
    replay_seconds, replay_host = w.replay_seconds, w.replay_host_seconds
    duplex, shares = a.duplex_share, (a.out_compute_share, a.in_compute_share)
    alike = shares[0] == 1.0 and shares[1] == 1.0
    stalls[:] = 0.0
    ended[:] = -1.0
    ends_at[:] = np.inf  # of the copy under way; infinite: the lane is idle
    head[:] = 0
    tail[:] = 0
    now, host = 0.0, 0.0
    for k in range(len(seconds)):
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
                until = now + (replay_seconds[k] + seconds[k]) / speed
            else:
                m = heads[OUT if lane == 0 else IN, k]
                while m >= 0:
                    host += a.issue_seconds
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
