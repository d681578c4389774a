"""``hybridmem inference``: memory of a forward pass without backward."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.commands import arguments, base, layout, outputs, programs
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.reporting.tables import (
    Column,
    figures_table,
    named_values,
)
from chainer_hybridmem.units import format_bytes

if TYPE_CHECKING:
    from chainer_hybridmem.forecasting.estimation import SamplePair
    from chainer_hybridmem.lab.pools.replay import PoolReplay
    from chainer_hybridmem.planning.layouts import Trace
    from chainer_hybridmem.planning.records.profile import Profile

LIFETIMES = ('run', 'last-use', 'in-place')
COLUMNS = (
    Column('lifetimes', 'lifetimes'),
    Column('blobs', 'blob_peak_bytes', 'bytes'),
    Column('saved', 'blob_saving', 'share'),
    Column('with workspaces', 'peak_load_bytes', 'bytes'),
    Column('saved', 'saving', 'share'),
)

POOL_COLUMNS = (
    Column('saved of blobs', 'saving_of_blobs', 'share'),
    Column('of CuPy', 'saving_of_cupy', 'share'),
)


class InferenceCommand(base.Command):
    """Predicts the memory of a forward pass without backward, at any batch size.

    Two tiny passes under no_backprop_mode are recorded and extrapolated; of a program,
    the largest call of a link in which no backward can follow. Parameters are left out;
    see docs/guide/inference.md.
    """

    name = 'inference'
    help = 'compare memory pools and layouts on a forward pass without backward'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        arguments.add_network(parser)
        parser.add_argument(
            '--lifetimes',
            choices=LIFETIMES,
            default='last-use',
            help='of the blobs in the table of pools; default last-use',
        )
        parser.add_argument(
            '--convolution',
            choices=('cudnn', 'im2col'),
            default='cudnn',
            help='how the device convolves: with cuDNN (the default), or as recorded '
            'on the CPU',
        )
        layout.add_pools(parser, 'default 512')
        arguments.add_recording_device(parser, '--record-on', 'default cpu')
        arguments.add_sample_batches(parser)
        arguments.add_json(parser)
        programs.add(parser, batch=True)

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.forecasting.estimation import check_batchsize
        from chainer_hybridmem.lab.pools import catalogue, minimalloc
        from chainer_hybridmem.lab.pools.replay import recommend
        from chainer_hybridmem.planning.layouts import Lifetimes, forward_trace
        from chainer_hybridmem.planning.layouts.layout import (
            CUDA_ALIGNMENT,
            check_alignment,
        )

        outputs.check_outputs(args.output, args.json)
        asked = programs.find(args, args.record_on or 'cpu', record_on=None)
        batchsize = programs.find_batchsize(args, asked)
        check_batchsize(batchsize)
        alignment = args.alignment or CUDA_ALIGNMENT
        check_alignment(alignment)
        names = list(dict.fromkeys(args.pool or catalogue.POOLS))
        catalogue.check_names(names)
        with Progress(2, sys.stderr) as progress:
            asked = asked.completed()
            recorded, pair = programs.record_passes(
                asked, args.sample_batches, progress
            )
        profile = at(pair, batchsize, args.convolution)
        trace = forward_trace(profile, Lifetimes(args.lifetimes))
        replays = layout.replay_pools(trace, alignment, names, args.iterations)
        best = recommend(replays)
        figures = {
            **asked.named,
            'link': recorded.link,
            'batchsize': batchsize if asked.batch_arg else None,
            'convolution': args.convolution,
            'sample_batchsizes': None if pair.is_one else list(pair.batchsizes),
            **summarise(profile),
            'pool_lifetimes': args.lifetimes,
        }
        figures['pools'] = [
            {**row, **savings(row['footprint_bytes'], figures)}
            for row in layout.figures_of(replays, best)
        ]
        if args.output is not None:
            smallest = layout.smallest_layout(trace, replays, alignment)
            library.write_text(args.output, minimalloc.dumps(trace, smallest))
        title = f'{asked.with_batchsize(batchsize).title}, forward only'
        text = _text(title, figures, trace, replays, best)
        outputs.publish(text, figures, args.json)
        return 0


def at(pair: SamplePair, batchsize: int, convolution: str) -> Profile:
    """The forward pass at any batch size, convolving as named."""
    from chainer_hybridmem.forecasting.estimation import lower_to_cudnn

    profile = pair.at(batchsize)
    return lower_to_cudnn(profile) if convolution == 'cudnn' else profile


def summarise(profile: Profile) -> dict[str, Any]:
    """Bytes of all blobs, and the most bytes at once, as plain values."""
    from chainer_hybridmem.lab.pools.replay import replay
    from chainer_hybridmem.planning.layouts import (
        Lifetimes,
        blob_bytes,
        forward_trace,
        parameter_bytes,
    )

    total = blob_bytes(profile)
    rows = []
    for lifetimes in Lifetimes:
        trace = forward_trace(profile, lifetimes)
        blobs = forward_trace(profile, lifetimes, blobs_only=True)
        rows.append(
            {
                'lifetimes': lifetimes.value,
                'blob_peak_bytes': blobs.peak_load_bytes,
                'blob_saving': _saving(blobs.peak_load_bytes, total),
                'peak_load_bytes': trace.peak_load_bytes,
                'saving': _saving(trace.peak_load_bytes, total),
            }
        )
    cupy = replay(forward_trace(profile, Lifetimes.RUN), 'cupy')
    return {
        'parameter_bytes': parameter_bytes(profile),
        'blob_bytes': total,
        'in_place_blob_bytes': blob_bytes(profile, in_place=True),
        'cupy_run_bytes': cupy.footprint_bytes,
        'lifetimes': rows,
    }


def savings(footprint_bytes: int, figures: dict[str, Any]) -> dict[str, float]:
    """What a footprint saves, as parts of all blobs and of CuPy's pool as run."""
    return {
        'saving_of_blobs': _saving(footprint_bytes, figures['blob_bytes']),
        'saving_of_cupy': _saving(footprint_bytes, figures['cupy_run_bytes']),
    }


def _saving(nbytes: int, total_bytes: int) -> float:
    return 1 - nbytes / total_bytes if total_bytes else 0.0


# -- text --------------------------------------------------------------------------


def _text(
    title: str,
    figures: dict[str, Any],
    trace: Trace,
    replays: Sequence[PoolReplay],
    best: PoolReplay,
) -> str:
    values = [
        ('sum of blobs', format_bytes(figures['blob_bytes'])),
        ('in place', format_bytes(figures['in_place_blob_bytes'])),
        ('parameters', f'{format_bytes(figures["parameter_bytes"])}, left out'),
        ("CuPy's pool", f'{format_bytes(figures["cupy_run_bytes"])}, as run'),
        ('convolution', figures['convolution']),
        ('pass', f'a call of {figures["link"]}'),
    ]
    if figures['sample_batchsizes'] is not None:
        sizes = 'batch sizes {} and {}'.format(*figures['sample_batchsizes'])
        values.append(('recorded', sizes))
    name = f'lifetimes {figures["pool_lifetimes"]}'
    return '\n\n'.join(
        [
            named_values(title, values),
            figures_table(COLUMNS, figures['lifetimes']),
            layout.comparison(
                name, trace, replays, best, figures['pools'], POOL_COLUMNS
            ),
        ]
    )
