"""Keeps what leaves for nothing.

Where copies hide behind compute, a plan that swaps everything is as fast, by the
simulator, as one that swaps little. But every copy costs the interpreter, the memory
bus and the link something that no simulator sees.
"""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.search.candidates import KEEP, Candidate, Search

MOST_WORK = 20_000_000  # operations simulated


def keep_more(search: Search, best: Candidate) -> Candidate:
    """Keeps as many maps as it finds to cost nothing, many at a time first.

    Args:
        search: Judges.
        best: Fits.

    Returns:
        Candidate: Not slower, with no more maps that leave.
    """
    leaving = np.flatnonzero(best.action != KEEP)
    order = np.argsort(-search.problem.arrays.producer[leaving], kind='stable')
    chunks = [leaving[order]]  # what lives shortest comes first
    trials = MOST_WORK // len(search.problem.arrays.seconds)
    while chunks and trials > 0:
        chunk = chunks.pop()
        action = best.action.copy()
        action[chunk] = KEEP
        found = search.evaluate(action)
        trials -= 1
        if found.fits and found.seconds <= best.seconds:
            best = found
        elif len(chunk) > 1:
            middle = len(chunk) // 2
            chunks += [chunk[middle:], chunk[:middle]]
    return best
