"""Planners of other packages: found, used, and never in the way of ours."""

from __future__ import annotations

import collections
import configparser
import importlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

import pytest
from support import toys

from chainer_hybridmem import commands
from chainer_hybridmem.errors import OptionError, PlanError, UnknownNameError
from chainer_hybridmem.planning.planners import (
    PLANNERS,
    check_name,
    find_planner,
    make_plan,
    names,
    options_of,
    registry,
)
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.testing.planners import problem_named

Install = Callable[..., None]

LIMIT = 51 * toys.MIB
FENCE = r'```(\w+)(?: [\w.]+)?\n(.*?)```'
DOCS = pathlib.Path(__file__).parents[2] / 'docs/reference/writing_a_planner.md'
WORKING = """
from chainer_hybridmem.planning.search.candidates import SWAP, Search

def lazy(problem, limit_bytes, patience=1):
    search = Search(problem, limit_bytes)
    candidate = search.evaluate(search.fill(SWAP))
    return search.finish('lazy', candidate, patience=patience)
"""
# Believes that it has twice the memory.
TOO_LARGE = """
from chainer_hybridmem.planning.planners import make_plan

def lazy(problem, limit_bytes):
    return make_plan(problem, 2 * limit_bytes, 'in-core')
"""
NONSENSE = 'def lazy(problem, limit_bytes):\n    return "keep everything"\n'
ODD = 'def lazy(problem, limit_bytes):\n    raise ZeroDivisionError("odd")\n'


@pytest.fixture
def install(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Install]:
    """Puts a package on the path: a module, and the entry points it declares."""

    def make(source: str, module: str = 'foo_planner', **entries: str) -> None:
        (tmp_path / f'{module}.py').write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)
        folder = tmp_path / f'{module}-1.0.dist-info'
        folder.mkdir()
        (folder / 'METADATA').write_text(f'Name: {module}\nVersion: 1.0\n')
        lines = [f'{name} = {value}' for name, value in entries.items()]
        text = '\n'.join([f'[{registry.GROUP}]', *lines])
        (folder / 'entry_points.txt').write_text(text)
        forget()

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    monkeypatch.undo()
    forget()


def forget() -> None:
    importlib.invalidate_caches()
    registry.found.cache_clear()
    registry.load.cache_clear()


def compared(tmp_path: pathlib.Path, *planners: str) -> list[dict[str, object]]:
    library.save(toys.chain(), str(tmp_path / 'p.json'))
    named = ('--planner', *planners) if planners else ()
    figures = str(tmp_path / 'c.json')
    line = ['compare', str(tmp_path / 'p.json'), '--memory-limit', '60%', *named]
    assert commands.main([*line, '--json', figures]) == 0
    return json.loads(pathlib.Path(figures).read_text())


def test_it_is_found_after_ours(install: Install) -> None:
    install(WORKING, lazy='foo_planner:lazy')
    assert names() == [*PLANNERS, 'lazy']
    assert check_name('lazy') == 'lazy'
    with pytest.raises(UnknownNameError, match=r"Did you mean 'lazy'\?.*, lazy\."):
        check_name('lasy')


def test_it_plans_and_its_plan_has_the_bound(install: Install) -> None:
    install(WORKING, lazy='foo_planner:lazy')
    plan = make_plan(toys.chain(), LIMIT, 'lazy')
    ours = make_plan(toys.chain(), LIMIT, 'swap-all')
    assert (plan.planner, plan.options) == ('lazy', {'patience': 1})
    assert plan.predicted_seconds == ours.predicted_seconds
    assert plan.lower_bound_seconds == ours.lower_bound_seconds


def test_its_plans_have_the_name_that_it_is_asked_for_by(install: Install) -> None:
    install(WORKING, **{'lazy-one': 'foo_planner:lazy'})
    assert make_plan(toys.chain(), LIMIT, 'lazy-one').planner == 'lazy-one'


def test_its_options_are_checked(install: Install) -> None:
    install(WORKING, lazy='foo_planner:lazy')
    assert options_of('lazy') == ['patience']
    plan = make_plan(toys.chain(), LIMIT, 'lazy', patience=3)
    assert plan.options == {'patience': 3}
    with pytest.raises(OptionError, match="'lazy' has no option 'steps'; it has pati"):
        make_plan(toys.chain(), LIMIT, 'lazy', steps=3)


def test_the_command_line_knows_it(install: Install, tmp_path: pathlib.Path) -> None:
    install(WORKING, lazy='foo_planner:lazy')
    rows = compared(tmp_path)
    assert [row['planner'] for row in rows][-1] == 'lazy'
    plan_path = str(tmp_path / 'plan.json')
    line = ['plan', str(tmp_path / 'p.json'), '--memory-limit', '60%']
    line += ['--planner', 'lazy', '--option', 'patience=2', '-o', plan_path]
    assert commands.main(line) == 0
    plan = library.load_plan(plan_path)
    assert (plan.planner, plan.options) == ('lazy', {'patience': 2})


