"""Moves of many maps at once, for networks of thousands of functions.

Maps made by the same kind of function, of the same size, are alike. A move takes a
stretch of alike maps in order of production and gives every so-many-th map of one
action another action: evenly spread changes are what large networks of repeated blocks
need, and single maps are too small a step there. :mod:`.local_search` does the rest.
"""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.jit import compiled

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

    Args:
        allowed: (M, 3) bool, which actions each map may have; alike in a group.
        pointers: Beginnings of the groups in ``alike``, and its end.
        alike: (M,) maps by group, within each in order of production.

    Returns:
        int: Maps changed.
    """
    # A group is drawn by its number of maps.
    place = np.random.randint(len(alike))
    group = np.searchsorted(pointers, place, side='right') - 1
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
