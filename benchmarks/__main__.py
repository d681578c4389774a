"""Lists and runs the benchmarks, and renders their results.

    python -m benchmarks list
    python -m benchmarks run NAME [ARGUMENT ...]
    python -m benchmarks render [--check]

Runs from the root of the repository. ``run NAME --help`` says what a benchmark takes.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from benchmarks import rendering
from benchmarks.catalogue import BENCHMARKS, BY_NAME, Benchmark

USAGE = 'python -m benchmarks'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog=USAGE, description='What is measured.')
    commands = parser.add_subparsers(dest='command', required=True)
    commands.add_parser('list', help='names every benchmark')
    one = commands.add_parser('run', help='runs one benchmark', add_help=False)
    one.add_argument('rest', nargs=argparse.REMAINDER)
    page = commands.add_parser('render', help='writes the pages of results')
    page.add_argument('--check', action='store_true', help='only says if it is stale')
    options = parser.parse_args(arguments)
    if options.command == 'list':
        return show_benchmarks()
    if options.command == 'run':
        return run(options.rest)
    return rendering.main(['--check'] if options.check else [])


def show_benchmarks() -> int:
    """Prints a line for each benchmark, and one for its files and needs."""
    for benchmark in BENCHMARKS:
        print(f'{benchmark.name:24}{benchmark.help}')
        parts = [', '.join(benchmark.results)]
        parts += [f'needs {benchmark.needs}'] if benchmark.needs else []
        about = '; '.join(filter(None, parts))
        if about:
            print(f'{"":24}  -> {about}')
    return 0


def run(arguments: Sequence[str]) -> int:
    """Runs one benchmark: its name, then what it takes."""
    if not arguments or arguments[0] in ('-h', '--help'):
        print(f'usage: {USAGE} run NAME [ARGUMENT ...]; {USAGE} list')
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in BY_NAME:
        close = difflib.get_close_matches(name.replace('/', '.'), BY_NAME, n=1)
        hint = f' Did you mean {close[0]!r}?' if close else ''
        print(f'Unknown benchmark {name!r}.{hint} Try: {USAGE} list', file=sys.stderr)
        return 2
    module = importlib.import_module(f'benchmarks.{name}')
    options = make_parser(BY_NAME[name], module.__doc__ or '').parse_args(rest)
    return int(module.main(options) or 0)


def make_parser(benchmark: Benchmark, text: str) -> argparse.ArgumentParser:
    """The parser of a benchmark, whose help shows its module's text."""
    parser = argparse.ArgumentParser(
        prog=f'{USAGE} run {benchmark.name}',
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module = importlib.import_module(f'benchmarks.{benchmark.name}')
    module.add_arguments(parser)
    return parser


if __name__ == '__main__':
    raise SystemExit(main())
