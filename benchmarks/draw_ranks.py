"""Draws the lanes of two processes on one link: in lockstep, and half apart.

    python -m benchmarks run draw_ranks

ResNet-50 on two V100s with 16 GB each that share 12 GB/s, simulated for
``docs/pictures/ranks.png``: a plan for a link alone, and one that knows the link.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks import saving
from chainer_hybridmem import load_profile
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.sharing import share_links
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.planning.simulation.staggered import LANES, find_spans, stagger
from chainer_hybridmem.reporting import canvas
from chainer_hybridmem.reporting.palette import COLOURS
from chainer_hybridmem.units import format_seconds, parse_bytes

PROFILE = 'shipped:resnet50-b640-v100-estimated'
LIMIT = '16GB'
RANKS = 2
STEADY = 4  # iterations after which they repeat themselves
PATH = os.path.join(saving.ROOT, 'docs', 'pictures', 'ranks.png')
_COLOURS = {
    'd2h': COLOURS['swap-out'],
    'h2d': COLOURS['swap-in'],
    'compute': COLOURS['backward'],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes the file to write."""
    parser.add_argument('--output', default=PATH)


def main(options: argparse.Namespace) -> int:
    """Plans, simulates and draws."""
    limit_bytes = parse_bytes(LIMIT, 'limit')
    alone = make_problem(load_profile(PROFILE))
    shared = make_problem(share_links(alone.profile, RANKS))
    unaware = make_plan(alone, limit_bytes)
    aware = make_plan(shared, limit_bytes)
    apart = stagger(alone, unaware, RANKS).offsets
    lockstep = (0.0,) * RANKS
    figure = canvas.make(11, 9)
    rows = figure.subplots(3, 1, sharex=True)
    longest = 0.0
    for axes, title, plan, offsets in zip(
        rows,
        (
            'Lockstep, each plans for a link alone',
            'Lockstep, one plan that knows the link',
            'Half an iteration apart (double buffering), each plans for a link alone',
        ),
        (unaware, aware, unaware),
        (lockstep, lockstep, apart),
        strict=True,
    ):
        longest = max(longest, draw(axes, title, alone, plan, offsets))
    rows[-1].set_xlim(0, 1.02 * longest)
    rows[-1].set_xlabel('seconds')
    canvas.save(figure, options.output)
    print(options.output)
    return 0


def draw(
    axes: Any, title: str, problem: Problem, plan: Plan, offsets: tuple[float, ...]
) -> float:
    """One panel: an iteration of the first process; returns its seconds."""
    spans = find_spans(problem, plan, offsets, STEADY + 2)
    first = [s for s in spans if (s.rank, s.lane) == (0, 'compute')]
    each = len(first) // (STEADY + 2)
    begin, end = (first[(STEADY + i) * each].begin for i in range(2))
    names = []
    for rank in range(len(offsets)):
        for lane in LANES:
            height = -len(names)
            names.append(f'process {rank}: {lane}')
            axes.broken_barh(
                [
                    (s.begin - begin, s.end - s.begin)
                    for s in spans
                    if (s.rank, s.lane) == (rank, lane)
                    and begin < s.end
                    and s.begin < end
                ],
                (height - 0.4, 0.8),
                color=_COLOURS[lane],
            )
    axes.axvline(end - begin, color='#d64545', linewidth=1)
    axes.set_yticks([-i for i in range(len(names))], names)
    axes.set_title(
        f'{title}: {format_seconds(end - begin)} per iteration, '
        f'in-core {format_seconds(plan.in_core_seconds)}'
    )
    return end - begin
