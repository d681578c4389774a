"""What a layout places: the buffers of a trace, rounded, carried pairs as one."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np

from chainer_hybridmem.pools.layout import Layout, check_alignment
from chainer_hybridmem.pools.trace import Trace, loads


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What is placed: buffers, carried pairs as one, without what always lives."""

    size: np.ndarray  # (n,) int64, rounded up
    spans: np.ndarray  # (n, 4) int64, see placement
    end: int
    members: tuple[tuple[int, ...], ...]  # buffers of each block
    base_bytes: int  # below all: what lives from start to end
    base: tuple[tuple[int, int], ...]  # (buffer, offset) there
    bound_bytes: int
    alignment: int

    def loads(self) -> np.ndarray:
        first = loads(self.size, self.spans[:, 0], self.spans[:, 1], self.end)
        return first + loads(self.size, self.spans[:, 2], self.spans[:, 3], self.end)

    def lengths(self) -> np.ndarray:
        """Moments each block is alive."""
        spans = self.spans
        return spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2]

    def highest_loads(self) -> np.ndarray:
        """Highest load while each block is alive."""
        every = self.loads()
        return np.array(
            [
                max(every[a:b].max(initial=0), every[c:d].max(initial=0))
                for a, b, c, d in self.spans.tolist()
            ],
            np.int64,
        )

    @property
    def capacity(self) -> int:
        """Bytes above the base that no layout can do without."""
        return self.bound_bytes - self.base_bytes


def make_blocks(trace: Trace, alignment: int) -> Blocks:
    """The blocks of a trace.

    Raises:
        OptionError: If the alignment is not a power of two.
    """
    check_alignment(alignment)
    lower, upper = trace.lifetimes()
    rounded = -(-np.array(trace.sizes, np.int64) // alignment) * alignment
    partner = _find_carried(trace, lower, upper)
    second = {taken for taken, _ in partner.values()}
    members: list[tuple[int, ...]] = []
    spans: list[tuple[int, int, int, int]] = []
    base: list[tuple[int, int]] = []
    height = 0
    for i in range(len(rounded)):
        if i in second or not rounded[i] or lower[i] >= upper[i]:
            continue
        if lower[i] == 0 and upper[i] == trace.end:
            base.append((i, height))
            height += int(rounded[i])
        elif i in partner:
            taken, until = partner[i]
            members.append((i, taken))
            spans.append((int(lower[i]), int(upper[i]), 0, until))
        else:
            members.append((i,))
            spans.append((int(lower[i]), int(upper[i]), 0, 0))
    size = rounded[[m[0] for m in members]] if members else np.zeros(0, np.int64)
    blocks = Blocks(
        size=size,
        spans=np.array(spans, np.int64).reshape(len(spans), 4),
        end=trace.end,
        members=tuple(members),
        base_bytes=height,
        base=tuple(base),
        bound_bytes=0,
        alignment=alignment,
    )
    bound = height + int(blocks.loads().max())
    return dataclasses.replace(blocks, bound_bytes=bound)


def _find_carried(
    trace: Trace, lower: np.ndarray, upper: np.ndarray
) -> dict[int, tuple[int, int]]:
    """What each buffer left behind is in the next iteration, and until when.

    Of several with one size any may be freed first: each is taken to live until the
    last of them is. What is not free when its successor comes stays untied: it
    lies elsewhere every other iteration.
    """
    until: dict[int, int] = defaultdict(int)
    for left, taken in trace.carried:
        nbytes = trace.sizes[left]
        until[nbytes] = max(until[nbytes], int(upper[taken]))
    return {
        left: (taken, until[trace.sizes[left]])
        for left, taken in trace.carried
        if until[trace.sizes[left]] <= lower[left]
    }


def take_part(blocks: Blocks, chosen: np.ndarray) -> Blocks:
    """Some of the blocks, as if there were no others."""
    part = dataclasses.replace(
        blocks,
        size=blocks.size[chosen],
        spans=blocks.spans[chosen],
        members=tuple(blocks.members[i] for i in chosen.tolist()),
    )
    bound = part.base_bytes + int(part.loads().max())
    return dataclasses.replace(part, bound_bytes=bound)


def make_layout(
    trace: Trace, blocks: Blocks, offset: np.ndarray, alignment: int, found_by: str
) -> Layout:
    """The layout of a trace with these offsets of its blocks."""
    offsets = [0] * len(trace.sizes)
    for buffer, where in blocks.base:
        offsets[buffer] = where
    for buffers, where in zip(blocks.members, offset.tolist(), strict=True):
        for buffer in buffers:
            offsets[buffer] = blocks.base_bytes + where
    ends = (offset + blocks.size).max(initial=0)
    return Layout(
        offsets=tuple(offsets),
        footprint_bytes=blocks.base_bytes + int(ends),
        bound_bytes=blocks.bound_bytes,
        peak_load_bytes=trace.peak_load_bytes,
        alignment=alignment,
        found_by=found_by,
    )
