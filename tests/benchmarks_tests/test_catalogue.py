"""Every benchmark is listed, has what the runner calls, and says what it writes."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import __main__ as cli
from benchmarks import catalogue, rendering, tables

FOLDER = pathlib.Path(catalogue.__file__).parent
# Results that were kept under another name (--name, --label).
KEPT = {
    'many_allocations_before.json',
    'programs_after.json',
    'programs_after.md',
    'programs_before.json',
    'programs_before.md',
    'programs_vision.json',
    'programs_vision.md',
    'upstream_slice.json',
    'upstream_tenth.json',
}


def test_every_module_with_a_main_is_listed():
    modules = {
        '.'.join(path.relative_to(FOLDER).with_suffix('').parts)
        for path in FOLDER.rglob('*.py')
        if '\ndef main(options' in path.read_text()
    }
    assert modules == set(catalogue.BY_NAME)


def test_every_result_has_its_benchmark():
    known = {name for one in catalogue.BENCHMARKS for name in one.results} | KEPT
    # Render writes these.
    known |= {f'{page}.md' for page in tables.PAGES} | {rendering.CHOICE.name}
    assert {path.name for path in (FOLDER / 'results').iterdir()} <= known


@pytest.mark.parametrize('name', catalogue.BY_NAME)
def test_help_is_the_text_of_the_module(name, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(['run', name, '--help'])
    assert exit.value.code == 0
    assert f'run {name}' in capsys.readouterr().out


def test_list(capsys):
    assert cli.main(['list']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(catalogue.BY_NAME) <= {line.partition(' ')[0] for line in lines}


def test_an_unknown_name(capsys):
    assert cli.main(['run', 'rivals/compar']) == 2
    assert "Did you mean 'rivals.compare'?" in capsys.readouterr().err
