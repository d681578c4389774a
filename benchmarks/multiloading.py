"""Memory multiloading at test time: what a forward pass without backward needs.

    python -m benchmarks run multiloading [--batchsize N ...] [--redraw]

Two passes (2 and 4 pictures) under ``no_backprop_mode`` on the CPU, extrapolated to 1
and 50 pictures, the batch with which Caffe's reference networks are tested. Parameters
are left out. The in-place sum is what Caffe holds for its usual networks, in which
activations and normalisations write over their input. Writes
``benchmarks/results/multiloading.json`` and ``multiloading.md``.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks import common, saving
from chainer_hybridmem.commands import inference, programs
from chainer_hybridmem.commands.arguments import SAMPLE_BATCHSIZES
from chainer_hybridmem.commands.networks import Network
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.forecasting.estimation import SamplePair
from chainer_hybridmem.lab.pools.replay import replay
from chainer_hybridmem.planning.layouts import (
    Lifetimes,
    check_layout,
    exact,
    forward_trace,
)
from chainer_hybridmem.planning.records.profile import Profile

Row = dict[str, Any]

NETWORKS = ('alexnet', 'googlenet', 'resnet50', 'resnet101', 'resnet152', 'vgg16')
BATCHES = (1, 50)
CONVOLUTIONS = ('cudnn', 'im2col')
ALIGNMENT = 512
PUBLISHED = {  # of all blobs, at test time
    'Xiong, Squeezing Memory out of Caffe': 'around 95 %',
    'yjxiong/caffe issue 206, log of VGG-16': 1 - 31527920 / 84045680,
    'yjxiong/caffe issue 190, log of SENet': 1 - 226419856 / 844999312,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--batchsize', nargs='+', type=int, default=BATCHES)
    parser.add_argument(
        '--redraw', action='store_true', help='tables from the JSON file'
    )


def main(options: argparse.Namespace) -> int:
    """Runs all networks, writes the results, prints the tables."""
    if options.redraw:
        publish(saving.read('multiloading'))
        return 0
    rows = [row for arch in NETWORKS for row in network(arch, options.batchsize)]
    body = {'alignment': ALIGNMENT, 'published': PUBLISHED, 'networks': rows}
    common.save('multiloading', body)
    publish(body)
    return 0


def network(arch: str, batchsizes: list[int]) -> list[Row]:
    """One network at several batch sizes."""
    asked = Network(arch, 1, device='cpu').completed()
    progress = Progress(2, sys.stderr)
    _, pair = programs.record_passes(asked, SAMPLE_BATCHSIZES, progress)
    rows = []
    for batchsize in batchsizes:
        row = {'network': arch, 'insize': asked.insize, 'batchsize': batchsize}
        row |= figures(pair, batchsize)
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def figures(pair: SamplePair, batchsize: int) -> Row:
    """What all blobs need, what is needed at once, and the layouts."""
    row: Row = {}
    for convolution in CONVOLUTIONS:
        profile = inference.at(pair, batchsize, convolution)
        summary = inference.summarise(profile)
        row[convolution] = {
            'cupy_run_bytes': summary.pop('cupy_run_bytes'),
            'layouts': [layout(profile, lifetimes) for lifetimes in Lifetimes],
            'lifetimes': summary.pop('lifetimes'),
        }
        row |= summary  # the same for both
    return row


def layout(profile: Profile, lifetimes: Lifetimes) -> Row:
    """The exact layout, checked, and CuPy's pool."""
    trace = forward_trace(profile, lifetimes)
    found = exact(trace, ALIGNMENT)
    check_layout(trace, found)
    return {
        'lifetimes': lifetimes.value,
        'footprint_bytes': found.footprint_bytes,
        'optimal': found.optimal,
        'cupy_bytes': replay(trace, 'cupy').footprint_bytes,
    }


# -- text --------------------------------------------------------------------------


def publish(body: Row) -> None:
    """Writes and prints the tables."""
    text = markdown(body)
    saving.save_text('multiloading', text)
    print(text)


def megabytes(nbytes: int) -> str:
    return f'{nbytes / 1e6:.1f} MB'


def percent(share: float) -> str:
    return f'{share:.1%}'


def blob_cells(row: Row) -> Row:
    """Blobs alone: the convolution does not matter."""
    by_name = {life['lifetimes']: life for life in row['cudnn']['lifetimes']}
    cells = {
        'network': f'{row["network"]}, {row["batchsize"]}',
        'parameters': megabytes(row['parameter_bytes']),
        'all blobs': megabytes(row['blob_bytes']),
    }
    for name in ('run', 'last-use', 'in-place'):
        peak = by_name[name]['blob_peak_bytes']
        cells[name] = f'{megabytes(peak)}, {percent(by_name[name]["blob_saving"])}'
    cells['all blobs in place'] = megabytes(row['in_place_blob_bytes'])
    cells['in-place of these'] = percent(1 - peak / row['in_place_blob_bytes'])
    return cells


def pool_cells(row: Row, convolution: str) -> Row:
    """With workspaces: CuPy's pool today, and layouts."""
    part, blobs = row[convolution], row['blob_bytes']
    cupy = part['cupy_run_bytes']
    cells = {
        'network': f'{row["network"]}, {row["batchsize"]}',
        'CuPy as run': f'{megabytes(cupy)}, {percent(1 - cupy / blobs)}',
    }
    for found in part['layouts']:
        name, nbytes = found['lifetimes'], found['footprint_bytes']
        cells[f'exact, {name}'] = f'{megabytes(nbytes)}, {percent(1 - nbytes / blobs)}'
    cells['of CuPy as run'] = percent(1 - nbytes / cupy)
    cells['optimal'] = _proven(part['layouts'])
    return cells


def _proven(layouts: list[Row]) -> str:
    return 'proven' if all(found['optimal'] for found in layouts) else 'not all'


def markdown(body: Row) -> str:
    """Blobs alone, then with workspaces for each way to convolve."""
    rows = body['networks']
    published = '; '.join(
        f'{source}: {value if isinstance(value, str) else percent(value)}'
        for source, value in body['published'].items()
    )
    parts = [
        '# Memory of a forward pass without backward\n',
        'Peak, and what it saves of the sum of all blobs; parameters left out. run: '
        'blobs live as the program holds them; last-use: until they are read last '
        '(multiloading); in-place: likewise, and activations and normalisations write '
        'over their input.\n',
        f'Published savings of all blobs at test time: {published}.\n',
        f'## Blobs alone\n\n{_table([blob_cells(row) for row in rows])}\n',
    ]
    titles = {
        'cudnn': 'With workspaces, cuDNN (modelled)',
        'im2col': 'With workspaces, im2col (as recorded on the CPU)',
    }
    for convolution, title in titles.items():
        cells = [pool_cells(row, convolution) for row in rows]
        parts.append(f'## {title}\n\n{_table(cells)}\n')
    return '\n'.join(parts)


def _table(rows: list[Row]) -> str:
    return common.table(rows, dict.fromkeys(rows[0], str))
