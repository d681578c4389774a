"""Compiled local search over keep, swap and recompute together.

Simulated annealing on simulated time: a move changes the actions of a few maps, the
simulator judges the result, and what does not fit is refused. How much slower a
candidate may be is drawn before, so that the simulator can give up early. Moves are
single maps, exchanges between two maps, or between one and several of as many bytes,
runs of maps that follow each other in production (all, or those made by the same kind
of function), and copies of the pattern of another place: networks repeat themselves,
and what helps one block often helps the next.
"""

from __future__ import annotations

import numpy as np
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.simulation import kernel
from chainer_hybridmem.planning.simulation.arrays import ProblemArrays
from chainer_hybridmem.planning.simulation.work import (
    KEEP,
    LATE,
    PASSED,
    RECOMPUTE,
    SWAP,
    Work,
    copy_into,
)

_i64, _f64, _bool = types.int64, types.float64, types.boolean

# -- moves of many maps at once -----------------------------------------------
SPARSEST = 16  # of so many maps one changes


@compiled()
def spread(
    current: np.ndarray,
    allowed: np.ndarray,
    pointers: np.ndarray,
    alike: np.ndarray,
    proposed: np.ndarray,
) -> int:
    """Writes one evenly spread change of ``current`` into ``proposed``.

    Maps made by the same kind of function, of the same size, are alike. A move takes a
    stretch of alike maps in order of production and gives every so-many-th map of one
    action another action: evenly spread changes are what large networks of repeated
    blocks need, and single maps are too small a step there.

    Args:
        allowed: (M, 3) bool, which actions each map may have; alike in a group.
        pointers: Beginnings of the groups in ``alike``, and its end.
        alike: (M,) maps by group, within each in order of production.

    Returns:
        int: Maps changed.
    """
    # A group is drawn by its number of maps.
    place = np.random.randint(len(alike))
    group = 0
    while pointers[group + 1] <= place:
        group += 1
    begin, end = pointers[group], pointers[group + 1]
    whole = end - begin
    length = whole
    if np.random.random() < 0.7:
        length = int(np.exp(np.random.random() * np.log(whole + 0.999)))
    first = begin + np.random.randint(whole - length + 1)
    old = current[alike[place]]
    new = (old + 1 + np.random.randint(2)) % 3
    if not allowed[alike[place], new]:
        return 0
    every = int(np.exp(np.random.random() * np.log(SPARSEST + 0.999)))
    phase = np.random.randint(every)
    changed = 0
    for i in range(first, first + length):
        m = alike[i]
        if current[m] != old:
            continue
        phase += 1
        if phase >= every:
            phase = 0
            proposed[m] = new
            changed += 1
    return changed


# -- moves of few maps ----------------------------------------------------------
DELAYS = 0.3  # share of the moves that change what is late
ONCE = 0.2  # share of these that change what is late once
MOST_EXCHANGED = 16  # maps that a move exchanges for one


@compiled()
def _other(action: int, allowed: np.ndarray) -> int:
    """Another action, at random; the same where rules leave no other.

    Args:
        allowed: (3,) bool, which ones there are.
    """
    first, second = KEEP, SWAP
    if action == KEEP:
        first, second = SWAP, RECOMPUTE
    elif action == SWAP:
        second = RECOMPUTE
    if allowed[first] and allowed[second]:
        return second if np.random.random() < 0.5 else first
    if allowed[first]:
        return first
    return second if allowed[second] else action


@compiled()
def _length(most: int) -> int:
    """A random length from 1 to ``most``: short ones often, long ones at times."""
    return int(np.exp(np.random.random() * np.log(most + 0.999)))


