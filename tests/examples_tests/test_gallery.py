"""The examples of the gallery run with tiny sizes, and keep bits and limit."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from support.mpi import needs_mpi, run_ranks

from benchmarks.gallery import SMALL, small_options

FOLDER = Path(__file__).parents[2] / 'examples' / 'gallery'
# Sequences of few steps: each is a function of its own, or several.
SHORT = {
    'language_model': {'LENGTHS': (4, 6, 8)},
    'seq2seq': {'SHORTEST': 3, 'LONGEST': 5},
}


def options(name: str, folder: Path, on_gpu: bool = False) -> list[str]:
    sizes = small_options(name, on_gpu)
    return [*sizes, '--iterations', '8', '--out', str(folder)]


def check(name: str, folder: Path) -> None:
    figures = json.loads((folder / f'{name}.json').read_text())
    assert figures['equal']
    assert figures['limited_peak_bytes'] <= figures['limit_bytes']
    assert figures['limit_bytes'] < figures['plain_peak_bytes']
    assert (folder / f'{name}.png').read_bytes().startswith(b'\x89PNG')


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_every_example_is_tried():
    files = {path.stem for path in FOLDER.glob('*.py')}
    assert files == {*SMALL, 'comparison', 'data_parallel'}


@pytest.mark.parametrize('name', SMALL)
def test_example(name, tmp_path, monkeypatch):
    pytest.importorskip('sklearn')
    example = importlib.import_module(name)
    for constant, value in SHORT.get(name, {}).items():
        monkeypatch.setattr(example, constant, value)
    assert example.main(options(name, tmp_path)) == 0
    check(name, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize('name', ['vae', 'seq2seq'])
def test_example_on_a_gpu(name, tmp_path):
    pytest.importorskip('sklearn')
    given = [*options(name, tmp_path, on_gpu=True), '--device', 'cuda']
    assert importlib.import_module(name).main([*given, '--planner', 'swap-all']) == 0
    check(name, tmp_path)


@needs_mpi
def test_two_processes(tmp_path):
    sizes = ['--batchsize', '8', '--width', '4', '--iterations', '8']
    words = [*sizes, '--planner', 'swap-all', '--out', tmp_path]
    program = FOLDER / 'data_parallel.py'
    done = run_ranks(program, *words, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check('data_parallel', tmp_path)


def test_nothing_is_written_that_git_does_not_ignore(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comparison = importlib.import_module('comparison')
    out = comparison.parse('', comparison.Defaults(8, 4, 0.8, 8), []).out
    ignored = (FOLDER.parents[1] / '.gitignore').read_text().splitlines()
    assert f'{out}/' in ignored


def test_other_bits_are_told(monkeypatch, tmp_path, capsys):
    comparison = importlib.import_module('comparison')
    made = []

    def make(arguments):
        made.append(program := example.make(arguments))
        if len(made) < 3:  # plain, watched, limited
            return program
        return program._replace(step=lambda i: program.step(i) + 1e-6)

    example = importlib.import_module('vae')
    defaults = comparison.Defaults(8, 4, 0.8, 8)
    assert comparison.main('vae', None, make, defaults, ['--out', str(tmp_path)]) == 1
    assert 'OTHER BITS' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        (['--share', '0.05'], 'do not fit'),
        (['--link-bandwidth', 'fast'], "'fast' is not a bandwidth"),
        (['--out', '/dev/null/here'], 'Not a directory'),
    ],
)
def test_what_cannot_be_done_is_one_line(given, message, tmp_path, capsys):
    vae = importlib.import_module('vae')
    assert vae.main([*options('vae', tmp_path), *given]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith('vae: ') and message in printed
    assert printed.count('\n') == 1


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        (['--share', '1.5'], '--share 1.5 is no limit; try 0.6'),
        (['--batchsize', '0'], '--batchsize 0 is too small; 1 or more'),
        (['--iterations', '3'], '--iterations 3 is too small; 8 or more'),
    ],
)
def test_bad_options(given, message, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module('vae').main(given)
    assert message in capsys.readouterr().err
