"""Writes the pages that follow from the committed JSON of ``benchmarks/results``.

    python -m benchmarks render           # results, all tables, gallery, which_planner
    python -m benchmarks render --check   # exits 1 if a page is stale

``benchmarks.tables.SUMMARIES`` lists the tables of ``docs/results.md``; those in full
are in the pages ``tables_*.md`` beside the results, as ``benchmarks.tables.PAGES`` has
them. Each of these says on which machine, with which versions, at which commit and on
which day its figures were measured, as far as the result file says so.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import pathlib
import posixpath
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import tables
from benchmarks.tables import choice, contest, gallery, packages
from benchmarks.tables.form import anchor

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
README = ROOT / 'README.md'
PAGE = ROOT / 'docs' / 'results.md'
TABLES = RESULTS  # folder of the tables in full
GALLERY = ROOT / 'docs' / 'guide' / 'gallery.md'
CHOICE = RESULTS / 'which_planner.md'
PACKAGES = ROOT / 'docs' / 'guide' / 'packages.md'
TABLES_FOLDER, GUIDE_FOLDER = 'benchmarks/results', 'docs/guide'
COLUMNS = 100
VERSIONS = ('python', 'numpy', 'chainer', 'numba', 'cupy', 'torch')
LINK = re.compile(r'\]\(([^)\s:#]+)')
BEGINS, ENDS = '<!--arena-->', '<!--end-->'
WRITTEN = (
    '<!-- python -m benchmarks render writes this page; edit what it is made of -->'
)
HEAD = """What has been measured and predicted, and what does it say? *Measured* means
    on a CPU, unless a table says that it is about a real GPU. *Predicted* means that
    the simulator computed it, for a [modelled GPU](guide/estimate.md) where one is
    named. Machines are shared: compare figures within one table only. The line below a
    table leads to all of its rows, with machine, versions, commit and day."""
REST = """Each page begins with a list of its tables;
    [benchmarks](../benchmarks/README.md) says how to measure them again."""
TABLES_HEAD = """Every row, with machine, versions and commit. [Results](results.md)
    says what matters of it; the [glossary](README.md#words) explains the words."""


def render() -> str:
    """Returns the page of results for the result files as they are now."""
    parts = ['# Results', _wrapped(HEAD), WRITTEN]
    for summary in tables.SUMMARIES:
        bodies = [read(name) for name in summary.names]
        parts.append(f'## {summary.title}')
        parts.append(_wrapped(summary.says(*bodies)))
        parts += _paragraphs(summary.render(*bodies))
        links = ', '.join(f'[{title}]({_address(title)})' for title in summary.details)
        parts.append(_wrapped(f'*In full: {links}.*'))
    parts += ['## Every table', _wrapped(REST)]
    pages = (
        f'[{title}](../benchmarks/results/{name}.md)'
        for name, (title, _) in tables.PAGES.items()
    )
    parts.append(_wrapped(f'{", ".join(pages)}.'))
    return '\n\n'.join(parts) + '\n'


def render_tables(page: str) -> str:
    """Returns one page of tables in full.

    Args:
        page: Name of its file, without the ending.
    """
    title, sections = tables.PAGES[page]
    parts = [f'# {title}', _wrapped(_moved(TABLES_HEAD, TABLES_FOLDER)), WRITTEN]
    parts.append('\n'.join(f'- [{s.title}](#{anchor(s.title)})' for s in sections))
    for section in sections:
        bodies = {name: read(name) for name in section.names}
        parts.append(f'## {section.title}')
        parts.append(_wrapped(_moved(section.text, TABLES_FOLDER)))
        parts += _paragraphs(section.render(*bodies.values()))
        # What is true of these figures alone, not of those that replace them.
        parts += [_wrapped(b['note']) for b in bodies.values() if 'note' in b]
        parts += [
            _wrapped(_moved(source_line(name, body), TABLES_FOLDER))
            for name, body in bodies.items()
        ]
    return '\n\n'.join(parts) + '\n'


def _address(title: str) -> str:
    """Returns where a table is in full, from ``docs``."""
    if title in tables.ELSEWHERE:
        return tables.ELSEWHERE[title]
    for name, (_, sections) in tables.PAGES.items():
        if title in {section.title for section in sections}:
            return f'../benchmarks/results/{name}.md#{anchor(title)}'
    raise LookupError(f'no table is called {title!r}')


def _moved(text: str, folder: str) -> str:
    """Returns text whose links lead from another folder instead of ``docs``."""

    def move(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join('docs', match.group(1)))
        return f']({posixpath.relpath(target, folder)}'

    return LINK.sub(move, text)


def render_readme() -> str:
    """Returns the README with the arena's figures as they are now."""
    before, _, rest = README.read_text().partition(BEGINS)
    _, _, after = rest.partition(ENDS)
    figures = '\n\n'.join(
        _paragraphs(contest.readme(*map(read, ('arena', 'chains', 'tilings'))))
    )
    return f'{before}{BEGINS}\n\n{figures}\n\n{ENDS}{after}'


def render_gallery() -> str:
    """Returns the page of examples for their result file as it is now."""
    body = read('gallery')
    texts = {row['name']: _docstring(row['name']) for row in body['rows']}
    return _page(gallery.page(body, texts), 'gallery', body)


def render_choice() -> str:
    """Returns the page that says which planner to take, for the comparison as it is."""
    body = read('rivals_compare')
    return _page(choice.page(body), 'rivals_compare', body, TABLES_FOLDER)


def render_packages() -> str:
    """Returns the page of packages for their result file as it is now."""
    body = read('packages')
    return _page(packages.page(body), 'packages', body)


def _page(
    parts: list[str], name: str, body: dict[str, Any], folder: str = GUIDE_FOLDER
) -> str:
    source = _moved(source_line(name, body), folder)
    blocks = [p if p.startswith(('#', '|', '!', '```')) else _wrapped(p) for p in parts]
    return '\n\n'.join([*blocks, _wrapped(source)]) + '\n'


def _docstring(example: str) -> str:
    path = ROOT / 'examples' / 'gallery' / f'{example}.py'
    return ast.get_docstring(ast.parse(path.read_text())) or ''


def read(name: str) -> dict[str, Any]:
    """Returns the content of one result file."""
    body: dict[str, Any] = json.loads((RESULTS / f'{name}.json').read_text())
    return body


def source_line(name: str, body: dict[str, Any]) -> str:
    """Returns where the figures of one result file come from.

    Args:
        name: Name of the result file, without its ending.
        body: Content of the file.
    """
    link = f'[{name}.json](../benchmarks/results/{name}.json)'
    found = body.get('environment')
    if not found:
        return f'*{link}: the file names neither machine nor commit.*'
    machine = f'{found["processor"]}, {found["cores"]} cores'
    if found.get('gpu'):
        machine += f', GPU {found["gpu"]}'
    versions = ', '.join(f'{key} {found[key]}' for key in VERSIONS if found.get(key))
    commit = f'commit {found["commit"]}'
    if found.get('clean') is False:
        commit += ' with uncommitted changes'
    elif found.get('clean') is None:
        commit += ' (the file does not say whether with uncommitted changes)'
    threads = f'BLAS threads: {found.get("blas_threads", "not recorded")}'
    return f'*{link}: {machine}; {versions}; {threads}; {commit}; {found["date"]}.*'


def _paragraphs(text: str) -> list[str]:
    """Returns tables and paragraphs; paragraphs are wrapped."""
    parts = text.rstrip().split('\n\n')
    return [part if part.startswith(('|', '- ')) else _wrapped(part) for part in parts]


def _wrapped(text: str) -> str:
    """Returns one paragraph with lines of at most 100 columns."""
    return textwrap.fill(
        ' '.join(text.split()), COLUMNS, break_long_words=False, break_on_hyphens=False
    )


def _pages() -> Iterator[tuple[pathlib.Path, Callable[[], str]]]:
    yield PAGE, render
    yield README, render_readme
    yield GALLERY, render_gallery
    yield CHOICE, render_choice
    if (RESULTS / 'packages.json').exists():  # it needs a package index
        yield PACKAGES, render_packages
    for name in tables.PAGES:
        yield TABLES / f'{name}.md', functools.partial(render_tables, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the pages; returns the exit status."""
    parser = argparse.ArgumentParser(description='Write pages from the results.')
    parser.add_argument(
        '--check', action='store_true', help='write nothing; exit with 1 if stale'
    )
    options = parser.parse_args(arguments)
    status = 0
    for path, render_page in _pages():
        page = render_page()
        if not options.check:
            path.write_text(page)
        elif not path.exists() or path.read_text() != page:
            print(
                f'{path.name} is stale; write it again with: '
                'python -m benchmarks render',
                file=sys.stderr,
            )
            status = 1
    return status
