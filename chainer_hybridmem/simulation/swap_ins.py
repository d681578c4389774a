"""Compiled: where swap-ins begin."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.simulation import work
from chainer_hybridmem.simulation.arrays import Arrays
from chainer_hybridmem.simulation.work import NEED, Work


@compiled(inline=True, counted=False, uses=(work,))
def place_swap_ins(a: Arrays, limit: int, lead: np.ndarray, w: Work) -> Any:
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
