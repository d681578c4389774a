"""The suite for planners: others pass it, and it notices each broken rule."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chainer_hybridmem.errors import InfeasibleError, OptionError, PlanError
from chainer_hybridmem.planning.planners import Planner, make_plan
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import KEEP, SWAP, Search
from chainer_hybridmem.planning.search.planner_options import POSITIVE
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.testing import PlannerConformance
from chainer_hybridmem.testing.planners import check_refusal, problem_named, register

Change = Callable[[Plan], Plan]


def honest(problem: Problem, limit_bytes: int, seed: int = 0) -> Plan:
    """Swaps everything, unless everything fits."""
    search = Search(problem, limit_bytes)
    if search.in_core_fits():
        return search.finish_in_core('honest', seed=seed)
    return search.finish('honest', search.evaluate(search.fill(SWAP)), seed=seed)


class TestHonest(PlannerConformance):
    """A function that nobody has installed, and that is nothing but a function."""

    @pytest.fixture
    def planner(self) -> Callable[..., Plan]:
        return honest


class TestDeclared(PlannerConformance):
    """The same as a ``Planner`` with traits and an option without which it is none."""

    @pytest.fixture
    def planner(self) -> Planner:
        def declared(problem: Problem, limit_bytes: int, patience: int = 0) -> Plan:
            if not patience:
                raise OptionError('patience is 0; it must be above zero.')
            search = Search(problem, limit_bytes)
            swapped = search.evaluate(search.fill(SWAP))
            return search.finish('patient', swapped, patience=patience)

        return Planner(
            'patient', declared, options={'patience': POSITIVE}, acts_always=True
        )

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {'patience': 2}


def test_names_of_the_package_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="'hybrid' is a planner of the package"):
        register(Planner('hybrid', honest), monkeypatch)
    assert register('hybrid', monkeypatch) == 'hybrid'


NETWORK = {'problem': problem_named('network 1')}


# -- what is broken --------------------------------------------------------------
def changed(**fields: Any) -> Callable[..., Plan]:
    """A planner whose plans say something else in these fields."""
    return altered(lambda plan: dataclasses.replace(plan, **fields))


def altered(change: Change) -> Callable[..., Plan]:
    def honest_but(problem: Problem, limit_bytes: int) -> Plan:
        return change(honest(problem, limit_bytes))

    return honest_but


def released_early(plan: Plan) -> Plan:
    """The first map leaves while its copy has not even begun."""
    first, *others = plan.maps
    if first.action is Action.SWAP:
        first = dataclasses.replace(first, release_before=0)
    return dataclasses.replace(plan, maps=(first, *others))


def beyond(problem: Problem, limit_bytes: int) -> Plan:
    """Believes that it has twice the memory."""
    plan = make_plan(problem, 2 * problem.in_core_peak_bytes, 'in-core')
    return dataclasses.replace(plan, memory_limit_bytes=limit_bytes)


BROKEN_PLANS = {
    'cannot be executed': altered(released_early),
    'exceeds the limit': beyond,
    'predicts less time': altered(
        lambda plan: dataclasses.replace(
            plan, predicted_seconds=0.9 * plan.predicted_seconds
        )
    ),
    'predicts less memory': altered(
        lambda plan: dataclasses.replace(
            plan, predicted_peak_bytes=plan.predicted_peak_bytes - 1
        )
    ),
    'is faster than its bound': altered(
        lambda plan: dataclasses.replace(
            plan, lower_bound_seconds=1.1 * plan.predicted_seconds
        )
    ),
    'has other seconds in-core': changed(in_core_seconds=1e-9),
    'is for another limit': changed(memory_limit_bytes=1),
    'is for another profile': changed(profile_fingerprint='0'),
    'has options that JSON changes': changed(options={'rounds': (1, 2)}),
}


@pytest.mark.parametrize('what', BROKEN_PLANS)
def test_a_plan_is_wrong(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each breaks a promise that ``honest`` keeps."""
    name = register(Planner('it', BROKEN_PLANS[what]), monkeypatch)
    with pytest.raises((AssertionError, PlanError)):
        PlannerConformance().test_plans_keep_the_limit(name, options={}, **NETWORK)


def test_the_planner_that_they_are_made_of_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = register(Planner('it', altered(lambda plan: plan)), monkeypatch)
    suite = PlannerConformance()
    suite.test_plans_keep_the_limit(name, options={}, **NETWORK)


@pytest.mark.parametrize(
    'error',
    [
        InfeasibleError('It does not fit: 20 bytes are needed, 10 bytes allowed.'),
        InfeasibleError('It does not fit: 20 bytes, 10 bytes.', 20, 11),
        InfeasibleError('It does not fit: 5 bytes, 10 bytes.', 5, 10),
        InfeasibleError('It does not fit.', 20, 10),
    ],
)
def test_a_refusal_without_its_numbers(error: InfeasibleError) -> None:
    check_refusal(InfeasibleError('20 bytes do not fit 10 bytes.', 20, 10), 10)
    with pytest.raises(AssertionError):
        check_refusal(error, 10)


