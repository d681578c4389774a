"""The documents: links lead somewhere, named files exist, examples run."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import pathlib
import re

import pytest

from chainer_hybridmem.planning.planners import PLANNERS
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.session import report
from chainer_hybridmem.training.session.setting.options import Options

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'chainer_hybridmem'
DOCS = sorted((ROOT / 'docs').rglob('*.md'))
PAGES = [
    *(ROOT / 'README.md', ROOT / 'CHANGELOG.md', ROOT / 'benchmarks' / 'README.md'),
    *(TABLES := sorted((ROOT / 'benchmarks' / 'results').glob('tables_*.md'))),
    ROOT / 'benchmarks' / 'results' / 'which_planner.md',
    *DOCS,
]
GENERATED = {
    'options.md',
    'commands.md',
    'python.md',
    'results.md',
    'gallery.md',
    'packages.md',
    'which_planner.md',
    *(page.name for page in TABLES),
}
WRITTEN = [page for page in PAGES if page.name not in GENERATED]
COLUMNS = 100
MOST_WORDS = 1000  # of the README
CODE = re.compile(r'^```.*?^```', re.DOTALL | re.MULTILINE)
LINK = re.compile(r'\[[^\]]*\]\(([^)\s]+)\)')
ADDRESS = re.compile(r'https://(?:[a-z0-9-]+\.)+[a-z]{2,}(?:/[^\s<>]*)?')
NAMES_OF_OTHERS = {
    *('EMU_SEED', 'PYTHON', 'SIGTERM'),  # of environments and systems
    *('RoundMultiple', 'RoundPower2'),  # of MXNet
    'memory_layouts',  # of Chainer
}
ROOMS = '|'.join(path.name for path in PACKAGE.iterdir() if path.is_dir())


def name_of(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading.strip('# \n'))
    return re.sub(r'[^\w\- ]', '', text.lower()).replace(' ', '-')


@functools.cache
def anchors(page: pathlib.Path) -> set[str]:
    text = CODE.sub('', page.read_text())
    return {anchor_of(line) for line in re.findall(r'^#+ .*', text, re.MULTILINE)}


@pytest.mark.parametrize('page', PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = CODE.sub('', page.read_text())
    for target in LINK.findall(text.replace('\n', ' ')):
        if ':' in target:
            assert ADDRESS.fullmatch(target), f'{target} is no address'
            continue
        path, _, anchor = target.partition('#')
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f'{target} does not exist'
        if anchor:
            assert anchor in anchors(other), f'{target}: no such heading'


@pytest.mark.parametrize('page', WRITTEN, ids=name_of)
def test_lines_and_words(page):
    text = page.read_text()
    prose = CODE.sub('', text)
    long = [
        line
        for line in prose.splitlines()
        if len(line) > COLUMNS and not line.startswith(('|', '    ', '#'))
    ]
    assert not long
    assert not re.findall(r'\b(?:nobody|whoever|somebody)\b', prose, re.IGNORECASE)


@pytest.mark.parametrize('page', DOCS, ids=name_of)
def test_a_page_begins_with_its_question(page):
    title, question = page.read_text().split('\n\n')[:2]
    assert title.startswith('# ')
    assert '?' in question


def test_the_readme_is_short():
    assert len((ROOT / 'README.md').read_text().split()) <= MOST_WORDS


def test_each_page_is_in_the_index():
    index = ROOT / 'docs' / 'README.md'
    linked = {
        (index.parent / target.partition('#')[0]).resolve()
        for target in LINK.findall(index.read_text())
    }
    assert [name_of(page) for page in DOCS if page not in linked] == [name_of(index)]


@pytest.mark.parametrize('page', PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    text = page.read_text()
    for name in re.findall(rf'`((?:{ROOMS})/[\w/]+\.\w+)`', text):
        assert (PACKAGE / name).exists(), name
    for name in re.findall(r'`((?:tests|benchmarks|examples)/[\w/]+\.\w+)`', text):
        assert (ROOT / name).exists(), name
    known = {path.name for path in (ROOT / 'tests').rglob('test_*.py')}
    for name in re.findall(r'\b(test_\w+\.py)\b', text):
        assert name in known, name


@functools.cache
def words_of_the_code() -> set[str]:
    folders = (PACKAGE, *(ROOT / name for name in ('tests', 'benchmarks', 'examples')))
    paths = [path for folder in folders for path in folder.rglob('*.py')]
    words = {word for path in paths for word in re.findall(r'\w+', path.read_text())}
    return words | {part for path in paths for part in path.relative_to(ROOT).parts}


@pytest.mark.parametrize('page', PAGES, ids=name_of)
def test_names_of_the_code_are_there(page):
    """Classes and functions; names of files are looked up elsewhere."""
    for name in re.findall(r'`(_*[A-Z]\w+(?:\.\w+)*|[a-z]\w*_\w+)`', page.read_text()):
        missing = set(name.split('.')) - words_of_the_code() - NAMES_OF_OTHERS
        assert not missing, f'`{name}`'


@functools.cache
def classes_of_the_code() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for path in PACKAGE.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


@functools.cache
def members_of(name: str) -> set[str]:
    """What classes of a name have, with what their bases of the package have."""
    found: set[str] = set()
    for node in classes_of_the_code().get(name, ()):
        for one in ast.walk(node):
            if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                found.add(one.attr)
        for one in node.body:
            if isinstance(one, ast.FunctionDef):
                found.add(one.name)
            elif isinstance(one, ast.Assign | ast.AnnAssign):
                found |= {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}
        for base in node.bases:
            found |= members_of(ast.unparse(base).rpartition('.')[2].partition('[')[0])
    return found


@pytest.mark.parametrize('page', PAGES, ids=name_of)
def test_members_that_are_named_are_of_their_classes(page):
    for owner, member in re.findall(r'`(_*[A-Z]\w+)\.(\w+)', page.read_text()):
        if owner in classes_of_the_code():
            assert member in members_of(owner), f'{owner}.{member}'


@pytest.mark.parametrize('page', DOCS, ids=name_of)
def test_notes_that_are_named_are_there(page):
    text = ' '.join(page.read_text().split())
    for place, note in re.findall(r'(?:`([\w/.]+)`, )?Note: \[([^]]+)\]', text):
        found = [
            path
            for path in PACKAGE.rglob('*.py')
            if f'Note: [{note}]\n' in path.read_text()
        ]
        assert found, note
        assert any(str(PACKAGE / place) in str(path) for path in found), place


def test_methods_are_in_the_files_that_are_named():
    text = (ROOT / 'docs' / 'internals' / 'where.md').read_text()
    named = re.findall(r'`(\w+)(?:\.(\w+))?` \(`([\w/]+\.py)`\)', text)
    assert len(named) > 10
    for owner, method, file in named:
        code = (PACKAGE / file).read_text()
        assert re.search(
            rf'^(?:class|def) {owner}\b|^{owner} = ', code, re.MULTILINE
        ), owner
        assert re.search(rf'^ +(?:def )?{method or ""}\b', code, re.MULTILINE), method


def test_states_that_are_drawn_are_those_of_the_code():
    text = (ROOT / 'docs' / 'internals' / 'architecture.md').read_text()
    drawing = text.partition('## The states of a live map')[2].split('```')[1]
    assert set(re.findall(r'[A-Z]+', drawing)) == {state.name for state in State}
    moves = set(re.findall(r'[a-z]+(?:_[a-z]+)*', drawing)) - {'by', 'a', 'replay'}
    assert moves == {move for move in moves if callable(getattr(LiveMap, move, None))}
    assert len(moves) > 5


def test_every_row_of_the_report_is_explained():
    text = (ROOT / 'docs' / 'guide' / 'report.md').read_text()
    explained = {name.partition(', ')[0] for name in re.findall(r'`([^`\n]+)`', text)}
    tables = report.FITS, report.LIMITED, report.OF_THE_PLAN, report.OF_ALL_ITERATIONS
    rows = [row.name for rows in tables for row in rows]
    assert len(rows) > 25
    assert [name for name in rows if name.partition(', ')[0] not in explained] == []


def test_every_row_that_is_explained_is_one_of_the_report():
    text = (ROOT / 'docs' / 'guide' / 'report.md').read_text()
    named = re.findall(r'^\| `([^`]+)` \|', text, re.MULTILINE)
    assert len(named) > 5
    rows = {row.name for row in report.OF_ALL_ITERATIONS}
    assert [name for name in named if name not in rows] == []


def test_every_option_has_its_line():
    page = (ROOT / 'docs' / 'reference' / 'options.md').read_text()
    names = {field.name for field in dataclasses.fields(Options)} - {'planner_options'}
    assert set(re.findall(r'^### `(\w+)`', page, re.MULTILINE)) == names


def test_every_planner_is_described():
    """In a row, as ``name`` or, where several share their beginning, as ``-end``."""
    page = (ROOT / 'docs' / 'reference' / 'planners.md').read_text()
    table = '\n'.join(line for line in page.splitlines() if line.startswith('| '))
    for name in PLANNERS:
        assert {f'`{name}`', f'`-{name.rpartition("-")[2]}`'} & set(
            re.findall(r'`[\w-]+`', table)
        ), name


def test_pages_made_from_the_code_are_not_stale(capsys):
    path = ROOT / 'docs' / 'make_reference.py'
    spec = importlib.util.spec_from_file_location('make_reference', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    status = module.main(['--check'])
    assert status == 0, capsys.readouterr().out
