"""A report as one HTML file: data, and the page that shows it."""

from chainer_hybridmem.reporting.page.data import make_data
from chainer_hybridmem.reporting.page.figures import Run
from chainer_hybridmem.reporting.page.html import (
    make_frame,
    make_page,
    make_text,
    make_text_page,
)

__all__ = ['Run', 'make_data', 'make_frame', 'make_page', 'make_text', 'make_text_page']
