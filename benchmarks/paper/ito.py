"""Ito et al., Figs. 14 to 17, on a modelled V100 16 GB with PCIe 3.

    python -m benchmarks run paper.ito [--arch NAME ...] [--planner NAME ...]
                                   [--samples FOLDER] [--name NAME] [--redraw]

Each network is recorded with 2 and 4 pictures on the CPU and extrapolated
(docs/guide/estimate.md). The model's compute times are calibrated on one figure of the
paper, ResNet-50's in-core speed of 316 images/s; everything else is prediction.
One kernel replays what a session replays in one pass; ``hybrid (whole)`` is the planner
``hybrid`` where every replay runs a whole forward. Writes JSON, Markdown tables and,
with matplotlib, a picture to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common, saving
from chainer_hybridmem.commands import figures
from chainer_hybridmem.commands.compare import compare_one
from chainer_hybridmem.forecasting.estimation import (
    Estimator,
    load_device_model,
)
from chainer_hybridmem.planning.planners import PLANNERS, check_name
from chainer_hybridmem.planning.simulation import make_problem

Row = dict[str, Any]

GPU = 'v100-16gb-pcie3'
IN_CORE_SPEED, CALIBRATION_BATCH = 316.0, 128
CALIBRATED_ON = 'resnet50'
METHODS = (
    *('in-core', 'swap-all-unscheduled', 'swap-all', 'swap-opt'),
    *('superneurons', 'pooch', 'hybrid'),
)
WHOLE = 'hybrid (whole)'
IN_FIGURE = ('superneurons', 'pooch', 'hybrid', WHOLE)
# ResNet-50 as in the paper. It names no batch sizes for the others: up to where one
# normalisation alone (six maps at a time in backward) fills the GPU.
BATCHES = {
    'resnet50': (64, 128, 192, 256, 320, 384, 448, 512, 576, 640),
    'googlenet': (128, 256, 384, 512, 640, 768, 896, 1024),
    'alexnet': (256, 512, 768, 1024, 1280, 1536, 1792, 1920),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', nargs='+', choices=list(BATCHES), metavar='NAME')
    parser.add_argument('--planner', nargs='+', type=check_name, metavar='NAME')
    parser.add_argument('--samples', metavar='FOLDER', help='keeps the recordings')
    parser.add_argument('--name', default='paper_ito', help='of the result files')
    parser.add_argument(
        '--redraw', action='store_true', help='tables and picture from the JSON file'
    )


def main(options: argparse.Namespace) -> int:
    start = time.time()
    known = [name for name in METHODS if name in PLANNERS]
    planners = options.planner or known
    if options.redraw:
        publish(options.name, saving.read(options.name), planners)
        return 0
    model = load_device_model(GPU)

    def estimator(arch: str, recompute: str = 'pass') -> Estimator:
        pair = common.recordings(arch, options.samples)
        made = Estimator.make(pair, model)
        return dataclasses.replace(made, recompute=recompute)

    reference = estimator(CALIBRATED_ON)
    calibrated = reference.calibrated(IN_CORE_SPEED, CALIBRATION_BATCH)
    rows: list[Row] = []
    for arch in options.arch or BATCHES:
        passes = estimator(arch).with_factor_of(calibrated)
        whole = estimator(arch, 'whole').with_factor_of(calibrated)
        for batchsize in BATCHES[arch]:
            limit = model.memory_bytes
            rows += measure(arch, passes, batchsize, limit, planners)
            if 'hybrid' in planners:
                found = measure(arch, whole, batchsize, limit, ['hybrid'])
                rows += [{**row, 'method': WHOLE} for row in found]
        print(speed_table(rows, arch, planners), '\n', flush=True)
    body = {
        'gpu': GPU,
        'memory_limit_bytes': model.memory_bytes,
        'compute_factor': calibrated.factor,
        'uncalibrated_images_per_second': IN_CORE_SPEED * calibrated.factor,
        'seconds': time.time() - start,
        'rows': rows,
    }
    common.save(options.name, body)
    publish(options.name, body, planners)
    return 0


def publish(name: str, body: dict[str, Any], planners: list[str]) -> None:
    """Prints the tables, and writes them and the picture next to the JSON file."""
    rows = body['rows']
    archs = list(dict.fromkeys(row['arch'] for row in rows))
    tables = {
        'Goals': goals_table(rows),
        'Published figures': published_table(rows),
        'Images per second': '\n\n'.join(
            speed_table(rows, arch, planners) for arch in archs
        ),
    }
    if 'hybrid' in planners:
        title = 'hybrid: what it costs, and how far it may be from the best'
        tables[title] = '\n\n'.join(cost_table(rows, arch) for arch in archs)
    print('\n\n'.join(tables.values()))
    write_markdown(name, tables, body['compute_factor'])
    draw(name, rows)


def measure(
    arch: str, estimator: Estimator, batchsize: int, limit: int, planners: list[str]
) -> list[Row]:
    """One row per planner at one batch size."""
    problem = make_problem(estimator.profile(batchsize))
    figures.load_kernels(problem)
    rows = []
    for planner in planners:
        row = compare_one(problem, limit, planner)
        seconds, bound = row['iteration_seconds'], row['lower_bound_seconds']
        rows.append(
            {
                'arch': arch,
                'batchsize': batchsize,
                'method': planner,
                'recipes': estimator.recompute,
                'in_core_peak_bytes': problem.in_core_peak_bytes,
                'out_of_core': problem.in_core_peak_bytes > limit,
                'images_per_second': batchsize / seconds if seconds else None,
                'in_core_images_per_second': batchsize / problem.in_core_seconds,
                'bound_images_per_second': batchsize / bound if bound else None,
                **row,
            }
        )
    return rows


# -- tables ------------------------------------------------------------------------


def speed_table(rows: list[Row], arch: str, planners: list[str]) -> str:
    """Images per second of every method, by batch size."""
    shown = []
    for batchsize in batchsizes(rows, arch):
        found = at(rows, arch, batchsize)
        first = next(iter(found.values()))
        line = {arch: f'b{batchsize}', 'GB': f'{first["in_core_peak_bytes"] / 1e9:.1f}'}
        line |= {name: _number(found[name]['images_per_second']) for name in planners}
        line['bound'] = _number(bound_speed(found))
        shown.append(line)
    return common.table(shown, dict.fromkeys(shown[0], str))


def batchsizes(rows: list[Row], arch: str) -> list[int]:
    """Batch sizes of one network, in order."""
    return list(dict.fromkeys(r['batchsize'] for r in rows if r['arch'] == arch))


def bound_speed(found: dict[str, Row]) -> float | None:
    """Most images per second that any plan could reach with passes."""
    best = [
        row['bound_images_per_second']
        for row in found.values()
        if row['recipes'] == 'pass' and row['bound_images_per_second']
    ]
    return min(best, default=None)


def cost_table(rows: list[Row], arch: str) -> str:
    """Overhead in time, loss of throughput and gap of the planner ``hybrid``."""
    shown = []
    for batchsize in batchsizes(rows, arch):
        found = at(rows, arch, batchsize)
        line = {arch: f'b{batchsize}'}
        for method, short in (('hybrid', 'pass'), (WHOLE, 'whole')):
            row = found[method]
            line |= {
                f'{short}: time': _percent(row['overhead']),
                f'{short}: images/s': _percent(loss(row)),
                f'{short}: gap': _percent(row['gap']),
                f'{short}: keep / swap / recompute': (
                    '{keep} / {swap} / {recompute}'.format(**row)
                    if row['fits']
                    else '-'
                ),
            }
        line['planning'] = _seconds(found['hybrid']['planning_seconds'])
        shown.append(line)
    return common.table(shown, dict.fromkeys(shown[0], str))


def loss(row: Row) -> float | None:
    """Change of throughput against in-core."""
    speed = row['images_per_second']
    return None if speed is None else speed / row['in_core_images_per_second'] - 1


def _percent(value: float | None) -> str:
    return '-' if value is None else f'{value:+.1%}'


def _seconds(value: float | None) -> str:
    return '-' if value is None else f'{value:.1f} s'


GOALS = (
    ('resnet50', 'at b640', 0.10, '+53 %'),
    ('googlenet', 'worst batch size', 0.10, '+64 %'),
    ('alexnet', 'worst batch size', 0.02, '+5 %'),
)


def goals_table(rows: list[Row]) -> str:
    """Time over in-core of the planner ``hybrid`` beside the goals and the paper."""
    shown = []
    for arch, where, most, paper in GOALS:
        line = {
            'network': f'{arch}, {where}',
            'goal': f'at most {most:+.0%}',
            'paper, measured': paper,
        }
        for method, short in (('hybrid', 'pass'), (WHOLE, 'whole')):
            found = [
                row
                for row in rows
                if (row['arch'], row['method']) == (arch, method) and row['fits']
                if where != 'at b640' or row['batchsize'] == 640
            ]
            worst = max(
                found,
                key=lambda row: (round(row['overhead'], 3), row['batchsize']),
                default=None,
            )
            said = '-'
            if worst is not None:
                said = '{} at b{}, gap {}'.format(
                    _percent(worst['overhead']),
                    worst['batchsize'],
                    _percent(worst['gap']),
                )
                said += '' if worst['overhead'] <= most else ' (missed)'
            line[f'hybrid, {short}'] = said
        shown.append(line)
    return common.table(shown, dict.fromkeys(shown[0], str))


def at(rows: list[Row], arch: str, batchsize: int) -> dict[str, Row]:
    """Rows of one network and batch size, by method."""
    return {
        row['method']: row
        for row in rows
        if (row['arch'], row['batchsize']) == (arch, batchsize)
    }


def _number(value: float | None) -> str:
    return '-' if value is None else f'{value:.1f}'


def ratios(rows: list[Row], arch: str, above: str, below: str) -> list[float]:
    """Speed of one method over another's, at every out-of-core batch size."""
    found = []
    for batchsize in batchsizes(rows, arch):
        here = at(rows, arch, batchsize)
        one, other = here.get(above), here.get(below)
        if one and other and one['out_of_core'] and one['fits'] and other['fits']:
            found.append(one['images_per_second'] / other['images_per_second'])
    return found


