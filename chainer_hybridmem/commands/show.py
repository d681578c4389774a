"""``hybridmem show``: a planned iteration as a picture, or as a table."""

from __future__ import annotations

import argparse

from chainer_hybridmem.commands import arguments, base, outputs, planned_iteration
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import format_bound, format_seconds

TABLE = '.txt'


class ShowCommand(base.Command):
    """Draws memory load over lanes of compute and copies.

    A file that ends in .txt gets a table instead: a line for each feature map, with the
    layer, the operation that makes it, and the action.
    """

    name = 'show'
    help = 'draw a planned iteration'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        arguments.add_planned(parser)
        arguments.add_output(
            parser, 'picture to write, or a table that ends in .txt', required=True
        )

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.planning.records import library
        from chainer_hybridmem.reporting.picture import draw
        from chainer_hybridmem.reporting.rows import as_table

        outputs.check_outputs(args.output, inputs=(args.profile, args.plan))
        profile, plan, timeline = planned_iteration.load_iteration(args)
        if args.output.lower().endswith(TABLE):
            library.write_text(args.output, as_table(profile, plan))
        else:
            draw(timeline, plan, args.output, profile)
        bound = format_bound(plan.lower_bound_seconds, plan.gap)
        seconds = format_seconds(timeline.total_seconds)
        line = f'{args.output}: {plan.planner}, {seconds} predicted, bound {bound}'
        print(printable(line))
        return 0
