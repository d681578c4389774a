"""Writes the pages that follow from the committed JSON of ``benchmarks/results``.

    python -m benchmarks render           # results.md, gallery.md, which_planner.md
    python -m benchmarks render --check   # exits 1 if a page is stale

``benchmarks.tables`` lists the sections of the first. Each of them says on which
machine, with which versions, at which commit and on which day its figures were
measured, as far as the result file says so.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks import tables
from benchmarks.tables import choice, gallery

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
PAGE = ROOT / 'docs' / 'results.md'
GALLERY = ROOT / 'docs' / 'guide' / 'gallery.md'
CHOICE = ROOT / 'docs' / 'guide' / 'which_planner.md'
COLUMNS = 100
VERSIONS = ('python', 'numpy', 'chainer', 'numba', 'cupy', 'torch')
HEAD = (
    """What has been measured and predicted, and where? Every table below comes from a
    result file in `benchmarks/results`.""",
    '<!-- python -m benchmarks render writes this page; edit what it is made of -->',
    """[benchmarks/README.md](../benchmarks/README.md) lists the scripts that
    measure. Machines are shared: compare figures within one table, and prefer ratios
    to seconds. *Measured* means on a CPU; no figure of this page comes from a real GPU.
    *Predicted* means that the simulator computed it, for a [modelled
    GPU](guide/estimate.md) where one is named. The [glossary](README.md#words)
    explains the words.""",
)


def render() -> str:
    """Returns the page for the result files as they are now."""
    parts = ['# Results\n', *(f'{_wrapped(text)}\n' for text in HEAD)]
    for section in tables.SECTIONS:
        bodies = {name: read(name) for name in section.names}
        parts.append(f'## {section.title}\n')
        parts.append(_wrapped(section.text) + '\n')
        parts += [f'{part}\n' for part in _paragraphs(section, *bodies.values())]
        for name, body in bodies.items():
            parts.append(_wrapped(source_line(name, body)) + '\n')
    return '\n'.join(parts)


def render_gallery() -> str:
    """Returns the page of examples for their result file as it is now."""
    body = read('gallery')
    texts = {row['name']: _docstring(row['name']) for row in body['rows']}
    return _page(gallery.page(body, texts), 'gallery', body)


def render_choice() -> str:
    """Returns the page that says which planner to take, for the comparison as it is."""
    body = read('rivals_compare')
    return _page(choice.page(body), 'rivals_compare', body)


def _page(parts: list[str], name: str, body: dict[str, Any]) -> str:
    source = source_line(name, body).replace('](..', '](../..')
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


def _paragraphs(section: tables.Section, *bodies: dict[str, Any]) -> list[str]:
    """Returns the tables and paragraphs of a section; paragraphs are wrapped."""
    parts = section.render(*bodies).rstrip().split('\n\n')
    return [part if part.startswith(('|', '- ')) else _wrapped(part) for part in parts]


def _wrapped(text: str) -> str:
    """Returns one paragraph with lines of at most 100 columns."""
    return textwrap.fill(
        ' '.join(text.split()), COLUMNS, break_long_words=False, break_on_hyphens=False
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the pages; returns the exit status."""
    parser = argparse.ArgumentParser(description='Write pages from the results.')
    parser.add_argument(
        '--check', action='store_true', help='write nothing; exit with 1 if stale'
    )
    options = parser.parse_args(arguments)
    status = 0
    pages = {PAGE: render, GALLERY: render_gallery, CHOICE: render_choice}
    for path, render_page in pages.items():
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
