"""``hybridmem layout``: all memory pools on one iteration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chainer_hybridmem import files
from chainer_hybridmem.commands import (
    arguments,
    base,
    outputs,
    planned_iteration,
)
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.errors import FormatError, OptionError, PlanError
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.reporting.tables import Column, figures_table
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import format_bytes, format_count

if TYPE_CHECKING:
    from chainer_hybridmem.lab.pools.replay import PoolReplay
    from chainer_hybridmem.planning.layouts import Layout, Trace
    from chainer_hybridmem.planning.records.profile import Profile

COLUMNS = (
    Column('pool', 'pool'),
    Column('footprint', 'footprint_bytes', 'bytes'),
    Column('ratio', 'competitive_ratio', '{:.4f}'.format),
    Column('device calls', 'device_calls'),
    Column('warm', 'warm_device_calls'),
    Column('from the pool', 'pool_share', 'share'),
    Column('fragmentation', 'fragmentation', 'share'),
    Column('found by', 'found_by'),
)


class LayoutCommand(base.Command):
    """Replays an iteration through pools and lays it out offline.

    The iteration is a recorded one as plain Chainer runs it, or as a plan does
    (--plan), or a problem in minimalloc's CSV format.
    """

    name = 'layout'
    help = 'compare memory pools and offline layouts on an iteration'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            'iteration',
            metavar='PROFILE',
            help='recorded iteration, or a file that ends in .csv',
        )
        parser.add_argument('--plan', metavar='PLAN', help='a plan made for it')
        add_pools(parser, 'default 512 for a GPU, 64 for the CPU, 1 for a CSV file')
        arguments.add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.lab.pools import catalogue, minimalloc
        from chainer_hybridmem.lab.pools.replay import recommend
        from chainer_hybridmem.planning.layouts.layout import check_alignment

        outputs.check_outputs(args.output, args.json, (args.iteration, args.plan))
        if args.alignment is not None:
            check_alignment(args.alignment)
        names = list(dict.fromkeys(args.pool or catalogue.POOLS))
        trace, default = load_trace(args.iteration, args.plan)
        alignment = default if args.alignment is None else args.alignment
        replays = replay_pools(trace, alignment, names, args.iterations)
        best = recommend(replays)
        rows = figures_of(replays, best)
        text = comparison(args.iteration, trace, replays, best, rows)
        if args.output is not None:
            layout = smallest_layout(trace, replays, alignment)
            library.write_text(args.output, minimalloc.dumps(trace, layout))
        outputs.publish(text, rows, args.json)
        return 0


def add_pools(parser: argparse.ArgumentParser, alignments: str) -> None:
    """Adds the options that say which pools to compare and how.

    Args:
        parser: Of a command that compares pools.
        alignments: What counts where none is given.
    """
    parser.add_argument(
        '--pool',
        nargs='+',
        action='extend',
        metavar='NAME',
        help='pools to compare; default all',
    )
    parser.add_argument(
        '--alignment',
        type=arguments.positive,
        metavar='BYTES',
        help=f'of the offline layouts; {alignments}',
    )
    parser.add_argument(
        '--iterations',
        type=arguments.positive,
        default=2,
        metavar='N',
        help='how often it is repeated; default 2',
    )
    arguments.add_output(
        parser, 'where to save the smallest layout in the CSV format of minimalloc'
    )


def load_trace(path: str, plan_path: str | None) -> tuple[Trace, int]:
    """The iteration to lay out, and the alignment that suits its device.

    Raises:
        FormatError: If a file cannot be read, the plan is not one for this profile, or
            the offsets of a CSV file are not a layout.
        OptionError: If a CSV file is to follow a plan.
    """
    from chainer_hybridmem.planning.layouts import in_core_trace

    if path.lower().endswith('.csv'):
        if plan_path is not None:
            raise OptionError(f'{path} is no profile: --plan needs one.')
        return load_csv(path), 1
    profile = library.load_profile(path)
    if plan_path is not None:
        trace = load_planned_trace(path, profile, plan_path)
    else:
        with files.named(path):
            trace = in_core_trace(profile)
    return trace, device_alignment(profile)


def load_planned_trace(path: str, profile: Profile, plan_path: str) -> Trace:
    """The iteration of a profile under a plan.

    Raises:
        FormatError: If the plan is not one for this profile.
    """
    from chainer_hybridmem.planning.layouts import planned_trace

    plan, _ = planned_iteration.load_plan(plan_path, profile, path)
    return planned_trace(profile, plan)


def load_csv(path: str) -> Trace:
    """A problem in minimalloc's format; offsets in it are checked.

    Raises:
        FormatError: If it cannot be read, or buffers overlap.
    """
    from chainer_hybridmem.lab.pools import minimalloc
    from chainer_hybridmem.planning.layouts import check_layout
    from chainer_hybridmem.planning.layouts.offline import given

    text = files.read_text(path)
    with files.named(path):
        trace, offsets = minimalloc.loads(text)
        if offsets is not None:
            try:
                check_layout(trace, given(trace, offsets))
            except PlanError as error:
                raise FormatError(f'Its offsets are no layout: {error}') from error
    return trace


def device_alignment(profile: Profile) -> int:
    """What the memory of the profile's device is aligned to, in bytes."""
    from chainer_hybridmem.planning.layouts.layout import CUDA_ALIGNMENT, HOST_ALIGNMENT

    return HOST_ALIGNMENT if profile.device.get('kind') == 'host' else CUDA_ALIGNMENT


