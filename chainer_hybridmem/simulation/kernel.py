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

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.simulation import (
    arrays,
    lanes,
    obedience,
    releases,
    replays,
    swap_ins,
    work,
)
from chainer_hybridmem.simulation.arrays import Arrays
from chainer_hybridmem.simulation.lanes import list_by, time_lanes
from chainer_hybridmem.simulation.obedience import breaks_rules
from chainer_hybridmem.simulation.releases import (
    leave_in_backward,
    leave_in_forward,
    share_out_host,
)
from chainer_hybridmem.simulation.replays import lay_out_replays
from chainer_hybridmem.simulation.swap_ins import place_swap_ins
from chainer_hybridmem.simulation.work import KEEP, NEED, RECOMPUTE, SWAP, Result, Work

# Share of a least time that no rounding of sums can make too much.
SURELY = 1 - 1e-9
# What is compiled into an evaluation; see ``uses`` of :func:`.jit.compiled`.
PARTS = (arrays, lanes, obedience, releases, replays, swap_ins, work)


@compiled(counted=False, uses=PARTS)
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
) -> Result:
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
        w.made[m] = False
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
        if action[m] == RECOMPUTE and w.release[m] < 0:
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


@compiled(counted=False, uses=PARTS)
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
