"""What every planner must do, as tests."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning.planners import (
    PLANNERS,
    Planner,
    check_name,
    find_planner,
    make_plan,
)
from chainer_hybridmem.planning.planners.planner import PlannerFunction
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.plan_file import parse_plan, serialise_plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.profile_file import serialise_profile
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate
from chainer_hybridmem.testing.networks import (
    MIB,
    Node,
    network,
    random_network,
    with_persistent,
)


def chain(layers: int, bandwidth: float = 10.0 * MIB) -> Profile:
    """Each layer reads the one before; so does its backward, and its own output."""
    nodes = (
        Node(parents=((i - 1, 0),) if i else (), reads_outputs=True)
        for i in range(layers)
    )
    return network(tuple(nodes), bandwidth)


PROFILES: dict[str, Callable[[], Profile]] = {
    'chain': lambda: chain(6),
    'slow link': lambda: chain(7, bandwidth=2.0 * MIB),
    **{
        f'network {seed}': functools.partial(random_network, seed, 7)
        for seed in (1, 3, 6, 14, 16)
    },
    'AlexNet': lambda: library.load_profile('shipped:alexnet-b32-host'),
}
FEW_MAPS = 20  # more take long to plan: fewer limits are tried
SEARCHED = 0, 20  # seed and nodes of a network that takes long to search


@functools.cache
def problem_named(name: str) -> Problem:
    """The problem of one of :data:`PROFILES`; the same one each time."""
    return make_problem(PROFILES[name]())


def limits_of(problem: Problem) -> list[int]:
    """From the least possible to one byte less than in-core training needs."""
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    rng = random.Random(least)
    count = 3 if len(problem.maps) <= FEW_MAPS else 0
    between = [rng.randint(least, max(least, most - 1)) for _ in range(count)]
    return sorted({least, *between, max(least, most - 1)})


def plan_within(
    problem: Problem | Profile, limit_bytes: int, name: str, **options: Any
) -> Plan | None:
    """Plans, and checks what every plan promises.

    Args:
        problem: What to plan.
        limit_bytes: Memory limit.
        name: Of the planner.
        options: Of :func:`chainer_hybridmem.make_plan`.

    Returns:
        Plan or None: None if the planner refuses, with the error for that.

    Raises:
        AssertionError: If the plan does not keep a promise.
        PlanError: If it cannot be executed.
    """
    try:
        plan = make_plan(problem, limit_bytes, name, **options)
    except InfeasibleError as error:
        check_refusal(error, limit_bytes)
        return None
    profile = problem.profile if isinstance(problem, Problem) else problem
    loads = check_plan(profile, plan, limit_bytes)
    timeline = simulate(problem, plan)
    assert max(loads) == timeline.peak_bytes == plan.predicted_peak_bytes
    assert timeline.total_seconds == pytest.approx(plan.predicted_seconds)
    assert plan.lower_bound_seconds <= plan.predicted_seconds * (1 + 1e-9)
    assert plan.in_core_seconds == pytest.approx(profile.compute_seconds)
    assert plan.memory_limit_bytes == limit_bytes
    assert parse_plan(serialise_plan(plan)) == plan, 'its file has another plan'
    return plan


def check_refusal(error: InfeasibleError, limit_bytes: int) -> None:
    """Checks that an error says which limit is too small, and what is needed.

    Raises:
        AssertionError: If it does not.
    """
    assert error.limit_bytes == limit_bytes
    assert error.requested_bytes > limit_bytes
    for nbytes in (error.requested_bytes, limit_bytes):
        assert f'{nbytes} bytes' in str(error), 'the error has no such number'


class PlannerConformance:
    """What every planner must do: a class derived from this one gives the planner.

    >>> class TestGreedy(PlannerConformance):
    ...     @pytest.fixture
    ...     def planner(self):  # a function, a Planner, or an installed one's name
    ...         return greedy

    A fixture ``options`` gives options without which the planner does nothing useful,
    and a fixture ``problem`` other profiles; see docs/reference/writing_a_planner.md.

    Attributes:
        overtime_seconds (float): CPU seconds that a planner with ``time_budget`` may
            take beyond it, for what it cannot break off.
    """

    overtime_seconds = 1.0

    # -- what is tested ---------------------------------------------------------
    @pytest.fixture
    def planner(self) -> str | Planner | PlannerFunction:
        """The planner: its function, a ``Planner``, or the name of an installed one.

        A function has its own name as a planner; what is installed is not asked for it.
        """
        raise NotImplementedError('a class derived from this one gives the planner')

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """Options without which the planner does nothing useful, or takes long."""
        return {}

    @pytest.fixture
    def name(
        self,
        planner: str | Planner | PlannerFunction,
        monkeypatch: pytest.MonkeyPatch,
    ) -> str:
        """What the planner is asked for by, during one test.

        Raises:
            OptionError: If one of the package's planners has this name.
        """
        return register(planner, monkeypatch)

    @pytest.fixture(params=list(PROFILES))
    def problem(self, request: pytest.FixtureRequest) -> Problem:
        """Each profile in turn: small networks, and a recorded one."""
        return problem_named(request.param)

    # -- plans ------------------------------------------------------------------
    def test_plans_keep_the_limit(
        self, name: str, problem: Problem, options: dict[str, Any]
    ) -> None:
        """At every moment, as the independent checker sees it; as fast as it says."""
        for limit_bytes in limits_of(problem):
            plan_within(problem, limit_bytes, name, **options)

    def test_one_byte_too_little_for_any_plan(
        self, name: str, problem: Problem, options: dict[str, Any]
    ) -> None:
        """The error names operation, bytes and the smallest limit."""
        least, worst = least_memory(problem)
        with pytest.raises(InfeasibleError) as caught:
            make_plan(problem, least - 1, name, **options)
        check_refusal(caught.value, least - 1)
        message = str(caught.value)
        label = problem.profile.operations[worst].label
        assert f'Operation {worst} ({label})' in message
        assert f'least memory of any plan is {least} bytes' in message
        assert caught.value.requested_bytes == least
        assert make_plan(problem, least, 'swap-all').predicted_peak_bytes == least

    def test_what_fits_is_kept(self, name: str, options: dict[str, Any]) -> None:
        """At 100 % of the in-core peak; a planner that always acts fits at least."""
        problem = problem_named('network 6')
        plan = plan_within(problem, problem.in_core_peak_bytes, name, **options)
        assert plan is not None, 'there is no plan although everything fits'
        if find_planner(name).acts_always:
            return
        assert plan.count(Action.KEEP) == len(plan.maps) == len(problem.maps)
        assert plan.replays == ()
        assert plan.predicted_peak_bytes == problem.in_core_peak_bytes
        assert plan.predicted_seconds == pytest.approx(plan.in_core_seconds)

    @pytest.mark.parametrize('cross_iteration', ['states', True])
    def test_what_crosses_iterations(
        self, name: str, options: dict[str, Any], cross_iteration: Any
    ) -> None:
        """Parameters and states leave too, if they may; nothing makes them again."""
        profile = with_persistent(problem_named('network 6').profile, 1)
        problem = make_problem(profile, cross_iteration)
        least, most = least_memory(problem)[0], problem.in_core_peak_bytes
        assert least < least_memory(make_problem(profile))[0]
        for limit_bytes in (least, (least + most) // 2):
            plan = plan_within(problem, limit_bytes, name, **options)
            if plan is not None:
                assert {e.storage for e in plan.maps} == {s.id for s in problem.maps}

    @pytest.mark.parametrize('layers', [0, 1])
    def test_next_to_nothing_to_plan(
        self, name: str, options: dict[str, Any], layers: int
    ) -> None:
        """One operation, and only the update."""
        problem = make_problem(chain(layers))
        assert len(problem.profile.operations) == 2 * layers + 1
        plan = plan_within(problem, 100 * MIB, name, **options)
        assert plan is not None and len(plan.maps) == layers

    def test_a_profile_without_feature_maps(
        self, name: str, options: dict[str, Any]
    ) -> None:
        """Its peak is what it needs, and nothing can be done about it."""
        problem = make_problem(network([Node((), reads_inputs=False)]))
        peak_bytes = problem.in_core_peak_bytes
        plan = plan_within(problem, peak_bytes, name, **options)
        assert plan is not None and (plan.maps, plan.replays) == ((), ())
        with pytest.raises(InfeasibleError):
            make_plan(problem, peak_bytes - 1, name, **options)

    # -- planning ---------------------------------------------------------------
    def test_planning_is_deterministic(
        self, name: str, options: dict[str, Any]
    ) -> None:
        """With its default seed, or any other, if it has one."""
        problem = problem_named('network 6')
        limit_bytes = limits_of(problem)[-1]
        seeds: list[dict[str, int]] = [{}]
        if 'seed' in find_planner(name).defaults:
            seeds.append({'seed': 3})
        for seed in seeds:
            plans = [
                plan_within(problem, limit_bytes, name, **{**options, **seed})
                for _ in range(2)
            ]
            first, second = (
                plan and dataclasses.replace(plan, planning_seconds=0.0)
                for plan in plans
            )
            assert first == second

    def test_profile_and_problem_stay_as_they_are(
        self, name: str, options: dict[str, Any]
    ) -> None:
        """Others plan the same problem afterwards."""
        profile = random_network(6, 7)
        problem = make_problem(profile)
        limit_bytes = limits_of(problem)[-1]
        text, arrays = serialise_profile(profile), copy.deepcopy(problem.arrays)
        plan_within(problem, limit_bytes, name, **options)
        assert serialise_profile(profile) == text
        for field in dataclasses.fields(arrays):
            before, now = (getattr(a, field.name) for a in (arrays, problem.arrays))
            assert np.array_equal(now, before), f'it has written into {field.name}'

    def test_options_are_declared(self, name: str, options: dict[str, Any]) -> None:
        """Each has a name and a default; others are refused."""
        planner = find_planner(name)
        _, _, *parameters = inspect.signature(planner.function).parameters.values()
        for parameter in parameters:
            assert parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ), f'{parameter} takes options of any name'
            assert parameter.default is not parameter.empty, (
                f'{parameter.name}: no default'
            )
        assert set(planner.options) <= set(planner.defaults)
        assert planner.check_options(options).keys() == options.keys()
        with pytest.raises(OptionError, match=rf'{name!r} has no option .no_such'):
            make_plan(problem_named('chain'), '1GiB', name, no_such_option=1)

    def test_the_time_budget_is_kept(self, name: str, options: dict[str, Any]) -> None:
        """In CPU seconds, so that other programs on the machine are no matter."""
        if 'time_budget' not in find_planner(name).defaults:
            pytest.skip('it has no time_budget')
        problem = make_problem(random_network(*SEARCHED))
        limit_bytes = (least_memory(problem)[0] + problem.in_core_peak_bytes) // 2
        budget_seconds = 0.2
        chosen = {**options, 'time_budget': budget_seconds}
        make_plan(problem, limit_bytes, name, **chosen)  # compiles, finds the bound
        began = time.process_time()
        plan_within(problem, limit_bytes, name, **chosen)
        took_seconds = time.process_time() - began
        assert took_seconds <= budget_seconds + self.overtime_seconds


def register(
    planner: str | Planner | PlannerFunction, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Makes a planner one that can be asked for by name, until the test has ended.

    Returns:
        str: Its name.

    Raises:
        OptionError: If one of the package's planners has this name.
        UnknownNameError: If it is a name, and no planner has it.
    """
    if isinstance(planner, str):
        return check_name(planner)
    name = planner.name if isinstance(planner, Planner) else planner.__name__
    if name in PLANNERS:
        raise OptionError(f'{name!r} is a planner of the package; take another name.')
    monkeypatch.setitem(PLANNERS, name, planner)
    return name