def test_a_broken_import_matters_only_when_it_is_used(
    install: Install, tmp_path: pathlib.Path
) -> None:
    install('import no_such_module', lazy='foo_planner:lazy')
    assert 'lazy' in names()
    assert isinstance(make_plan(toys.chain(), LIMIT, 'swap-all'), Plan)
    why = "'lazy' is an entry point to foo_planner:lazy, which cannot be imported"
    with pytest.raises(OptionError, match=f'{why}: ModuleNotFoundError: .*module'):
        make_plan(toys.chain(), LIMIT, 'lazy')
    ours, lazy = compared(tmp_path, 'swap-all', 'lazy')
    assert ours['fits'] and not lazy['fits']
    assert why in str(lazy['reason'])


def test_a_broken_import_does_not_stop_a_time_budget(
    install: Install, tmp_path: pathlib.Path
) -> None:
    install('import no_such_module', lazy='foo_planner:lazy')
    rows = compared(tmp_path, 'lazy', 'hybrid', '--time-budget', '1')
    assert [row['fits'] for row in rows] == [False, True]


def test_what_is_no_function_is_refused(install: Install) -> None:
    install('lazy = 3', lazy='foo_planner:lazy')
    with pytest.raises(OptionError, match='foo_planner:lazy, which is no function'):
        find_planner('lazy')


@pytest.mark.parametrize(
    ('source', 'message'),
    [
        (NONSENSE, "returned 'keep everything'; a Plan was expected"),
        (TOO_LARGE, 'limit'),
    ],
)
def test_what_it_returns_is_checked(
    install: Install, tmp_path: pathlib.Path, source: str, message: str
) -> None:
    install(source, lazy='foo_planner:lazy')
    with pytest.raises(PlanError, match=message):
        make_plan(toys.chain(), LIMIT, 'lazy')
    lazy, ours = compared(tmp_path, 'lazy', 'swap-all')
    assert ours['fits'] and lazy['failed'] and not lazy['fits']
    assert str(lazy['reason']).startswith("Planner 'lazy' (foo_planner:lazy)")


def test_its_bugs_cost_one_row(install: Install, tmp_path: pathlib.Path) -> None:
    install(ODD, lazy='foo_planner:lazy')
    with pytest.raises(PlanError, match='failed: ZeroDivisionError: odd') as caught:
        make_plan(toys.chain(), LIMIT, 'lazy')
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    lazy, ours = compared(tmp_path, 'lazy', 'swap-all')
    assert ours['fits'] and lazy['failed']


DECLARED = (
    """
from chainer_hybridmem.planning.planners import Planner
from chainer_hybridmem.planning.search.planner_options import POSITIVE
"""
    + WORKING
    + """
LAZY = Planner('lazy', lazy, options={'patience': POSITIVE}, quick=True)
"""
)


def test_an_entry_point_may_declare_traits_and_options(install: Install) -> None:
    install(DECLARED, lazy='foo_planner:LAZY')
    planner = find_planner('lazy')
    assert planner.quick and not planner.acts_always
    plan = make_plan(toys.chain(), LIMIT, 'lazy', patience=2)
    assert plan.options == {'patience': 2}
    with pytest.raises(OptionError, match='patience must be above zero; 0 was given'):
        make_plan(toys.chain(), LIMIT, 'lazy', patience=0)


def test_ours_stay_what_they_are(install: Install) -> None:
    install(NONSENSE, hybrid='foo_planner:lazy')
    assert names() == list(PLANNERS)
    assert find_planner('hybrid') is PLANNERS['hybrid']


def test_of_two_with_one_name_the_first_is_taken(install: Install) -> None:
    install(NONSENSE, module='z_planner', lazy='z_planner:lazy')
    install(WORKING, module='a_planner', lazy='a_planner:lazy')
    assert make_plan(toys.chain(), LIMIT, 'lazy').planner == 'lazy'


def test_the_example_of_the_documentation_runs(install: Install) -> None:
    text = DOCS.read_text()
    blocks: dict[str, str] = collections.defaultdict(str)
    for language, block in re.findall(FENCE, text, re.DOTALL):
        blocks[language] += block
    setup = configparser.ConfigParser()
    setup.read_string(blocks['ini'])
    declared = setup['options.entry_points'][registry.GROUP]
    name, value = declared.strip().split(' = ')
    module = setup['options']['py_modules']
    entries = {name: value, f'{name}-quick': f'{module}:{name.upper()}'}
    install(blocks['python'], module, **entries)
    for seed in range(3):
        profile = toys.random_graph(seed)
        plan = make_plan(profile, '1GiB', name)
        assert plan.overhead == 0
    plan = make_plan(toys.chain(), LIMIT, name, rounds=3)
    swapped = make_plan(toys.chain(), LIMIT, 'swap-all')
    assert plan.options == {'rounds': 3}
    assert plan.predicted_seconds < swapped.predicted_seconds
    with pytest.raises(OptionError, match='rounds'):
        make_plan(toys.chain(), LIMIT, f'{name}-quick', rounds=0)
    suite = importlib.import_module(module).TestGreedy()
    suite.test_plans_keep_the_limit(name, problem_named('chain'), {})
