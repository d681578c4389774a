"""Sphinx's settings: ``sphinx-build -c docs . .site/html`` builds the site.

The source folder is the repository itself, so that relative links between Markdown
files lead to the same place on a code host and on the site. The navigation is made of
the sections and links of ``docs/README.md``; no page is listed twice.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
import shutil
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import chainer_hybridmem as hybridmem  # noqa: E402

project = 'chainer_hybridmem'
author = 'The chainer_hybridmem authors'
release = version = hybridmem.__version__

# -- pages --------------------------------------------------------------------
root_doc = 'README'
include_patterns = [
    'README.md',
    'CHANGELOG.md',
    'docs/**',
    'benchmarks/README.md',
    'benchmarks/results/*.md',
    'examples/**/README.md',
]
exclude_patterns = ['.*', 'build', 'dist', 'chainer_hybridmem', 'tests']
source_suffix = {'.md': 'markdown', '.rst': 'restructuredtext'}
nitpicky = True
# Types of others have no pages here.
nitpick_ignore_regex = [('py:.*', r'(?!chainer_hybridmem).*')]
# Named in signatures; no program needs them.
nitpick_ignore = [
    ('py:class', f'chainer_hybridmem.{name}')
    for name in (
        'training.devices.protocol.Device',
        'training.recompute.trust.Kind',
        'extras.memory_series.MeasuredPool',
        'training.session.setting.options.Options',
        'planning.simulation.problem.Problem',
    )
]

# -- Markdown -----------------------------------------------------------------
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']
myst_heading_anchors = 4
smartquotes_action = 'qe'  # a dash of an option stays one
highlight_language = 'text'

# -- docstrings ---------------------------------------------------------------
autodoc_default_options = {'members': True}
autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_typehints_format = 'short'
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# -- looks --------------------------------------------------------------------
html_theme = 'furo'
html_title = f'hybridmem {release}'
html_copy_source = False
html_show_copyright = False
html_static_path = ['static']
html_css_files = ['site.css']

INDEX = 'docs/README'
UNLISTED = ('benchmarks/results/', 'examples/')  # other pages link to these
SECTION = re.compile(r'^## (.+)$', re.MULTILINE)
LINK = re.compile(r'^- \[([^\]]+)\]\(([^)#]+)\)', re.MULTILINE)
PAGE = re.compile(r'\b(docs/\w+/\w+)\.md')
UNIT = re.compile(r'(?<=\d) (?=(?:%|[MG]B|[KMG]iB|ms|s)(?!\w))')
FENCED = re.compile(r'^(```.*?^```$)', re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r'^```(\w+) no-run: [^\n]+$', re.MULTILINE)
COMMENT = re.compile(r'^(\s*)%', re.MULTILINE)


def navigation(index: str) -> str:
    """Returns a hidden toctree for each section of the index that links to pages.

    Args:
        index: Text of ``docs/README.md``.
    """
    titles = SECTION.split(index)[1:]
    trees = [_toctree('Documents', [('Overview', INDEX)])]
    for title, body in zip(titles[::2], titles[1::2], strict=True):
        pages = [
            (text, posixpath.normpath(posixpath.join('docs', path)).rpartition('.')[0])
            for text, path in LINK.findall(body)
        ]
        if pages:
            trees.append(_toctree(title, pages))
    return '\n'.join(trees)


def _toctree(caption: str, pages: list[tuple[str, str]]) -> str:
    lines = [f'{text} </{page}>' for text, page in pages]
    return '\n'.join(
        ['```{toctree}', ':hidden:', f':caption: {caption}', '', *lines, '```', '']
    )


def on_source_read(app: Any, name: str, content: list[str]) -> None:
    """Adds what only the site shows, and leaves out what its readers cannot use.

    Added are the navigation on the first page and units that stay beside their numbers
    in tables. Why no test runs a block is left out.
    """
    if name == root_doc:
        index = ROOT / f'{INDEX}.md'
        app.env.note_dependency(str(index))
        content[0] += '\n' + navigation(index.read_text())
    if name.startswith(UNLISTED):
        content[0] = f'---\norphan: true\n---\n\n{content[0]}'
    lines = content[0].split('\n')
    content[0] = '\n'.join(
        UNIT.sub('\N{NO-BREAK SPACE}', line) if line.startswith('|') else line
        for line in lines
    )
    content[0] = without_comments(NOT_RUN.sub(r'```\1', content[0]))


def without_comments(text: str) -> str:
    """A line that begins with a percent sign is text: MyST would leave it out."""
    parts = FENCED.split(text)
    parts[::2] = [COMMENT.sub(r'\1\\%', part) for part in parts[::2]]
    return ''.join(parts)


def on_docstring(
    app: Any, what: str, name: str, item: Any, options: Any, lines: list[str]
) -> None:
    """Pages that a docstring names are links."""
    lines[:] = [PAGE.sub(r':doc:`\1 </\1>`', line) for line in lines]


def on_build_finished(app: Any, error: Exception | None) -> None:
    """The first page is found under its usual name, too."""
    if error is None and app.builder.name == 'html':
        shutil.copy(f'{app.outdir}/{root_doc}.html', f'{app.outdir}/index.html')


def setup(app: Any) -> None:
    """Connects the functions above."""
    app.connect('source-read', on_source_read)
    app.connect('autodoc-process-docstring', on_docstring)
    app.connect('build-finished', on_build_finished)
