"""The arena: planners and layouts against the best published answers.

    python -m benchmarks run contest FOLDER ... [--instance NAME ...]

What ``hybridmem arena run`` and ``page`` do, kept as a result. The folders have the
files of others; ``hybridmem arena fetch FOLDER`` says where they are to be had. Rows of
an earlier run stay until others take their places, so families can run one by one.
Writes ``arena.json``, ``arena.md`` and ``arena.html``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from benchmarks import saving
from chainer_hybridmem.commands.arena import ENTRANTS, TIME_LIMIT
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.lab.contest import cells, page
from chainer_hybridmem.lab.contest.instances import draw, load_catalogue
from chainer_hybridmem.planning.records import library

NAME = 'arena'
COMMAND = 'python -m benchmarks run contest FOLDER ...'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('folders', nargs='*', help='with files of others')
    parser.add_argument('--instance', nargs='+', default=[''], help='begins of names')
    parser.add_argument('--entrant', nargs='+', default=list(ENTRANTS))
    parser.add_argument('--time-limit', type=float, default=TIME_LIMIT)
    parser.add_argument('--redraw', action='store_true', help='from the JSON file')


def main(options: argparse.Namespace) -> int:
    if not options.redraw:
        play(options)
    body = saving.read(NAME)
    library.write_text(saving.path(NAME, 'md'), page.as_markdown(body))
    library.write_text(saving.path(NAME, 'html'), page.as_html(body))
    return 0


def play(options: argparse.Namespace) -> None:
    """Runs the cells that are asked for, and saves each row at once."""
    found = [
        instance
        for instance in [
            *load_catalogue().instances(options.folders),
            *draw(options.instance),
        ]
        if instance.name.startswith(tuple(options.instance))
    ]
    listed = cells.list_cells(found, options.entrant, options.time_limit)
    results = saving.Rows(NAME, command=COMMAND, time_limit=options.time_limit)
    with contextlib.suppress(FileNotFoundError):  # in the first run
        results.keep_earlier()
    best = {(r['instance'], r['limit']): r['best'] for r in page.scored(results.rows)}
    with Progress(len(listed), sys.stderr) as progress:
        for cell, row in zip(listed, cells.run_cells(listed, best), strict=True):
            progress.step(f'{cell.entrant}, {cell.instance.name}, {cell.known.limit}')
            results.put(row, 'instance', 'limit', 'entrant')
