"""``hybridmem import``: iterations that other programs have written down."""

from __future__ import annotations

import argparse

from chainer_hybridmem.commands import arguments, base, outputs
from chainer_hybridmem.commands.profile import values
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.reporting.tables import named_values
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import parse_bandwidth

LINK_BANDWIDTH = 12e9  # of PCIe 3.0 x16, bytes per second
LATENCY_SECONDS = 1e-5


class ImportCommand(base.Command):
    """Makes a profile of a file that another program has written.

    Nothing in the file is executed. docs/reference/files.md says what is counted.
    """

    name = 'import'
    help = 'make a profile of a file of another program'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from chainer_hybridmem.lab.importing import KINDS

        parser.add_argument(
            'kind',
            metavar='KIND',
            help='; '.join(f'{name}: {kind.what}' for name, kind in KINDS.items()),
        )
        parser.add_argument('file', metavar='FILE', help='the file, or it with gzip')
        times = [f'{name}: {kind.times}' for name, kind in KINDS.items() if kind.times]
        parser.add_argument(
            '--times',
            metavar='FILE',
            help=f'a file whose times count instead; {"; ".join(times)}',
        )
        parser.add_argument(
            '--link',
            type=arguments.reader(parse_bandwidth),
            default=LINK_BANDWIDTH,
            metavar='RATE',
            help='of the path to host memory, which such files do not know; default '
            '12GB/s',
        )
        arguments.add_output(parser, 'where to save it', required=True)
        arguments.add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        from chainer_hybridmem.commands import figures
        from chainer_hybridmem.lab.importing import import_profile
        from chainer_hybridmem.planning.records.profile import Link
        from chainer_hybridmem.planning.simulation import make_problem

        outputs.check_outputs(args.output, args.json, (args.file, args.times))
        link = Link(LATENCY_SECONDS, args.link, args.link)
        profile = import_profile(args.kind, args.file, link, args.times)
        library.save(profile, args.output)
        summary = figures.profile_figures(make_problem(profile))
        title = printable(f'{args.kind}: {args.file}')
        outputs.publish(named_values(title, values(summary)), summary, args.json)
        return 0