def replay_pools(
    trace: Trace, alignment: int, names: Sequence[str], iterations: int
) -> list[PoolReplay]:
    """Replays an iteration through pools, and shows how far that is.

    Args:
        trace: The iteration.
        alignment: Of the offline layouts, in bytes.
        names: Of the pools.
        iterations: How often it is repeated.

    Raises:
        UnknownNameError: If there is no such pool.
        OptionError: If the alignment is not a power of two.
    """
    from chainer_hybridmem.lab.pools.replay import compare

    replays = []
    with Progress(len(names), sys.stderr) as progress:
        for name in names:
            progress.step(f'pool {name}')
            replays += compare(trace, alignment, [name], iterations)
    return replays


def smallest_layout(
    trace: Trace, replays: Sequence[PoolReplay], alignment: int
) -> Layout:
    """The smallest of the offline layouts; made if none was to be compared."""
    from chainer_hybridmem.planning.layouts import exact

    layouts = [r.layout for r in replays if r.layout is not None]
    if not layouts:
        return exact(trace, alignment)
    return min(layouts, key=lambda layout: layout.footprint_bytes)


def comparison(
    name: str,
    trace: Trace,
    replays: Sequence[PoolReplay],
    best: PoolReplay,
    rows: Sequence[dict[str, Any]],
    columns: Sequence[Column] = (),
) -> str:
    """A table of pools, what is proven, and which one to take.

    Args:
        name: Of the iteration.
        trace: The iteration.
        replays: One for each pool.
        best: The one to recommend.
        rows: Their figures.
        columns: Beside the usual ones.
    """
    title = (
        f'{name}: {format_count(len(trace.sizes), "buffer")}, peak load '
        f'{format_bytes(trace.peak_load_bytes)}'
    )
    lines = [printable(title), '', figures_table([*COLUMNS, *columns], rows)]
    layouts = [r.layout for r in replays if r.layout is not None]
    if layouts:
        least = min(layouts, key=lambda layout: layout.footprint_bytes)
        if least.optimal:
            lines += ['', 'The smallest layout is optimal: no layout is smaller.']
        else:
            bound = format_bytes(least.bound_bytes)
            lines += [
                '',
                f'The smallest layout is at most {least.gap:.3%} above the smallest '
                f'possible one: none is below {bound}.',
            ]
    lines += ['', f'Recommended: {best.pool}, {_advice(best, replays)}']
    return '\n'.join(lines)


def _advice(best: PoolReplay, replays: Sequence[PoolReplay]) -> str:
    from chainer_hybridmem.lab.pools.replay import recommend

    calls = best.warm_device_calls
    advice = (
        f'{format_bytes(best.footprint_bytes)} and '
        f'{format_count(calls, "device call")} an iteration once warm'
    )
    online = [r for r in replays if r.layout is None and r.pool != 'cudamalloc']
    if best.layout is not None and online:
        advice += f'; where iterations vary: {recommend(online).pool}'
    return f'{advice}.'


def figures_of(replays: Sequence[PoolReplay], best: PoolReplay) -> list[dict[str, Any]]:
    """One row of plain values per pool; ``best`` is the recommended one."""
    return [_figures(replay, replay is best) for replay in replays]


def _figures(replay: PoolReplay, recommended: bool) -> dict[str, Any]:
    total = replay.pool_bytes + replay.device_bytes
    fragmentation = replay.series.fragmentation
    return {
        **replay.figures(),
        'pool_share': replay.pool_bytes / total if total else None,
        'fragmentation': float(fragmentation.mean()) if len(fragmentation) else None,
        'recommended': recommended,
    }
