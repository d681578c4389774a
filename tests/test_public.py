"""The public names, what importing costs, and how errors behave."""

from __future__ import annotations

import inspect
import os
import pathlib
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
from support import toys

import chainer_hybridmem as hybridmem
from chainer_hybridmem import errors, testing

PURE = (
    'files', 'units', 'planning.records.profile', 'planning.records.plan',
    'planning.records.library', 'planning.records.validation', 'planning.simulation',
    'planning.planners',
)  # fmt: skip


def run(code: str) -> str:
    root = str(pathlib.Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, '-c', code],
        env={**os.environ, 'PYTHONPATH': root},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_pure_floor_imports_neither_chainer_nor_cupy() -> None:
    """Usable on a laptop with somebody else's profile."""
    names = ', '.join(f'chainer_hybridmem.{name}' for name in PURE)
    code = f'import sys, chainer_hybridmem, {names}; '
    code += "print(sorted({'chainer', 'cupy', 'matplotlib'} & set(sys.modules)))"
    assert run(code) == '[]'


def test_the_package_alone_imports_no_compiler() -> None:
    code = "import sys, chainer_hybridmem; print({'numba', 'numpy'} & set(sys.modules))"
    assert run(code) == 'set()'


def test_the_suites_for_others_need_no_chainer_and_only_they_need_pytest() -> None:
    code = 'import sys; from chainer_hybridmem.testing import networks; '
    code += "print('pytest' in sys.modules); from chainer_hybridmem.testing import *; "
    code += "print({'chainer', 'cupy', 'hypothesis'} & set(sys.modules))"
    assert run(code).split('\n') == ['False', 'set()']
    assert testing.PlannerConformance.__name__ in testing.__all__
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        testing.no_such_name  # noqa: B018


def test_public_names() -> None:
    assert set(hybridmem.__all__) <= set(dir(hybridmem))
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        hybridmem.no_such_name  # noqa: B018
    for name in ('load_plan', 'load_profile', 'make_plan', 'simulate'):
        assert inspect.getdoc(getattr(hybridmem, name))


def test_from_profile_to_timeline(tmp_path: pathlib.Path) -> None:
    """What a program does with a profile from another machine."""
    profile_path, plan_path = tmp_path / 'p.json', str(tmp_path / 'plan.json')
    hybridmem.save(toys.chain(), profile_path)
    profile = hybridmem.load_profile(profile_path)
    plan = hybridmem.make_plan(profile, '45MiB', planner='swap-opt')
    hybridmem.save(plan, plan_path)
    assert hybridmem.load_plan(plan_path) == plan
    timeline = hybridmem.simulate(profile, hybridmem.load_plan(plan_path))
    assert timeline.total_seconds == pytest.approx(21.1)
    with pytest.raises(hybridmem.InfeasibleError):
        hybridmem.make_plan(profile, '44MiB')


def test_what_is_saved_is_read_again_by_the_function_of_its_kind() -> None:
    """Each of the files has a public name that reads and one that writes it."""
    kinds = {name.removeprefix('load_') for name in hybridmem.__all__ if 'load' in name}
    assert kinds == {'profile', 'plan', 'timeline'} and 'save' in hybridmem.__all__
    assert 'timeline' in hybridmem.Session.__dict__


@pytest.mark.parametrize('item', [None, 'p.json', {'format': 'x'}])
def test_what_cannot_be_saved(item: Any, tmp_path: pathlib.Path) -> None:
    """A session has no plan yet: session.plan is None."""
    path = tmp_path / 'x.json'
    with pytest.raises(hybridmem.OptionError, match='cannot be saved; .*plan'):
        hybridmem.save(item, path)
    assert not path.exists()


def test_results_are_shown_in_a_line() -> None:
    """A notebook shows what a cell ends with; a profile has a million characters."""
    profile = hybridmem.load_profile('shipped:lstm-b128-host')
    plan = hybridmem.make_plan(profile, '60%', 'swap-all')
    import chainer

    model = chainer.links.Linear(2)
    shown = [
        repr(item)
        for item in (
            profile,
            plan,
            hybridmem.simulate(profile, plan),
            hybridmem.optimize(model, '8G'),
            hybridmem.HybridMemory('8G'),
            hybridmem.optimize_inference(model, '8G'),
        )
    ]
    for text in shown:
        assert re.fullmatch(r'<\w+.*>', text) and 20 < len(text) < 120, text
    assert 'swap-all' in shown[1] and ' 195 swap' in shown[1]
    assert 'memory limit 8.0 GiB; warm-up after 0 iterations' in shown[3]


def every_error() -> list[type[Exception]]:
    return [
        error
        for _, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, Exception)
    ]


@pytest.mark.parametrize('error', every_error())
def test_errors_are_public(error: type[Exception]) -> None:
    assert error.__name__ in hybridmem.__all__
    assert getattr(hybridmem, error.__name__) is error


def test_errors_need_no_chainer() -> None:
    names = ', '.join(error.__name__ for error in every_error())
    code = f'import sys; from chainer_hybridmem import {names}; '
    assert run(code + "print('chainer' in sys.modules)") == 'False'


@pytest.mark.parametrize('error', every_error())
def test_errors_have_one_root_and_pickle(error: type[Exception]) -> None:
    assert issubclass(error, hybridmem.HybridMemoryError)
    again = pickle.loads(pickle.dumps(error('what happened')))
    assert type(again) is error
    assert str(again) == 'what happened'


def test_out_of_memory_is_a_memory_error_with_numbers() -> None:
    error = errors.InfeasibleError('no room', 30, 20, 10)
    assert isinstance(error, MemoryError)
    again = pickle.loads(pickle.dumps(error))
    numbers = (again.requested_bytes, again.limit_bytes, again.used_bytes)
    assert numbers == (30, 20, 10)
