"""Programs that change their iterations or use the graph in unusual ways.

Every scenario (tests/support/scenarios/) gives the bits of plain Chainer after every
update, stays inside its limit, and settles as far as the program lets it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from support import networks, scenarios

from chainer_hybridmem.training.session.session import Session

QUICK = {'steps': 1000}  # it is execution that is tried here, not the search
# Options of sessions whose freed memory is poisoned and whose copies are late; each
# scenario meets one of them, in turn.
HOSTILE: list[dict[str, Any]] = [
    {'planner': 'swap-all', 'arena': False},
    {'planner': 'superneurons', 'cross_iteration': 'all'},
    {'planner': 'capuchin'},
    {'planner': 'pooch', 'arena': False, 'cross_iteration': 'states'},
    {'planner': 'swap-opt'},
]


class Outcome(NamedTuple):
    """What a session gives, and how it got there."""

    records: list[dict[str, str]]
    figures: dict[str, Any]
    history: list[dict[str, Any]]
    profiles: int


@functools.cache
def reference(name: str) -> scenarios.Run:
    """What plain Chainer gives, and the most memory it needs."""
    run = scenarios.Run(counted=True)
    scenarios.SCENARIOS[name].program(run)
    return run


def limit_of(name: str) -> int:
    return int(reference(name).peak_bytes * scenarios.SCENARIOS[name].share)


def train(name: str, options: dict[str, Any]) -> Outcome:
    run = scenarios.Run({'memory_limit': limit_of(name), **options})
    with mock.patch.object(Session, 'observe_problem') as profiled:
        scenarios.SCENARIOS[name].program(run)
    session = run.session
    figures, history = session.statistics(), networks.entries_of(session)
    return Outcome(run.records, figures, history, profiled.call_count)


@functools.cache
def undisturbed(name: str) -> Outcome:
    return train(name, QUICK)


def assert_same(name: str, outcome: Outcome) -> None:
    expected = reference(name).records
    for i, (left, right) in enumerate(zip(expected, outcome.records, strict=True)):
        assert left == right, f'record {i}'
    assert outcome.figures['footprint_bytes'] <= limit_of(name)


@pytest.mark.matrix(first=0, every=3)
@pytest.mark.parametrize('name', scenarios.SCENARIOS)
def test_same_bits_inside_the_limit(name):
    assert_same(name, undisturbed(name))


@pytest.mark.real_time  # with the threads of the package; bits are judged, no times
@pytest.mark.matrix(first=1, every=3)
@pytest.mark.parametrize('name', scenarios.SCENARIOS)
def test_poisoned_memory_and_late_copies_change_nothing(name, hostile):
    options = HOSTILE[list(scenarios.SCENARIOS).index(name) % len(HOSTILE)]
    assert_same(name, train(name, options))


@pytest.mark.matrix(first=2, every=3)
@pytest.mark.parametrize('name', scenarios.SCENARIOS)
def test_it_settles(name):
    """Who names a planner has every kind of iteration planned."""
    scenario = scenarios.SCENARIOS[name]
    outcome = train(name, {'planner': 'hybrid', **QUICK})
    if scenario.signatures is not None:
        kinds = scenario.signatures  # each is profiled once more at most
        assert kinds <= outcome.profiles <= 2 * kinds
    if scenario.deviations is not None:
        assert outcome.figures['deviations'] <= scenario.deviations
    late = outcome.history[-len(outcome.history) // 3 :]
    if scenario.steady:
        assert all(entry['guided'] for entry in late)
        if not scenario.evictions:
            assert not any(entry['evictions'] + entry['restores'] for entry in late)


def test_what_functions_write_over_is_not_recomputed():
    run = scenarios.Run({'memory_limit': limit_of('in_place_functions')})
    scenarios.SCENARIOS['in_place_functions'].program(run)
    profile = run.session.profile
    exact = {
        profile.operations[recipe.operation].label.rpartition('/')[2]
        for recipe in profile.recipes
        if recipe.exact
    }
    assert 'ReLU' in exact
    assert not {'Sigmoid', 'Negate', 'Tanh', 'Scale', 'Same'} & exact


def test_digests_see_every_bit():
    zero = np.zeros(3, np.float32)
    others = [np.float32([0, -0.0, 0]), zero[:2], zero.view(np.int32), zero[:, None]]
    digests = {scenarios.digest(array) for array in (zero, *others)}
    assert len(digests) == 1 + len(others)
