"""``hybridmem trace``: a planned iteration for Perfetto."""

from __future__ import annotations

import argparse
import json

from chainer_hybridmem import library
from chainer_hybridmem.commands import base
from chainer_hybridmem.units import format_bound, format_bytes, format_seconds


class TraceCommand(base.Command):
    """Writes the predicted timeline of a plan as a Chrome trace.

    Open the file at https://ui.perfetto.dev or chrome://tracing.
    """

    name = 'trace'
    help = 'write a planned iteration as a trace for Perfetto'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See :class:`base.Command`."""
        base.add_planned(parser)
        parser.add_argument(
            '-o',
            '--output',
            metavar='FILE',
            required=True,
            help="trace to write; '-' for standard output",
        )

    def run(self, args: argparse.Namespace) -> int:
        """See :class:`base.Command`."""
        from chainer_hybridmem.reporting.chrome_trace import chrome_trace

        if args.output != base.STDOUT:
            base.check_outputs(args.output, inputs=[args.profile, args.plan])
        plan, timeline = base.load_planned(args)
        trace = chrome_trace(timeline, plan)
        if args.output == base.STDOUT:
            print(json.dumps(trace))
            return 0
        library.write_text(args.output, json.dumps(trace))
        print(
            f'{args.output}: {len(trace["traceEvents"])} events, '
            f'{format_seconds(timeline.total_seconds)} predicted, bound '
            f'{format_bound(plan.lower_bound_seconds, plan.gap)}, peak '
            f'{format_bytes(timeline.peak_bytes)}; open it at https://ui.perfetto.dev'
        )
        return 0
