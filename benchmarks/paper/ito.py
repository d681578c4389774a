"""Ito et al., Figs. 14 to 17, on a modelled V100 16 GB with PCIe 3.

    python benchmarks/paper/ito.py [--arch NAME ...] [--planner NAME ...]
                                   [--samples FOLDER] [--name NAME]

Each network is recorded with 2 and 4 pictures on the CPU and extrapolated
(docs/estimate.md). The model's compute times are calibrated on one figure of the
paper, ResNet-50's in-core speed of 316 images/s; everything else is prediction.
Writes JSON, a Markdown table and, with matplotlib, a picture to
``benchmarks/results``. A planner named ``hybrid`` is included where there is one.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import common

from chainer_hybridmem.commands import figures, samples
from chainer_hybridmem.commands.compare import compare_one
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.estimation import (
    Estimator,
    load_device_model,
)
from chainer_hybridmem.planners import PLANNERS, check_name
from chainer_hybridmem.simulation import make_problem

Row = dict[str, Any]

GPU = 'v100-16gb-pcie3'
IN_CORE_SPEED, CALIBRATION_BATCH = 316.0, 128
CALIBRATED_ON = 'resnet50'
METHODS = (
    *('in-core', 'swap-all-unscheduled', 'swap-all', 'swap-opt'),
    *('superneurons', 'pooch', 'hybrid'),
)
IN_FIGURE = ('in-core', 'superneurons', 'pooch', 'hybrid')
# ResNet-50 as in the paper. It names no batch sizes for the others: up to where one
# normalisation alone (six maps at a time in backward) fills the GPU.
BATCHES = {
    'resnet50': (64, 128, 192, 256, 320, 384, 448, 512, 576, 640),
    'googlenet': (128, 256, 384, 512, 640, 768, 896, 1024),
    'alexnet': (256, 512, 768, 1024, 1280, 1536, 1792, 1920),
}
SAMPLE_BATCHES = (2, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--arch', nargs='+', choices=list(BATCHES), metavar='NAME')
    parser.add_argument('--planner', nargs='+', type=check_name, metavar='NAME')
    parser.add_argument('--samples', metavar='FOLDER', help='keeps the recordings')
    parser.add_argument('--name', default='paper_ito', help='of the result files')
    options = parser.parse_args()
    start = time.time()
    known = [name for name in METHODS if name in PLANNERS]
    planners = options.planner or known
    model = load_device_model(GPU)

    def estimator(arch: str) -> Estimator:
        return Estimator.make(recordings(arch, options.samples), model)

    reference = estimator(CALIBRATED_ON)
    calibrated = reference.calibrated(IN_CORE_SPEED, CALIBRATION_BATCH)
    rows: list[Row] = []
    for arch in options.arch or BATCHES:
        network = reference if arch == CALIBRATED_ON else estimator(arch)
        network = network.with_factor_of(calibrated)
        for batchsize in BATCHES[arch]:
            rows += measure(arch, network, batchsize, model.memory_bytes, planners)
        print(speed_table(rows, arch, planners), '\n', flush=True)
    tables = [speed_table(rows, arch, planners) for arch in options.arch or BATCHES]
    tables.append(published_table(rows))
    print(tables[-1])
    body = {
        'gpu': GPU,
        'memory_limit_bytes': model.memory_bytes,
        'compute_factor': calibrated.factor,
        'uncalibrated_images_per_second': IN_CORE_SPEED * calibrated.factor,
        'seconds': time.time() - start,
        'rows': rows,
    }
    common.save(options.name, body)
    write_markdown(options.name, tables, calibrated.factor)
    draw(options.name, rows, planners)
    return 0


def recordings(arch: str, folder: str | None) -> Any:
    """Two recorded iterations of a network, from a file if there is one."""
    path = os.path.join(folder, f'{arch}.json') if folder else None
    found = samples.obtain(arch, None, 1000, SAMPLE_BATCHES, 'cpu', path, sys.stderr)
    return found.pair


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
    for batchsize in dict.fromkeys(r['batchsize'] for r in rows if r['arch'] == arch):
        found = at(rows, arch, batchsize)
        best = [r['bound_images_per_second'] for r in found.values()]
        tightest = min((b for b in best if b), default=None)
        first = next(iter(found.values()))
        line = {arch: f'b{batchsize}', 'GB': f'{first["in_core_peak_bytes"] / 1e9:.1f}'}
        line |= {name: _number(found[name]['images_per_second']) for name in planners}
        line['bound'] = _number(tightest)
        for name in ('pooch', 'hybrid'):
            gap = found[name]['gap'] if name in found else None
            if name in planners:
                line[f'{name} gap'] = '-' if gap is None else f'{gap:.1%}'
        shown.append(line)
    return common.table(shown, dict.fromkeys(shown[0], str))


def at(rows: list[Row], arch: str, batchsize: int) -> dict[str, Row]:
    """Rows of one network and batch size, by planner."""
    return {
        row['planner']: row
        for row in rows
        if (row['arch'], row['batchsize']) == (arch, batchsize)
    }


def _number(value: float | None) -> str:
    return '-' if value is None else f'{value:.1f}'


def ratios(rows: list[Row], arch: str, above: str, below: str) -> list[float]:
    """Speed of one method over another's, at every out-of-core batch size."""
    found = []
    for batchsize in dict.fromkeys(r['batchsize'] for r in rows if r['arch'] == arch):
        here = at(rows, arch, batchsize)
        one, other = here.get(above), here.get(below)
        if one and other and one['out_of_core'] and one['fits'] and other['fits']:
            found.append(one['images_per_second'] / other['images_per_second'])
    return found


