"""A report as one HTML file: data, and the page that shows it."""

from __future__ import annotations

import html
import importlib.resources
import json
from typing import Any

from chainer_hybridmem.reporting.page.data import make_data
from chainer_hybridmem.reporting.page.figures import Run

__all__ = ['Run', 'make_data', 'make_frame', 'make_page', 'make_text', 'make_text_page']


DATA_ID = 'hybridmem-data'
_STYLES = ('uPlot.min.css', 'page.css')
_PROGRAMS = ('uPlot.iife.min.js', 'format.js', 'charts.js', 'panels.js', 'page.js')
FRAME_PIXELS = 900


def make_page(data: dict[str, Any]) -> str:
    """The page as text.

    Args:
        data: From :func:`.data.make_data`.

    Returns:
        str: A whole HTML document, to be written as UTF-8.
    """
    styles = '\n'.join(_read(name) for name in _STYLES)
    programs = '\n'.join(f'<script>{_read(name)}</script>' for name in _PROGRAMS)
    page = _read('page.html')
    licence = f'<!-- uPlot: {_read("uPlot.LICENSE.txt").strip()} -->'
    for mark, text in (
        ('<!--licence-->', licence),
        ('/*styles*/', styles),
        ('<!--data-->', embed(data)),
        ('<!--programs-->', programs),
    ):
        page = page.replace(mark, text, 1)
    return page


def embed(data: dict[str, Any]) -> str:
    """Data as JSON inside a page: no name in it can end the element."""
    text = json.dumps(data, separators=(',', ':'), allow_nan=False)
    text = text.replace('<', '\\u003c').replace('>', '\\u003e')
    return f'<script type="application/json" id="{DATA_ID}">{text}</script>'


def make_frame(page: str) -> str:
    """A page inside a cell of a notebook; its styles and names stay its own."""
    return (
        f'<iframe title="chainer_hybridmem report" srcdoc="{html.escape(page)}" '
        f'style="width:100%;height:{FRAME_PIXELS}px;border:0"></iframe>'
    )


def make_text(text: str) -> str:
    """Plain text inside a cell of a notebook."""
    return f'<pre>{html.escape(text)}</pre>'


def make_text_page(text: str) -> str:
    """Plain text as a page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>hybridmem report</title>\n{make_text(text)}\n</html>\n'
    )


def _read(name: str) -> str:
    folder = importlib.resources.files('chainer_hybridmem.reporting.page')
    return folder.joinpath('assets').joinpath(name).read_text(encoding='utf-8')
