"""``hybridmem show``: a planned iteration as a picture."""

from __future__ import annotations

import argparse

from chainer_hybridmem.commands import base
from chainer_hybridmem.units import format_bound, format_seconds


class ShowCommand(base.Command):
    """Draws memory load over lanes of compute and copies."""

    name = 'show'
    help = 'draw a planned iteration'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See :class:`base.Command`."""
        base.add_planned(parser)
        parser.add_argument(
            '-o', '--output', metavar='FILE', required=True, help='picture to write'
        )

    def run(self, args: argparse.Namespace) -> int:
        """See :class:`base.Command`."""
        from chainer_hybridmem.reporting.picture import draw

        base.check_outputs(args.output, inputs=[args.profile, args.plan])
        plan, timeline = base.load_planned(args)
        draw(timeline, plan, args.output)
        bound = format_bound(plan.lower_bound_seconds, plan.gap)
        seconds = format_seconds(timeline.total_seconds)
        print(f'{args.output}: {plan.planner}, {seconds} predicted, bound {bound}')
        return 0