def losses(rows: list[Row], arch: str, planner: str) -> list[float]:
    """Loss of throughput against in-core, at every out-of-core batch size."""
    return [
        row['images_per_second'] / row['in_core_images_per_second'] - 1
        for row in rows
        if (row['arch'], row['planner']) == (arch, planner)
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
    'resnet50': '-34 to -16 %',
    'googlenet': '-39 to -2 %',
    'alexnet': 'at most -5 %',
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
        for planner in ('pooch', 'hybrid'):
            values = losses(rows, arch, planner)
            if values:
                said = LOSSES[arch] if planner == 'pooch' else '-'
                title = f'{planner}: images/s against in-core (Figs. 15 to 17)'
                shown.append((arch, title, said, _loss(values)))
    names = ('network', 'figure', 'published', 'here')
    lines = [dict(zip(names, line, strict=True)) for line in shown]
    return common.table(lines, dict.fromkeys(names, str))


def write_markdown(name: str, tables: list[str], factor: float) -> None:
    """Writes the tables next to the JSON file."""
    from chainer_hybridmem.library import write_text

    head = (
        f'Images per second on a modelled V100 16 GB, PCIe 3 (`benchmarks/paper/'
        f'ito.py`). Calibrated on ResNet-50 in-core at {IN_CORE_SPEED:.0f} images/s: '
        f'compute times x {factor:.3f}. "in-core" is empty where it does not fit.'
    )
    folder = os.path.join(common.ROOT, 'benchmarks', 'results')
    write_text(os.path.join(folder, f'{name}.md'), '\n\n'.join([head, *tables, '']))


# -- picture -----------------------------------------------------------------------


def draw(name: str, rows: list[Row], planners: list[str]) -> None:
    """Throughput against batch size, one panel per network, as Figs. 15 to 17."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no picture without matplotlib', file=sys.stderr)
        return
    archs = list(dict.fromkeys(row['arch'] for row in rows))
    figure = Figure(figsize=(4.5 * len(archs), 4), layout='constrained')
    panels = figure.subplots(1, len(archs), squeeze=False)[0]
    for panel, arch in zip(panels, archs, strict=True):
        for planner in (p for p in IN_FIGURE if p in planners):
            line = [
                (row['batchsize'], row['images_per_second'])
                for row in rows
                if (row['arch'], row['planner']) == (arch, planner) and row['fits']
            ]
            if line:
                panel.plot(*zip(*line, strict=True), marker='o', label=planner)
        panel.set(title=arch, xlabel='batch size', ylabel='images / s', ylim=(0, None))
        panel.legend()
    path = os.path.join(common.ROOT, 'benchmarks', 'results', f'{name}.png')
    figure.savefig(path, dpi=110)
    print(f'written: benchmarks/results/{name}.png', file=sys.stderr)


if __name__ == '__main__':
    try:
        raise SystemExit(main())
    except OptionError as error:
        raise SystemExit(str(error)) from error
