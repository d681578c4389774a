"""How much of a matrix of cases runs: a cover of it, or all of it.

A test with the mark ``matrix`` runs in as many of its cases as have each value of each
axis (each ``parametrize``) at least once; ``matrix(every=4, first=1)`` in each fourth
of those, from the second on: tests that share an axis share it out.
``HYBRIDMEM_MATRICES=full`` has all of them run, as ``make test-all`` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import pytest

DEFAULTS = {'first': 0, 'every': 1}
FULL = os.environ.get('HYBRIDMEM_MATRICES') == 'full'


def several(count: int, all_of_them: int) -> int:
    """How many drawn cases to look at."""
    return all_of_them if FULL else count


def select(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those of the collected tests that do not run now."""
    if FULL:
        return []
    matrices: dict[tuple[object, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker('matrix'):
            matrices.setdefault((item.parent, item.originalname), []).append(item)
    left: list[pytest.Item] = []
    for cases in matrices.values():
        mark = cases[0].get_closest_marker('matrix')
        assert mark is not None
        first, every = (mark.kwargs.get(name, n) for name, n in DEFAULTS.items())
        kept = set(cover([_axes_of(item) for item in cases])[first::every])
        left += [item for number, item in enumerate(cases) if number not in kept]
    return left


def cover(cases: Sequence[Iterable[tuple[str, int]]]) -> list[int]:
    """Numbers of cases that have every value of every axis at least once.

    Each time it is the case with the most values that no case has had so far; among
    equals the one whose values have been had least often.
    """
    had: dict[tuple[str, int], int] = dict.fromkeys(
        (value for case in cases for value in case), 0
    )
    if not had:
        return list(range(len(cases)))
    chosen: list[int] = []
    while not all(had.values()):
        number = max(
            (n for n in range(len(cases)) if n not in chosen),
            key=lambda n: (
                sum(not had[value] for value in cases[n]),
                -sum(had[value] for value in cases[n]),
            ),
        )
        chosen.append(number)
        for value in cases[number]:
            had[value] += 1
    return sorted(chosen)


def _axes_of(item: pytest.Function) -> tuple[tuple[str, int], ...]:
    """The value of a case on each axis; all cases of a test have the same objects."""
    callspec = getattr(item, 'callspec', None)
    if callspec is None:
        return ()
    values = {name: id(value) for name, value in callspec.params.items()}
    axes = []
    for mark in item.iter_markers('parametrize'):
        names = mark.args[0]
        together = names.split(',') if isinstance(names, str) else names
        stripped = [name.strip() for name in together]
        axes.append((str(names), hash(tuple(values.pop(name) for name in stripped))))
    return (*axes, *values.items())  # the latter are parameters of fixtures
