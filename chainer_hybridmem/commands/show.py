"""``hybridmem show``: a planned iteration as a picture."""

from __future__ import annotations

import argparse

from chainer_hybridmem import library
from chainer_hybridmem.commands import base
from chainer_hybridmem.units import format_bound, format_seconds


class ShowCommand(base.Command):
    """Draws memory load over lanes of compute and copies."""

    name = 'show'
    help = 'draw a planned iteration'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See :class:`base.Command`."""
        parser.add_argument('profile', metavar='PROFILE', help='recorded iteration')
        parser.add_argument('plan', metavar='PLAN', help='a plan made for it')
        parser.add_argument(
            '-o', '--output', metavar='FILE', required=True, help='picture to write'
        )

    def run(self, args: argparse.Namespace) -> int:
        """See :class:`base.Command`."""
        from chainer_hybridmem.reporting.picture import draw
        from chainer_hybridmem.simulation import simulate

        base.check_output(args.output)
        plan = library.load_plan(args.plan)
        timeline = simulate(library.load_profile(args.profile), plan)
        draw(timeline, plan, args.output)
        bound = format_bound(plan.lower_bound_seconds, plan.gap)
        seconds = format_seconds(timeline.total_seconds)
        print(f'{args.output}: {plan.planner}, {seconds} predicted, bound {bound}')
        return 0
