"""Profiles made by hand, as files, and a way to run the command line."""

import pytest
from support import toys

from chainer_hybridmem import commands
from chainer_hybridmem.records import library


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def profile(folder):
    """The running example: six layers of 10 MiB; ``p.json`` in the folder."""
    profile = toys.chain()
    library.save(profile, str(folder / 'p.json'))
    return profile


@pytest.fixture
def hybridmem(capsys):
    """Runs a command line; returns exit status, standard output, standard error."""

    def run(*arguments):
        try:
            status = commands.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            status = exit.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def refused(hybridmem):
    """Runs a command line that must fail with one line; returns that line."""

    def run(*arguments):
        status, out, err = hybridmem(*arguments)
        assert status == 1
        assert out == ''
        assert err.startswith('hybridmem: error: ')
        assert err.count('\n') == 1
        return err

    return run