def losses(rows: list[Row], arch: str, planner: str) -> list[Any]:
    """Loss of throughput against in-core, at every out-of-core batch size."""
    return [
        loss(row)
        for row in rows
        if (row['arch'], row['method']) == (arch, planner)
        and row['out_of_core']
        and row['fits']
    ]


def _gains(values: list[float]) -> str:
    return _range([v - 1 for v in values], '{:+.0%}')


def _times(values: list[float]) -> str:
    return _range(values, '{:.2f}x')


def _loss(values: list[float]) -> str:
    return _range(values, '{:+.1%}')


def _range(values: list[float], form: str) -> str:
    if not values:
        return '-'
    ends = [form.format(v) for v in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else ' to '.join(ends)


Claim = tuple[str, Callable[[list[float]], str], tuple[str, str], dict[str, str]]
CLAIMS: tuple[Claim, ...] = (
    (
        'swap-all over unscheduled (Fig. 14)',
        _gains,
        ('swap-all', 'swap-all-unscheduled'),
        dict.fromkeys(BATCHES, '+11 to +16 % over the three'),
    ),
    (
        'swap-opt over swap-all (Fig. 14)',
        _times,
        ('swap-opt', 'swap-all'),
        dict.fromkeys(BATCHES, '1.8 to 2.7x over the three'),
    ),
    (
        'pooch over swap-opt (Fig. 14)',
        _times,
        ('pooch', 'swap-opt'),
        {'resnet50': '1.47x', 'alexnet': '1.01x'},
    ),
    (
        'pooch over superneurons (Figs. 15, 16)',
        _times,
        ('pooch', 'superneurons'),
        {'resnet50': '1.33 to 1.84x', 'googlenet': 'up to 1.33x'},
    ),
    (
        'hybrid over superneurons',
        _times,
        ('hybrid', 'superneurons'),
        {},
    ),
    ('hybrid over pooch', _times, ('hybrid', 'pooch'), {}),
)
LOSSES = {
    'resnet50': ('-34 to -16 %', '+19 to +53 %'),
    'googlenet': ('-39 to -2 %', '+2 to +64 %'),
    'alexnet': ('at most -5 %', 'at most +5 %'),
}


def published_table(rows: list[Row]) -> str:
    """What the paper says next to what the model predicts, out-of-core."""
    shown = []
    for arch in dict.fromkeys(row['arch'] for row in rows):
        for title, form, (above, below), published in CLAIMS:
            values = ratios(rows, arch, above, below)
            if values:
                line = (title, published.get(arch, '-'), form(values))
                shown.append((arch, *line))
        for planner in ('pooch', 'hybrid', WHOLE):
            values = losses(rows, arch, planner)
            if values:
                said, time_said = LOSSES[arch] if planner == 'pooch' else ('-', '-')
                title = f'{planner}: images/s against in-core (Figs. 15 to 17)'
                shown.append((arch, title, said, _loss(values)))
                title = f'{planner}: the same as time over in-core'
                times = [1 / (1 + v) - 1 for v in values]
                shown.append((arch, title, time_said, _loss(times)))
    names = ('network', 'figure', 'published', 'here')
    lines = [dict(zip(names, line, strict=True)) for line in shown]
    return common.table(lines, dict.fromkeys(names, str))


NOTES = (pathlib.Path(__file__).resolve().parent / 'ito_notes.md').read_text()


def write_markdown(name: str, tables: dict[str, str], factor: float) -> None:
    """Writes the tables next to the JSON file."""
    head = (
        f'# Ito et al. on a modelled V100\n\nV100, PCIe 3, limit 16e9 bytes '
        f'(`benchmarks run paper.ito`). Calibrated on ResNet-50 in-core at '
        f'{IN_CORE_SPEED:.0f} images/s: compute times x {factor:.3f}. Everything here '
        f'but the column of the paper is predicted, not measured. "pass" and "whole": '
        f'see `docs/guide/estimate.md`; all methods but "whole" replay by passes. '
        f'"-": does not fit. "gap" is to the proven bound.\n\n![throughput]({name}.png)'
    )
    parts = [head, *(f'## {title}\n{text}' for title, text in tables.items())]
    saving.save_text(name, '\n\n'.join([*parts, NOTES]))


STYLES: dict[str, dict[str, Any]] = {
    'superneurons': {'color': 'tab:orange', 'marker': 's', 'markersize': 4},
    'pooch': {'color': 'tab:green', 'marker': '^', 'markersize': 5},
    'hybrid': {'color': 'tab:blue', 'marker': 'o', 'markersize': 5},
    WHOLE: {'color': 'tab:purple', 'marker': '.', 'linestyle': '--'},
}


# -- picture -----------------------------------------------------------------------


def draw_speeds(panel: Any, here: list[dict[str, Row]]) -> None:
    """Images per second against batch size."""
    first = [next(iter(found.values())) for found in here]
    sizes = [row['batchsize'] for row in first]
    speeds = [row['in_core_images_per_second'] for row in first]
    panel.plot(sizes, speeds, color='0.7', label='in-core, if it did fit')
    fits = [row for row in first if not row['out_of_core']]
    panel.plot(
        [row['batchsize'] for row in fits],
        [row['in_core_images_per_second'] for row in fits],
        color='0.6',
        linewidth=6,
        label='in-core, fits',
    )
    panel.plot(sizes, [bound_speed(found) for found in here], 'k:', label='bound')
    for method in IN_FIGURE:
        _line(panel, here, method, 'images_per_second', 1.0)
    panel.set(ylim=(0, 1.1 * max(speeds)))
    panel.grid(alpha=0.3)


def draw_overheads(panel: Any, here: list[dict[str, Row]]) -> None:
    """Time over in-core against batch size."""
    for method, style in (('hybrid', 'k:'), (WHOLE, 'm:')):
        rows = [found[method] for found in here if method in found]
        bounds = [
            100
            * (row['in_core_images_per_second'] / row['bound_images_per_second'] - 1)
            for row in rows
            if row['bound_images_per_second']
        ]
        if len(bounds) == len(here):
            sizes = [row['batchsize'] for row in rows]
            label = 'bound' if method == 'hybrid' else 'bound (whole)'
            panel.plot(sizes, bounds, style, label=label)
    for method in IN_FIGURE:
        _line(panel, here, method, 'overhead', 100.0)
    panel.set(xlabel='batch size', ylim=(-1, 21))
    panel.grid(alpha=0.3)


def _line(
    panel: Any, here: list[dict[str, Row]], method: str, key: str, factor: float
) -> None:
    points = [
        (found[method]['batchsize'], factor * found[method][key])
        for found in here
        if method in found and found[method]['fits']
    ]
    if points:
        panel.plot(*zip(*points, strict=True), **STYLES[method], label=method)


def draw(name: str, rows: list[Row]) -> None:
    """Throughput against batch size, one panel per network, as Figs. 15 to 17."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no picture without matplotlib', file=sys.stderr)
        return
    archs = list(dict.fromkeys(row['arch'] for row in rows))
    figure = Figure(figsize=(4.6 * len(archs), 7), layout='constrained')
    panels = figure.subplots(2, len(archs), squeeze=False)
    for column, arch in enumerate(archs):
        here = [at(rows, arch, b) for b in batchsizes(rows, arch)]
        draw_speeds(panels[0][column], here)
        draw_overheads(panels[1][column], here)
        panels[0][column].set_title(arch)
    panels[0][0].set_ylabel('images / s')
    panels[1][0].set_ylabel('time over in-core in %')
    panels[0][0].legend(loc='lower left')
    panels[1][-1].legend(loc='upper left')
    figure.savefig(saving.path(name, 'png'), dpi=110)
    print(f'written: benchmarks/results/{name}.png', file=sys.stderr)
