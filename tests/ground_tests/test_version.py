"""Where the commit of a version comes from."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from chainer_hybridmem import version


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    """A package in a checkout with one commit."""
    folder = tmp_path / 'checkout' / 'package'
    folder.mkdir(parents=True)
    (folder / 'module.py').write_text('')
    identity = ('-c', 'user.name=a', '-c', 'user.email=a@b.c')
    for command in (['init', '-q'], ['add', '.'], ['commit', '-q', '-m', 'first']):
        subprocess.run(['git', *identity, *command], cwd=folder.parent, check=True)
    return folder


def test_the_checkout_tells_its_commit(package):
    commit = version.find_commit(package)
    assert len(commit) == 7 and int(commit, 16) >= 0
    (package / 'module.py').write_text('changed')
    assert version.find_commit(package) == f'{commit}-dirty'


def test_a_build_has_noted_its_commit(package):
    (package / version.COMMIT_FILE).write_text('1a2b3c4\n')
    assert version.find_commit(package) == '1a2b3c4'


def test_an_installed_package_has_not_the_commit_of_the_repository_around_it(package):
    installed = package.parent / 'venv' / 'package'
    installed.mkdir(parents=True)
    assert version.find_commit(installed) == ''


def test_without_git_there_is_a_version(package, monkeypatch):
    monkeypatch.setenv('PATH', '/nowhere')
    assert version.find_commit(package) == ''
    monkeypatch.setattr(version, 'find_commit', lambda: '')
    assert version.describe() == version.__version__
