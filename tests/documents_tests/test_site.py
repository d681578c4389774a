"""What the site makes of the pages: nothing of them is lost or changed."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / 'docs').rglob('*.md'))


@pytest.fixture(scope='module')
def settings() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location('conf', ROOT / 'docs' / 'conf.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(settings: types.ModuleType, text: str) -> str:
    """The text of a page as the site renders it."""
    core = pytest.importorskip('docutils.core')
    pytest.importorskip('myst_parser')
    content = [text]
    settings.on_source_read(None, 'docs/guide/page', content)
    parts = core.publish_parts(
        content[0],
        parser=importlib.import_module('myst_parser.docutils_').Parser(),
        writer='html5',
        settings_overrides={
            'smart_quotes': True,
            'smartquotes_action': settings.smartquotes_action,
            'report_level': 5,
        },
    )
    return parts['body']


def test_a_line_that_begins_with_a_percent_sign_is_shown(settings):
    """MyST takes it for a comment, and a paragraph wraps anywhere."""
    text = '# T\n\nIt costs 12\n% of the time.\n\n- of which 3\n  % are copies\n'
    body = shown(settings, f'{text}\n```text\n% code\n```\n')
    assert '% of the time' in body and '% are copies' in body
    assert '<pre' in body and '\\%' not in body


def test_what_is_for_those_who_write_pages_is_not_shown(settings):
    text = '# T\n\n<!-- edit something else -->\n\n```python no-run: a reason\n1\n```\n'
    body = re.sub(r'<!--.*?-->', '', shown(settings, text))
    assert 'edit' not in body and 'reason' not in body and '1' in body


@pytest.mark.parametrize('path', DOCS, ids=lambda path: path.stem)
def test_no_page_speaks_to_those_who_write_it(path):
    assert 'edit it by hand' not in ' '.join(path.read_text().split())


def test_options_keep_their_dashes(settings):
    assert settings.smartquotes_action == 'qe'  # quotes, ellipses; "D" is for dashes
