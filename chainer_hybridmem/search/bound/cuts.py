"""Compiled: the pairs of operations whose rows a point violates most."""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.jit import compiled


@compiled()
def find_tightest(
    outs: tuple[np.ndarray, np.ndarray, np.ndarray],
    ins: tuple[np.ndarray, np.ndarray, np.ndarray],
    need: np.ndarray,
    start: np.ndarray,
    run: np.ndarray,
    first_backward: int,
    out_rate: float,
    in_rate: float,
    most: np.ndarray,
    pair: np.ndarray,
) -> None:
    """The pairs that allow the fewest bytes to be away.

    Args:
        outs: Pointers by position, slots and bytes: from the position on so many
            more bytes may be away whose copy may start at the slot.
        ins: Likewise, with what must have been copied back by the slot.
        need: (n,) bytes that have to be away; where none, nothing is looked for.
        start: (n+1,) time at which the wait before each operation begins.
        run: (n,) time at which each operation begins.
        most: Result, (2, n): per operation k the bytes that may have left by then, and
            those that can be back in time; infinite where nothing is looked for.
        pair: Result, (2, n): the i of the pair that says so, and the j of that pair.
    """
    out_pointers, out_slots, out_values = outs
    in_pointers, in_slots, in_values = ins
    n = len(need)
    out_bytes, in_bytes = most[0], most[1]
    out_from, in_to = pair[0], pair[1]
    out_bytes[:] = in_bytes[:] = np.inf
    out_from[:] = in_to[:] = 0
    leaving, coming = np.zeros(n + 1), np.zeros(n + 1)
    for k in range(n):
        for e in range(out_pointers[k], out_pointers[k + 1]):
            leaving[out_slots[e]] += out_values[e]
        for e in range(in_pointers[k], in_pointers[k + 1]):
            coming[in_slots[e]] += in_values[e]
        if need[k] <= 0:
            continue
        earlier = 0.0
        for i in range(k + 1):
            allowed = earlier + out_rate * (run[k] - start[i])
            if allowed < out_bytes[k]:
                out_bytes[k], out_from[k] = allowed, i
            earlier += leaving[i]
        later = 0.0
        for j in range(first_backward, n):
            later += coming[j]
        for j in range(first_backward, n):
            later -= coming[j]
            if j > k:
                allowed = later + in_rate * (run[j] - start[k + 1])
                if allowed < in_bytes[k]:
                    in_bytes[k], in_to[k] = allowed, j


def warm_up() -> None:
    """Compiles on a fresh installation."""
    whole, number = np.zeros(0, np.int64), np.zeros(0)
    pointers = np.zeros(1, np.int64)
    changes = (pointers, whole, number)
    none, pair = np.zeros((2, 0)), np.zeros((2, 0), np.int64)
    one = np.zeros(1)
    find_tightest(changes, changes, number, one, number, 0, 1.0, 1.0, none, pair)
