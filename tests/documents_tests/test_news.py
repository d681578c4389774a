"""News are lines of the changelog, one file each."""

from __future__ import annotations

import importlib.util
import pathlib
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHANGELOG = """# Changelog

## 0.2.0

### Added

- One.

### Changed

- Two.

## 0.1.0

### Added

- Three.
"""


@pytest.fixture(scope='module')
def module() -> types.ModuleType:
    path = ROOT / 'docs' / 'make_changelog.py'
    spec = importlib.util.spec_from_file_location('make_changelog', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / 'CHANGELOG.md').write_text(CHANGELOG)
    (tmp_path / 'docs' / 'news').mkdir(parents=True)
    return tmp_path


def test_news_can_be_used(module, capsys):
    status = module.main(['--check'])
    assert status == 0, capsys.readouterr().out


def test_a_changelog_without_news_stays(module, root):
    assert module.main([], root) == 0
    assert (root / 'CHANGELOG.md').read_text() == CHANGELOG
    own = (ROOT / 'CHANGELOG.md').read_text()
    assert module.with_entries(own, []) == own


def test_news_go_to_their_sections_of_the_newest_release(module, root):
    news = root / 'docs' / 'news'
    (news / 'four.added').write_text('**Four** is a word' + ' and a word' * 10 + '.\n')
    (news / 'five.fixed').write_text('Five is\nright.\n')
    assert module.main(['--check'], root) == 0
    assert len(list(news.iterdir())) == 2
    assert module.main([], root) == 0
    assert not list(news.iterdir())
    text = (root / 'CHANGELOG.md').read_text()
    newest, older = text.split('## 0.1.0')
    assert older == CHANGELOG.split('## 0.1.0')[1]
    added, fixed, changed = newest.split('### ')[1:]
    assert added.startswith('Added\n\n- One.\n- **Four** is a word and')
    assert fixed == 'Fixed\n\n- Five is right.\n\n'
    assert changed == 'Changed\n\n- Two.\n\n'
    assert max(map(len, text.splitlines())) <= module.COLUMNS


@pytest.mark.parametrize(
    ('name', 'text', 'why'),
    [
        ('four.md', 'Four.', 'NAME.KIND'),
        ('Four.added', 'Four.', 'NAME.KIND'),
        ('four.added', ' \n', 'empty'),
        ('four.added', '- Four.', 'without the bullet'),
        ('four.added', 'Four.\n\nFive.', 'one bullet'),
        ('four.added', 'Four', 'full stop'),
    ],
)
def test_what_cannot_be_used_stays(module, root, capsys, name, text, why):
    path = root / 'docs' / 'news' / name
    path.write_text(text)
    assert module.main([], root) == 1
    assert why in capsys.readouterr().out
    assert path.exists() and (root / 'CHANGELOG.md').read_text() == CHANGELOG
