"""Traces for the tests of pools: hand-made, random, and hypothesis strategies."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from chainer_hybridmem.planning.layouts import Trace, from_lifetimes


def random_trace(seed: int, buffers: int = 40, moments: int = 30) -> Trace:
    """Buffers of many sizes that live anywhere."""
    rng = random.Random(seed)
    lower = [rng.randrange(moments) for _ in range(buffers)]
    upper = [start + 1 + rng.randrange(moments // 2) for start in lower]
    return from_lifetimes([rng.randint(1, 5000) for _ in lower], lower, upper)


def lifetimes(most: int = 6) -> st.SearchStrategy[Trace]:
    """Few small buffers."""
    buffer = st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(1, 4))
    return st.lists(buffer, min_size=1, max_size=most).map(
        lambda rows: from_lifetimes(
            [size for size, _, _ in rows],
            [start for _, start, _ in rows],
            [start + length for _, start, length in rows],
        )
    )


@st.composite
def traces(draw: st.DrawFn, most: int = 12) -> Trace:
    """Any events: buffers that are there before, that stay, that are carried."""
    sizes = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=most))
    kinds = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    steps = []
    for i, kind in enumerate(kinds):
        a, b = sorted((draw(st.floats(0, 1)), draw(st.floats(0, 1))))
        if kind in (1, 3):
            steps.append((a, i + 1))
        if kind in (2, 3):
            steps.append((b + 1e-9 if kind == 3 else a, -(i + 1)))
    steps.sort(key=lambda step: (step[0], step[1] < 0))
    events = [event for _, event in steps]
    born = {e - 1 for e in events if e > 0}
    freed = {-e - 1 for e in events if e < 0}
    carried = []
    waiting = sorted(freed - born)
    for left in sorted(born - freed):
        same = [taken for taken in waiting if sizes[taken] == sizes[left]]
        if same:
            carried.append((left, same[0]))
            waiting.remove(same[0])
    return Trace(tuple(sizes), tuple(events), (), tuple(carried))
