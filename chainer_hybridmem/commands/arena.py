"""``hybridmem arena``: planners and layouts against the best that is known."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from typing import Any

from chainer_hybridmem import files, version
from chainer_hybridmem.commands import arguments, base, outputs
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.errors import FormatError, OptionError
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.reporting.tables import table
from chainer_hybridmem.terminal import printable

FORMAT = 'chainer_hybridmem/arena'
VERSION = 1
TIME_LIMIT = 60.0
ENTRANTS = ('hybrid', 'exact', 'smartpool', 'bound')
RUN, FETCH, PAGE = 'run', 'fetch', 'page'


class ArenaCommand(base.Command):
    """Runs a contest on instances of others and our own, and makes its page.

    `run [FOLDER ...]` plays what there is: the shipped profiles, and instances whose
    files are in the folders. `fetch FOLDER ...` says which files are there and where
    the others are to be had. `page RESULTS` makes the page of what `run` has saved.
    Exit status 1 if there is nothing to play. See docs/reference/arena.md.
    """

    name = 'arena'
    help = 'planners and layouts against the best published answers'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument('what', choices=(RUN, FETCH, PAGE), help='what to do')
        parser.add_argument(
            'paths', nargs='*', metavar='PATH', help='folders, or a file of results'
        )
        parser.add_argument(
            '--entrant',
            nargs='+',
            action='extend',
            metavar='NAME',
            help='planners, also with options (hybrid:time_budget=50,seed=1), offline '
            f'layouts, and bound; default {", ".join(ENTRANTS)}; the trivial answers '
            'are always in',
        )
        parser.add_argument(
            '--instance',
            nargs='+',
            action='extend',
            metavar='NAME',
            help='only instances whose names begin so, such as checkmate/unet; '
            'chains/SEED and tilings/SEED draw any',
        )
        parser.add_argument(
            '--limit',
            nargs='+',
            action='extend',
            metavar='LIMIT',
            help='of plans, such as 60%%, instead of the limits of the catalogue',
        )
        parser.add_argument(
            '--time-limit',
            type=arguments.above_zero,
            default=TIME_LIMIT,
            metavar='SECONDS',
            help=f'for each answer; default {TIME_LIMIT:g}',
        )
        parser.add_argument(
            '--held',
            metavar='FILE',
            help='a catalogue of instances held back, which are named by number only',
        )
        arguments.add_output(parser, 'of run: results as JSON; of page: .md or .html')

    def run(self, args: argparse.Namespace) -> int:
        outputs.check_outputs(args.output)
        steps = {RUN: _run, FETCH: _fetch, PAGE: _page}
        return steps[args.what](args)


def _run(args: argparse.Namespace) -> int:
    from chainer_hybridmem.lab.contest import cells, instances, page

    entrants = list(dict.fromkeys(args.entrant or ENTRANTS))
    instances.missing(instances.load_catalogue(), args.paths)
    found = instances.load_catalogue().instances(args.paths)
    found += instances.draw(args.instance or ())
    if args.held is not None:
        found += instances.load_catalogue(args.held).instances(args.paths)
    if args.instance:
        found = [i for i in found if i.name.startswith(tuple(args.instance))]
    if args.limit:
        found = [instances.at_limits(i, args.limit) for i in found]
    listed = cells.list_cells(found, entrants, args.time_limit)
    if not listed:
        raise OptionError(
            'There is no instance to play. Name a folder with their files: '
            '`hybridmem arena fetch FOLDER` says where they are to be had.'
        )
    rows = []
    with Progress(len(listed), sys.stderr) as progress:
        played = cells.run_cells(listed)
        for cell in listed:
            case = f'{cell.instance.name} in {cell.known.limit}'
            progress.step(f'{cell.entrant}, {case}')
            rows.append(next(played))
    held = None if args.held is None else instances.checksum(args.held)
    body = {
        'format': FORMAT,
        'version': VERSION,
        'environment': _environment(),
        'command': f'hybridmem {shlex.join(_told(args))}',
        'time_limit': args.time_limit,
        'held_checksum': held,
        'rows': rows,
    }
    if args.output is not None:
        library.write_text(args.output, json.dumps(body, indent=1) + '\n')
    for shown in page.tables(body):
        print(printable(f'{shown.title}\n', lines=True))
        print(printable(table(shown.header, shown.rows), lines=True) + '\n')
    return 0


def _told(args: argparse.Namespace) -> list[str]:
    """The command that makes the same again, wherever the folders lie."""
    words = ['arena', RUN, *(os.path.basename(os.path.normpath(p)) for p in args.paths)]
    for flag in ('entrant', 'instance', 'limit'):
        if getattr(args, flag):
            words += [f'--{flag}', *getattr(args, flag)]
    return [*words, '--time-limit', f'{args.time_limit:g}']


def _environment() -> dict[str, Any]:
    from chainer_hybridmem.training.devices.host.device import processor_name

    return {
        'package': version.describe(),
        'processor': processor_name(),
        'cores': os.cpu_count(),
        'python': platform.python_version(),
        'date': datetime.date.today().isoformat(),
    }


def _fetch(args: argparse.Namespace) -> int:
    from chainer_hybridmem.lab.contest import instances

    catalogue = instances.load_catalogue()
    lacking = instances.missing(catalogue, args.paths)
    for name, source in catalogue.sources.items():
        lost = lacking[name]
        there = len(source.files) - len(lost)
        licence = source.licence or 'no licence, so not shipped'
        print(f'{name}: {there} of {len(source.files)} files ({licence})')
        if lost:
            print(f'  git clone {source.repository} && git checkout {source.commit}')
            if source.hint:
                print(f'  {source.hint}')
        for path in lost:
            print(f'  missing: {path}  sha256 {source.files[path]}')
    played = catalogue.instances(args.paths)
    print(f'{sum(len(i.known) for i in played)} instances can be played.')
    return 0 if played else 1


def _page(args: argparse.Namespace) -> int:
    from chainer_hybridmem.lab.contest import page

    if len(args.paths) != 1 or args.output is None:
        raise OptionError('A page is made of one file: arena page RESULTS -o FILE.')
    text = files.read_text(args.paths[0], FORMAT)
    with files.named(args.paths[0]):
        body = files.parse(text, FORMAT, VERSION)
        with files.reading('results'):
            made = (
                page.as_html(body) if _is_html(args.output) else page.as_markdown(body)
            )
    library.write_text(args.output, made)
    print(printable(f'{args.output}: {len(body["rows"])} answers'))
    return 0


def _is_html(path: str) -> bool:
    ending = os.path.splitext(path)[1].lower()
    if ending not in ('.md', '.html'):
        raise FormatError(f'{path} is neither .md nor .html; name one of them.')
    return ending == '.html'
