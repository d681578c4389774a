"""An offset for every buffer of an iteration, and a slow and simple check of them."""

from __future__ import annotations

import dataclasses

import numpy as np

from chainer_hybridmem.errors import OptionError, PlanError
from chainer_hybridmem.planning.layouts.trace import Trace

CUDA_ALIGNMENT, HOST_ALIGNMENT = 512, 64


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every buffer of a trace lies.

    Attributes:
        offsets (tuple of int): First byte of each buffer.
        footprint_bytes (int): End of the highest buffer.
        bound_bytes (int): No layout is smaller: the peak load, every size rounded
            up to the alignment, or more, where a search has proven that.
        peak_load_bytes (int): Highest load of the trace, nothing rounded.
        alignment (int): Every offset is a multiple of it.
        found_by (str): The order and fit, or the search, that found it.
    """

    offsets: tuple[int, ...]
    footprint_bytes: int
    bound_bytes: int
    peak_load_bytes: int
    alignment: int
    found_by: str

    @property
    def optimal(self) -> bool:
        """Whether the footprint is proven to be the smallest possible."""
        return self.footprint_bytes == self.bound_bytes

    @property
    def competitive_ratio(self) -> float:
        """Footprint over peak load."""
        if not self.peak_load_bytes:
            return 1.0
        return self.footprint_bytes / self.peak_load_bytes

    @property
    def gap(self) -> float:
        """Footprint over the proven bound, minus 1."""
        return self.footprint_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0


def check_alignment(alignment: int) -> None:
    """Refuses an alignment that is not a power of two up to 1 GiB.

    Raises:
        OptionError: With the value.
    """
    if not (1 <= alignment <= 2**30 and alignment & (alignment - 1) == 0):
        raise OptionError(
            f'alignment is {alignment}; it must be a power of two, such as 512.'
        )


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
