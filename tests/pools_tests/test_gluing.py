"""Blocks that fill a rectangle are laid out as one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from problems import random_trace, traces

from chainer_hybridmem.lab.contest import tilings
from chainer_hybridmem.planning.layouts import Trace, check_layout, exact
from chainer_hybridmem.planning.layouts.gluing import glue
from chainer_hybridmem.planning.layouts.offline import given as given_layout
from chainer_hybridmem.planning.layouts.placement import (
    list_starts,
    make_blocks,
    make_layout,
    place_in_order,
)


@pytest.mark.parametrize('seed', [0, 1, 90, 184])  # the last two need a search, too
def test_tilings_are_laid_out_as_they_were_cut(seed: int) -> None:
    tiling = tilings.draw_tiling(seed)
    cut = given_layout(tiling.trace, tiling.offsets)
    check_layout(tiling.trace, cut)
    assert cut.footprint_bytes == cut.bound_bytes == tilings.MEMORY_BYTES
    found = exact(tiling.trace)
    check_layout(tiling.trace, found)
    assert found.footprint_bytes == tilings.MEMORY_BYTES


@pytest.mark.parametrize('kind', ['guillotine', 'pinwheel'])
def test_all_pieces_of_a_tiling_become_one(kind: str) -> None:
    first = tilings.KINDS.index(kind)
    for tiling in map(tilings.draw_tiling, (first, first + 6)):
        assert tiling.kind == kind
        glued, _ = glue(make_blocks(tiling.trace, 1))
        assert len(glued.size) == 1


def test_seeds_draw_the_same_again_and_sizes_from_100_to_2000() -> None:
    first, again = tilings.draw_tiling(5), tilings.draw_tiling(5)
    assert first == again != tilings.draw_tiling(7)
    drawn = [tilings.draw_tiling(seed) for seed in range(20)]
    counts = [len(d.trace.sizes) for d in drawn if d.kind != 'gaps']
    assert 100 <= min(counts) < 500 and 1500 < max(counts) <= 2004


def test_a_tiling_with_gaps_has_the_optimum_of_the_whole_one() -> None:
    tiling = tilings.draw_tiling(2)
    cut = given_layout(tiling.trace, tiling.offsets)
    check_layout(tiling.trace, cut)
    assert tiling.kind == 'gaps' and tiling.trace.loads().mean() < cut.bound_bytes
    assert cut.footprint_bytes == cut.bound_bytes == tilings.MEMORY_BYTES


def lay_out_glued(trace: Trace) -> int:
    """How many blocks are left."""
    blocks = make_blocks(trace, 1)
    glued, take_apart = glue(blocks)
    found = place_in_order(glued, next(list_starts(glued)))
    offset = take_apart(found.offset)
    layout = make_layout(trace, blocks, offset, 1, 'glued')
    check_layout(trace, layout)
    assert layout.footprint_bytes == blocks.base_bytes + found.nbytes
    return len(glued.size)


@given(traces(24))
def test_what_is_glued_does_not_overlap(trace: Trace) -> None:
    lay_out_glued(trace)


def test_what_is_glued_does_not_overlap_in_larger_traces() -> None:
    for seed in range(20):
        trace = random_trace(seed, 200, 12)
        few = dataclasses.replace(
            trace, sizes=tuple(s // 1000 + 1 for s in trace.sizes)
        )
        assert lay_out_glued(few) < 150
