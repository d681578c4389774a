"""Draws ``results/host_methods.json``: predicted against measured, and speed.

python -m benchmarks run draw_methods [RESULT.json]
"""

from __future__ import annotations

import argparse
import json
import pathlib

import matplotlib

matplotlib.use('Agg')

from matplotlib import pyplot as plt

from benchmarks import saving

RESULTS = pathlib.Path(saving.RESULTS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument(
        'result', nargs='?', type=pathlib.Path, default=RESULTS / 'host_methods.json'
    )


def main(options: argparse.Namespace) -> int:
    path: pathlib.Path = options.result
    rows = json.loads(path.read_text(encoding='utf-8'))['rows']
    rows = [r for r in rows if r.get('fits', True)]
    archs = sorted({r['arch'] for r in rows})
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5))
    scatter, bars = axes
    for arch, marker in zip(archs, 'os^Dv', strict=False):
        chosen = [r for r in rows if r['arch'] == arch]
        scatter.scatter(
            [r['iteration_seconds'] for r in chosen],
            [r['predicted_seconds'] for r in chosen],
            marker=marker,
            label=arch,
        )
    longest = max(r['iteration_seconds'] for r in rows) * 1.2
    shortest = min(r['iteration_seconds'] for r in rows) / 1.2
    ends = [shortest, longest]
    scatter.plot(ends, ends, color='gray', linewidth=1)
    scatter.fill_between(
        ends,
        [e * 0.92 for e in ends],
        [e * 1.08 for e in ends],
        color='gray',
        alpha=0.2,
        label='within 8 %',
    )
    scatter.set(xscale='log', yscale='log', xlabel='measured s / iteration')
    scatter.set(ylabel='forecast s / iteration', title='Forecast against measured')
    scatter.legend()
    planners = list(dict.fromkeys(r['planner'] for r in rows))
    width = 0.8 / len(planners)
    for i, planner in enumerate(planners):
        by_arch = {r['arch']: r for r in rows if r['planner'] == planner}
        at = [x + (i - len(planners) / 2) * width for x in range(len(archs))]
        heights = [
            by_arch[a]['iteration_seconds'] if a in by_arch else 0 for a in archs
        ]
        bars.bar(at, heights, width, label=planner)
    bars.set_xticks(range(len(archs)), archs)
    bars.set(ylabel='measured s / iteration', title='Measured on the host device')
    bars.legend(fontsize=8)
    figure.tight_layout()
    target = path.with_suffix('.png')
    figure.savefig(target, dpi=110)
    print(f'written: benchmarks/results/{target.name}')
    return 0
