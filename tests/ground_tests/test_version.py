"""Where the commit of a version comes from."""

from __future__ import annotations

import configparser
import pathlib
import re
import shlex
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


# -- extras ---------------------------------------------------------------------
PACKAGE = pathlib.Path(version.__file__).parent


def declared_extras() -> dict[str, list[str]]:
    setup = configparser.ConfigParser()
    setup.read(PACKAGE.parent / 'setup.cfg')
    section = setup['options.extras_require']
    return {extra: section[extra].split('\n')[1:] for extra in section}


@pytest.mark.parametrize(
    'extra', ['plot', 'autoswap', 'cuda12', 'cuda12-cudnn8', 'cuda13']
)
def test_what_an_extra_brings_is_named_as_an_index_has_it(extra):
    command = shlex.split(version.describe_installation(extra))
    assert command[:2] == ['pip', 'install']
    assert sorted(map(plain, command[2:])) == sorted(
        map(plain, declared_extras()[extra])
    )


def plain(requirement: str) -> tuple[str, list[str]]:
    """Name and versions: builds may order these."""
    name, *versions = re.split(r'(?=[<>=])(?<![<>=])', requirement, maxsplit=1)
    return name, sorted(''.join(versions).split(','))


def test_an_extra_that_the_metadata_does_not_know():
    told = version.describe_installation('plott')
    assert told == "pip install '.[plott]' in the folder of chainer_hybridmem's source"


def test_no_message_names_a_distribution_that_no_index_has():
    """The package is installed from its source; a message cannot say its name."""
    sources = [
        *PACKAGE.rglob('*.py'), *PACKAGE.parent.glob('*.md'),
        *(PACKAGE.parent / 'docs').rglob('*.md'),
    ]  # fmt: skip
    assert len(sources) > 300
    wrong = [
        path.name
        for path in sources
        if re.search(r'pip install\s+.?chainer_hybridmem', path.read_text())
    ]
    assert not wrong
