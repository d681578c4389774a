"""Checks of layouts, slow and simple on purpose."""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.pools.layout import Layout
from chainer_hybridmem.pools.trace import Trace


def check_layout(trace: Trace, layout: Layout) -> None:
    """Checks a layout: buffers that are alive together must not overlap.

    A carried buffer must lie where its successor does, which lives until the last of
    its size is free. What comes before its successor is free is left out.

    Raises:
        PlanError: Naming two buffers, or one outside of the footprint.
    """
    lower, upper = trace.lifetimes()
    _check_carried(trace, layout, lower, upper)
    for i, offset in enumerate(layout.offsets):
        end = offset + trace.sizes[i]
        if offset < 0 or end > layout.footprint_bytes or offset % layout.alignment:
            raise PlanError(
                f'Buffer {trace.name(i)} lies from byte {offset} to {end} of '
                f'{layout.footprint_bytes}, alignment {layout.alignment}.'
            )
    _check_overlaps(trace, layout, lower, upper)


def _check_carried(
    trace: Trace, layout: Layout, lower: np.ndarray, upper: np.ndarray
) -> None:
    """Writes into ``upper`` until when the successors of carried buffers live."""
    last: dict[int, int] = {}
    for left, taken in trace.carried:
        nbytes = trace.sizes[left]
        last[nbytes] = max(last.get(nbytes, 0), int(upper[taken]))
    for left, taken in trace.carried:
        until = last[trace.sizes[left]]
        if until > lower[left] or not trace.sizes[left]:
            continue
        upper[taken] = until
        if layout.offsets[left] != layout.offsets[taken]:
            raise PlanError(
                f'Buffer {trace.name(left)} lies at byte {layout.offsets[left]}, but '
                f'in the next iteration at {layout.offsets[taken]}.'
            )


def _check_overlaps(
    trace: Trace, layout: Layout, lower: np.ndarray, upper: np.ndarray
) -> None:
    alive: list[int] = []
    for i in sorted(range(len(lower)), key=lambda i: lower[i]):
        alive = [j for j in alive if upper[j] > lower[i]]
        if not trace.sizes[i] or lower[i] >= upper[i]:
            continue
        for j in alive:
            if (
                layout.offsets[i] < layout.offsets[j] + trace.sizes[j]
                and layout.offsets[j] < layout.offsets[i] + trace.sizes[i]
            ):
                raise PlanError(
                    f'Buffers {trace.name(i)} and {trace.name(j)} live together from '
                    f'moment {max(lower[i], lower[j])}, but their memory overlaps.'
                )
        alive.append(i)
