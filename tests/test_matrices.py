"""What runs of a matrix by default: every value of every axis, and no more cases."""

from __future__ import annotations

import itertools

import pytest
from support.matrices import cover

pytest_plugins = ['pytester']
CONFTEST = """
from support import matrices

def pytest_collection_modifyitems(items):
    left = matrices.select(items)
    items[:] = [item for item in items if item not in left]
"""
TESTS = """
import pytest

@pytest.mark.matrix
@pytest.mark.parametrize('a', range(3))
@pytest.mark.parametrize('b, c', [(1, 2), (3, 4)])
def test_both(a, b, c): pass

@pytest.mark.matrix(first=1, every=3)
@pytest.mark.parametrize('a', range(9))
def test_some(a): pass

@pytest.mark.parametrize('a', range(4))
def test_all(a): pass
"""


@pytest.mark.parametrize('axes', [(1,), (5,), (3, 4), (23, 12), (6, 2, 5)])
def test_a_cover_has_every_value(axes: tuple[int, ...]) -> None:
    products = itertools.product(*(range(n) for n in axes))
    cases = [tuple((str(a), v) for a, v in enumerate(case)) for case in products]
    kept = cover(cases)
    assert {value for n in kept for value in cases[n]} == {v for c in cases for v in c}
    assert len(kept) == len(set(kept)) == max(axes)


def test_tests_without_arguments_run() -> None:
    assert cover([()]) == [0]


@pytest.mark.parametrize('full', [False, True])
def test_which_tests_run(
    full: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('support.matrices.FULL', full)
    pytester.makeconftest(CONFTEST)
    pytester.makeini('[pytest]\nmarkers = matrix')
    pytester.makepyfile(TESTS)
    lines = pytester.runpytest_inprocess('--collect-only', '-q').outlines
    counts = [
        sum(f'::test_{kind}[' in line for line in lines)
        for kind in ('both', 'some', 'all')
    ]
    assert counts == ([6, 9, 4] if full else [3, 3, 4])
