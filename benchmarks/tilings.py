"""Tilings: how far layouts are from an optimum that is known by construction.

    python -m benchmarks run tilings [--tilings 200] [--seed 0]

Draws rectangles of time and memory that are cut into 100 to 2,000 buffers
(``lab/contest/tilings``), lays them out by ``smartpool`` and by ``exact`` at its
defaults, and checks the layouts. Writes ``benchmarks/results/tilings.json``: footprints
over the optimum and CPU seconds, for each way to cut, the worst with their seeds.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from benchmarks import saving
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.lab.contest import tilings
from chainer_hybridmem.planning.layouts import check_layout, exact, smartpool

NAME = 'tilings'
LAYOUTS = {'smartpool': smartpool, 'exact': exact}
LISTED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--tilings', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0, help='of the first tiling')


def main(options: argparse.Namespace) -> int:
    """Lays out all tilings."""
    try_tiling(options.seed - 1)  # compiles
    rows = []
    with Progress(options.tilings, sys.stderr) as progress:
        for seed in range(options.seed, options.seed + options.tilings):
            progress.step(f'tiling {seed}')
            rows.append(try_tiling(seed))
    body: dict[str, Any] = {'seed': options.seed, 'tilings': len(rows)}
    for kind in tilings.KINDS:
        body[kind] = summarise([row for row in rows if row['kind'] == kind])
    far = [row for row in rows if row['exact'] > 1]
    saving.save(NAME, body | {'far': far[:LISTED]})
    print(body)
    return 0


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many are equal to the optimum, and the worst."""
    body: dict[str, Any] = {'tilings': len(rows)}
    for name in LAYOUTS:
        body[name] = {
            'equal': sum(row[name] == 1 for row in rows),
            'worst': max((row[name] for row in rows), default=None),
            'most_seconds': max((row[f'{name}_seconds'] for row in rows), default=None),
        }
    return body


def try_tiling(seed: int) -> dict[str, Any]:
    """Footprints of one tiling over its optimum, with CPU seconds."""
    kind, trace, _ = tilings.draw_tiling(seed)
    row: dict[str, Any] = {'seed': seed, 'kind': kind, 'buffers': len(trace.sizes)}
    for name, lay_out in LAYOUTS.items():
        began = time.process_time()
        layout = lay_out(trace)
        row[f'{name}_seconds'] = time.process_time() - began
        check_layout(trace, layout)
        row[name] = layout.footprint_bytes / tilings.MEMORY_BYTES
    return row