@compiled()
def _exchange_bytes(
    current: np.ndarray,
    allowed: np.ndarray,
    size: np.ndarray,
    m: int,
    proposed: np.ndarray,
) -> int:
    """One map swaps actions with others of as many bytes together; maps changed.

    Where memory is short, one large map and several small ones can only change
    together: each step of the way fits worse or costs more.
    """
    action, target = current[m], _other(current[m], allowed[m])
    if target == action:
        return 0
    far = _length(len(current))
    other = m + far if np.random.random() < 0.5 else m - far
    step = 1 if np.random.random() < 0.5 else -1
    left, changed = size[m], 0
    while 0 <= other < len(current) and left > 0 and changed < MOST_EXCHANGED:
        fits = current[other] == target and allowed[other, min(action, RECOMPUTE)]
        if fits and other != m and size[other] > 0:
            proposed[other] = action
            left -= size[other]
            changed += 1
        other += step
    if changed == 0:
        return 0
    proposed[m] = target
    return changed + 1


@compiled()
def _move(
    current: np.ndarray,
    allowed: np.ndarray,
    size: np.ndarray,
    kind_of: np.ndarray,
    proposed: np.ndarray,
) -> int:
    """Writes a neighbour of ``current`` into ``proposed``; maps changed."""
    n_maps = len(current)
    m = np.random.randint(n_maps)
    dice = np.random.random()
    if dice < 0.30:  # one map
        proposed[m] = _other(current[m], allowed[m])
        return 1 if proposed[m] != current[m] else 0
    if dice < 0.40:  # exchange with a map, rather a near one
        far = _length(n_maps)
        other = m + far if np.random.random() < 0.5 else m - far
        for _ in range(6):
            if 0 <= other < n_maps and current[other] != current[m]:
                break
            far = _length(n_maps)
            other = m + far if np.random.random() < 0.5 else m - far
        if other < 0 or other >= n_maps or current[other] == current[m]:
            return 0
        if not (
            allowed[m, min(current[other], RECOMPUTE)]
            and allowed[other, min(current[m], RECOMPUTE)]
        ):
            return 0
        proposed[m], proposed[other] = current[other], current[m]
        return 2
    if dice < 0.60:  # exchange with several of as many bytes
        return _exchange_bytes(current, allowed, size, m, proposed)
    last = min(n_maps, m + 1 + _length(max(2, n_maps // 4)))
    changed = 0
    if dice < 0.80:  # a run of maps, all or those of the same kind of function
        target = _other(current[m], allowed[m])
        alike = np.random.random() < 0.7
        for i in range(m, last):
            if alike and kind_of[i] != kind_of[m]:
                continue
            if not allowed[i, target]:
                continue
            if current[i] != target:
                proposed[i] = target
                changed += 1
        return changed
    # The pattern of another place.
    other = np.random.randint(n_maps)
    for i in range(m, min(last, m + n_maps - other)):
        pattern = current[other + i - m]
        if kind_of[i] != kind_of[other + i - m]:
            continue
        if not allowed[i, min(pattern, RECOMPUTE)]:
            continue
        if current[i] != pattern:
            proposed[i] = pattern
            changed += 1
    return changed


@compiled()
def _delay(current: np.ndarray, proposed: np.ndarray) -> int:
    """Some recomputed maps stay when a replay passes them, or do not any more."""
    m = np.random.randint(len(current))
    for i in range(len(current)):
        if current[(m + i) % len(current)] >= RECOMPUTE:
            m = (m + i) % len(current)
            break
    if current[m] < RECOMPUTE:
        return 0
    if np.random.random() < ONCE:
        proposed[m] = RECOMPUTE if current[m] == PASSED else PASSED
    else:
        proposed[m] = RECOMPUTE if current[m] >= LATE else LATE
    return 1


@compiled()
def _make_way(a: ProblemArrays, current: np.ndarray, proposed: np.ndarray) -> None:
    """Others of a group leave, at random, where a move keeps more than rules allow."""
    for g in range(len(a.kept_most)):
        first, end = a.kept_pointers[g], a.kept_pointers[g + 1]
        kept = 0
        for i in range(first, end):
            if proposed[a.kept_members[i]] == KEEP:
                kept += a.size[a.kept_members[i]]
        tries = 2 * (end - first)
        while kept > a.kept_most[g] and tries > 0:
            tries -= 1
            m = a.kept_members[first + np.random.randint(end - first)]
            if proposed[m] != KEEP or current[m] != KEEP:
                continue
            proposed[m] = _other(KEEP, a.allowed[m])
            if proposed[m] != KEEP:
                kept -= a.size[m]


@compiled(
    _i64(
        ProblemArrays.compiled,
        _i64[::1],
        _i64,
        _i64[::1],
        _f64[::1],
        _f64[::1],
        _bool,
        _i64[::1],
        _i64[::1],
        _i64[::1],
        _i64,
        _f64,
        _f64,
        _f64,
        _i64,
        _bool,
        Work.compiled,
        _i64[::1],
        _f64[::1],
        _i64,
    ),
    apart=True,
    uses=(kernel, *kernel.PARTS),
    nogil=True,
)
def anneal(
    a: ProblemArrays,
    current: np.ndarray,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    barrier: bool,
    kind_of: np.ndarray,
    pointers: np.ndarray,
    alike: np.ndarray,
    steps: int,
    warm: float,
    cold: float,
    goal: float,
    seed: int,
    late: bool,
    w: Work,
    best: np.ndarray,
    state: np.ndarray,
    part: int,
) -> int:
    """Simulated annealing from a feasible start, or a part of it.

    Args:
        current: (M,) where it begins, and how far it has come in the end.
        kind_of: (M,) number of the function that makes each map.
        pointers: Groups of maps to change evenly spread, as in :func:`spread`;
            empty for moves of a few maps.
        alike: (M,) maps by group.
        steps: Candidates to judge.
        warm: First temperature in seconds.
        cold: Last temperature in seconds.
        goal: Stop when a plan is this fast.
        seed: Of the random moves.
        late: Whether it decides which recomputed maps are LATE as well.
        best: Result, (M,) best actions.
        state: (4,) candidates judged so far, and seconds of ``current``, of ``best``
            and of the temperature. Zeros before the first part.
        part: Candidates to judge at most in this part.

    Returns:
        int: Candidates judged in this part; fewer than ``part`` only in the last one.
    """
    proposed = current.copy()
    if state[0] == 0:
        np.random.seed(seed)
        copy_into(best, current)
        state[1] = state[2] = kernel.judge(
            a, current, limit, lead, out_seconds, in_seconds, barrier, np.inf, w
        )[0]
        state[3] = warm
    now, best_seconds, temperature = state[1], state[2], state[3]
    cooling = (cold / warm) ** (1.0 / max(steps, 1))
    part = min(part, steps - int(state[0]))
    done = 0
    while done < part and best_seconds > goal:
        done += 1
        temperature *= cooling
        changed = 0
        if late and np.random.random() < DELAYS:
            changed = _delay(current, proposed)
        is_enough = changed > 0 and np.random.random() < 0.5
        if not is_enough and len(pointers) == 0:
            changed += _move(current, a.allowed, a.size, kind_of, proposed)
        elif not is_enough:
            changed += spread(current, a.allowed, pointers, alike, proposed)
            if np.random.random() < 0.5:  # a change that may pay for the first
                changed += spread(current, a.allowed, pointers, alike, proposed)
        if changed == 0:
            continue
        if a.ruled:
            _make_way(a, current, proposed)
        ceiling = now - temperature * np.log(1 - np.random.random())
        seconds = kernel.judge(
            a, proposed, limit, lead, out_seconds, in_seconds, barrier, ceiling, w
        )[0]
        if seconds <= ceiling:
            now = seconds
            copy_into(current, proposed)
            if now < best_seconds:
                best_seconds = now
                copy_into(best, current)
        else:
            copy_into(proposed, current)
    state[0] += done
    state[1], state[2], state[3] = now, best_seconds, temperature
    return done