def keeps_all(problem: Problem, limit_bytes: int) -> Plan:
    """Says in words of its own that it has no plan."""
    if limit_bytes < problem.in_core_peak_bytes:
        raise ValueError('no')
    return honest(problem, limit_bytes)


def refuses_alone(problem: Problem, limit_bytes: int) -> Plan:
    """Does not say what is needed for any plan."""
    needed = problem.in_core_peak_bytes
    text = f'in-core needs {needed} bytes, the limit is {limit_bytes} bytes'
    raise InfeasibleError(text, needed, limit_bytes)


def always_swaps(problem: Problem, limit_bytes: int) -> Plan:
    search = Search(problem, limit_bytes)
    return search.finish('it', search.evaluate(search.fill(SWAP)))


def looks_at_the_first_map(problem: Problem, limit_bytes: int) -> Plan:
    assert problem.maps[0].nbytes
    return always_swaps(problem, limit_bytes)


def keeps_one_more_each_time() -> Callable[..., Plan]:
    made: list[Plan] = []

    def plan(problem: Problem, limit_bytes: int) -> Plan:
        search = Search(problem, limit_bytes)
        action = search.fill(SWAP)
        action[: len(made)] = KEEP
        made.append(search.finish('it', search.evaluate(action)))
        return made[-1]

    return plan


def writes_into_the_problem(problem: Problem, limit_bytes: int) -> Plan:
    plan = always_swaps(problem, limit_bytes)
    problem.arrays.first_use[0] -= 1
    return plan


def forgets_states(problem: Problem, limit_bytes: int) -> Plan:
    """Decides only about what iterations make."""
    return make_plan(problem.profile, limit_bytes, 'swap-all')


def takes_anything(problem: Problem, limit_bytes: int, **options: Any) -> Plan:
    return always_swaps(problem, limit_bytes)


def takes_one_at_least(problem: Problem, limit_bytes: int, patience: int) -> Plan:
    return always_swaps(problem, limit_bytes)


def never_ends(problem: Problem, limit_bytes: int, time_budget: float = 1.0) -> Plan:
    until = time.process_time() + 0.6
    while time.process_time() < until:
        np.sort(np.arange(1000))
    return always_swaps(problem, limit_bytes)


# Planner, test that fails, and what that is asked about beside name and options.
BROKEN: dict[str, tuple[Any, str, dict[str, Any]]] = {
    'refuses with another error': (keeps_all, 'test_plans_keep_the_limit', NETWORK),
    'does not know the least memory': (
        refuses_alone,
        'test_one_byte_too_little_for_any_plan',
        NETWORK,
    ),
    'acts although everything fits': (always_swaps, 'test_what_fits_is_kept', {}),
    'refuses what fits': (refuses_alone, 'test_what_fits_is_kept', {}),
    'leaves states out': (
        forgets_states,
        'test_what_crosses_iterations',
        {'cross_iteration': 'states'},
    ),
    'needs an operation': (
        looks_at_the_first_map,
        'test_next_to_nothing_to_plan',
        {'layers': 0},
    ),
    'refuses one operation': (
        refuses_alone,
        'test_next_to_nothing_to_plan',
        {'layers': 1},
    ),
    'needs a feature map': (
        looks_at_the_first_map,
        'test_a_profile_without_feature_maps',
        {},
    ),
    'remembers': (keeps_one_more_each_time(), 'test_planning_is_deterministic', {}),
    'writes into the problem': (
        writes_into_the_problem,
        'test_profile_and_problem_stay_as_they_are',
        {},
    ),
    'takes options of any name': (takes_anything, 'test_options_are_declared', {}),
    'has no default': (takes_one_at_least, 'test_options_are_declared', {}),
    'checks an option that it lacks': (
        Planner('it', always_swaps, options={'patience': POSITIVE}),
        'test_options_are_declared',
        {},
    ),
    'takes its time': (never_ends, 'test_the_time_budget_is_kept', {}),
}


@pytest.mark.parametrize('what', BROKEN)
def test_a_check_fails_for_a_planner_that(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, test, asked = BROKEN[what]
    if not isinstance(planner, Planner):
        planner = Planner('it', planner)
    name = register(planner, monkeypatch)
    suite = PlannerConformance()
    suite.overtime_seconds = 0.2
    with pytest.raises((AssertionError, IndexError, ValueError, PlanError)):
        getattr(suite, test)(name=name, options={}, **asked)


def test_each_check_has_failed() -> None:
    tests = {name for name in vars(PlannerConformance) if name.startswith('test_')}
    assert {test for _, test, _ in BROKEN.values()} == tests
