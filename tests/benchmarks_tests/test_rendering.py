"""The pages of results show what the committed result files say."""

from __future__ import annotations

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def rendering(monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(ROOT), *sys.path])
    from benchmarks import rendering

    return rendering


def test_the_page_of_results_is_not_stale(rendering):
    assert rendering.main(['--check']) == 0


def test_a_stale_page_is_told(rendering, tmp_path, monkeypatch, capsys):
    page = tmp_path / 'results.md'
    page.write_text(rendering.render().replace('hybrid', 'magic'))
    monkeypatch.setattr(rendering, 'PAGE', page)
    assert rendering.main(['--check']) == 1
    assert 'results.md is stale' in capsys.readouterr().err


def test_a_stale_page_of_tables_is_told(rendering, tmp_path, monkeypatch, capsys):
    for name in rendering.tables.PAGES:
        (tmp_path / f'{name}.md').write_text(rendering.render_tables(name))
    monkeypatch.setattr(rendering, 'TABLES', tmp_path)
    assert rendering.main(['--check']) == 0
    stale = tmp_path / 'tables_ranks.md'
    stale.write_text(stale.read_text().replace('x |', 'y |'))
    assert rendering.main(['--check']) == 1
    assert 'tables_ranks.md is stale' in capsys.readouterr().err


def test_the_page_of_results_leads_to_every_table(rendering):
    page = rendering.PAGE.read_text()
    for name, (_, sections) in rendering.tables.PAGES.items():
        assert f'/{name}.md)' in page
        text = (rendering.TABLES / f'{name}.md').read_text()
        for section in sections:
            heading = rendering.anchor(section.title)
            assert f'](#{heading})' in text, section.title
            assert f'\n## {section.title}\n' in text


def test_figures_of_the_readme_are_those_of_the_results(rendering):
    cells = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in (ROOT / 'README.md').read_text().splitlines()
        if line.startswith('|')
    ]
    shown = {line[0].partition(' (')[0].strip('`'): line[1:] for line in cells}
    rows = rendering.read('host_methods')['rows']
    names = {'in-core': 'none'}
    for row in (row for row in rows if row['arch'] == 'resnet50'):
        name = names.get(row['planner'], row['planner'])
        if name in shown:
            seconds, peak = f'{row["iteration_seconds"]:.2f}', row['peak_bytes'] / 1e6
            assert shown[name][:2] == [seconds, f'{peak:,.0f} MB']
    assert {'none', 'swap-all', 'superneurons', 'pooch', 'hybrid'} <= set(shown)


def test_a_stale_readme_is_told(rendering, tmp_path, monkeypatch, capsys):
    text = rendering.README.read_text()
    figures = text.partition(rendering.BEGINS)[2].partition(rendering.ENDS)[0]
    row = '| plans, drawn chains | 1'
    assert f'{row},000 | 1,000 |' in figures and ' of 27 limits' in figures
    page = tmp_path / 'README.md'
    page.write_text(text.replace(row, row.replace('1', '2')))
    monkeypatch.setattr(rendering, 'README', page)
    assert rendering.main(['--check']) == 1
    assert 'README.md is stale' in capsys.readouterr().err
    assert rendering.render_readme() == text


@pytest.mark.parametrize('name', ['gallery', 'choice', 'packages'])
def test_other_stale_pages_are_told(rendering, name, tmp_path, monkeypatch, capsys):
    page = tmp_path / f'{name}.md'
    text = getattr(rendering, f'render_{name}')()
    page.write_text(text.replace(' MB', ' GB').replace('hybrid', 'magic'))
    monkeypatch.setattr(rendering, name.upper(), page)
    assert rendering.main(['--check']) == 1
    assert f'{name}.md is stale' in capsys.readouterr().err


def test_each_table_names_its_source(rendering):
    body = {
        'environment': {
            'processor': 'some CPU',
            'cores': 2,
            'gpu': 'emulated',
            'python': '3.11',
            'numpy': '2.4',
            'commit': 'abc1234',
            'clean': False,
            'date': '2026-11-21',
        }
    }
    line = rendering.source_line('some', body)
    assert line == (
        '*[some.json](../benchmarks/results/some.json): some CPU, 2 cores, GPU '
        'emulated; python 3.11, numpy 2.4; BLAS threads: not recorded; commit abc1234 '
        'with uncommitted changes; 2026-11-21.*'
    )
    assert 'names neither machine nor commit' in rendering.source_line('some', {})
