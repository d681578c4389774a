"""Chainer is imported after this package, in examples and by what sorts imports."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs' / 'guide').glob('*.md'))]
STARTED = ROOT / 'docs' / 'guide' / 'getting_started.md'


def blocks(page: pathlib.Path, language: str) -> list[str]:
    pattern = rf'^```{language}[^\n]*\n(.*?)^```$'
    return re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_examples_import_it_first(page):
    for text in blocks(page, 'python'):
        names = re.findall(r'^(?:import|from) (chainer\w*)', text, re.MULTILINE)
        if 'chainer' in names and 'chainer_hybridmem' in names:
            assert names.index('chainer_hybridmem') < names.index('chainer'), text


def sorted_by_ruff(folder: pathlib.Path, text: str, *options: str) -> str:
    (folder / 'example.py').write_text(text)
    command = [sys.executable, '-m', 'ruff', 'check', '--select', 'I', '--fix', '-q']
    subprocess.run([*command, *options, 'example.py'], cwd=folder, check=True)
    return (folder / 'example.py').read_text()


def test_what_the_page_says_about_sorting_is_so(tmp_path):
    plain = 'import chainer_hybridmem as hybridmem\nimport chainer\n'
    assert sorted_by_ruff(tmp_path, plain, '--isolated').startswith('import chainer\n')
    (split,) = (text for text in blocks(STARTED, 'python') if 'isort: split' in text)
    assert sorted_by_ruff(tmp_path, split, '--isolated') == split
    (setting,) = blocks(STARTED, 'toml')
    (tmp_path / 'ruff.toml').write_text(setting)
    kept = sorted_by_ruff(tmp_path, plain, '--config', 'ruff.toml')
    assert kept.startswith('import chainer_hybridmem')
