"""``hybridmem trace``: a planned iteration for Perfetto, and a measured one."""

from __future__ import annotations

import argparse
import json

from chainer_hybridmem.commands import arguments, base, outputs, planned_iteration
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import (
    format_bound,
    format_bytes,
    format_count,
    format_seconds,
)


class TraceCommand(base.Command):
    """Writes the predicted timeline of a plan as a Chrome trace.

    Open it at https://ui.perfetto.dev or chrome://tracing; open a snapshot at
    https://pytorch.org/memory_viz. See docs/guide/seeing.md.
    """

    name = 'trace'
    help = 'write a planned iteration as a trace for Perfetto'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        arguments.add_planned(parser)
        parser.add_argument(
            '--measured',
            metavar='FILE',
            help='measured timeline of an iteration that followed the plan',
        )
        parser.add_argument(
            '--snapshot',
            metavar='FILE',
            help='also write mallocs and frees for pytorch.org/memory_viz',
        )
        arguments.add_output(
            parser, "trace to write; '-' for standard output", required=True
        )

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.reporting import memory_viz
        from chainer_hybridmem.reporting.chrome_trace import chrome_trace

        inputs = args.profile, args.plan, args.measured
        output = None if args.output == outputs.STDOUT else args.output
        outputs.check_outputs(output, args.snapshot, inputs)
        if args.snapshot == outputs.STDOUT:
            outputs.check_outputs(args.snapshot)
        profile, plan, timeline = planned_iteration.load_iteration(args)
        measured = None
        if args.measured is not None:
            measured = planned_iteration.load_measured(args.measured, plan, args.plan)
        trace = chrome_trace(timeline, plan, measured)
        if args.snapshot is not None:
            snapshot = (
                memory_viz.planned_snapshot(profile, plan)
                if measured is None
                else memory_viz.measured_snapshot(measured, profile)
            )
            library.write_bytes(args.snapshot, memory_viz.dumps(snapshot))
        if output is None:
            print(json.dumps(trace))
            return 0
        library.write_text(output, json.dumps(trace))
        print(
            f'{printable(output)}: {format_count(len(trace["traceEvents"]), "event")}, '
            f'{format_seconds(timeline.total_seconds)} predicted, bound '
            f'{format_bound(plan.lower_bound_seconds, plan.gap)}, peak '
            f'{format_bytes(timeline.peak_bytes)}; open it at https://ui.perfetto.dev'
        )
        if measured is not None:
            print(
                f'{format_seconds(measured.total_seconds)} measured, peak '
                f'{format_bytes(max(measured.load_bytes))}'
            )
        if args.snapshot is not None:
            entries = len(snapshot['device_traces'][0])
            print(
                f'{printable(args.snapshot)}: '
                f'{format_count(entries, "entry", "entries")}; open it at '
                f'https://pytorch.org/memory_viz'
            )
        return 0
