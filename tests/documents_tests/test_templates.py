"""What contributors are given: the commands, options and files that it names exist."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

from chainer_hybridmem import commands

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEMPLATES = sorted((ROOT / '.github').rglob('*.md'))
PAGES = [*TEMPLATES, *(ROOT / 'docs' / f'{n}.md' for n in ('CONTRIBUTING', 'SECURITY'))]
HOOK = re.compile(r'^ +entry: (.+)$', re.MULTILINE)


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_what_is_named_exists(page):
    text = page.read_text()
    names = {command.name for command in commands.COMMANDS}
    assert set(re.findall(r'`hybridmem (\w+)', text)) <= names
    for path in re.findall(r'\b(docs/[\w/]+\.(?:md|py))', text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE)
    assert set(re.findall(r'\bmake ([a-z-]+)`', text)) <= set(targets)


def test_hooks_need_no_network_and_find_nothing_now():
    text = (ROOT / '.pre-commit-config.yaml').read_text()
    assert re.findall(r'repo: (.+)', text) == ['local']
    entries = HOOK.findall(text)
    assert len(entries) == 3
    for entry in entries:
        program, *flags = entry.replace('--fix', '').split()
        if not (ROOT / program).exists():
            program = shutil.which(pathlib.Path(program).name) or pytest.skip(program)
        paths = ['docs'] if 'ruff' in program else []
        check = ['--check'] if 'format' in flags else []
        done = subprocess.run(
            [program, *flags, *check, *paths],
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
