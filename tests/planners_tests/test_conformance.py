"""Every planner of the package passes the suite for planners, and more."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError, OptionError, UnknownNameError
from chainer_hybridmem.planning.planners import PLANNERS, find_planner, make_plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.testing import PlannerConformance
from chainer_hybridmem.testing.planners import PROFILES, limits_of, problem_named

MIB = toys.MIB
# Planners that cannot run, or run for long, without being told something.
OPTIONS: dict[str, dict[str, Any]] = {
    'exact': {'time_budget': 0.5},
    'autoswap-bo': {'evaluations': 10},  # the last two by regression
}

every_planner = pytest.mark.parametrize('name', list(PLANNERS))


NETWORKS: dict[str, Callable[[], Profile]] = {
    **PROFILES,
    'convolutions': lambda: toys.chain(8, function='Convolution2DFunction'),
    'residual': lambda: toys.graph(
        [[], [0], [1], [0, 2], [3], [4], [3, 5], [6]],
        seconds=[1.0, 0.1, 0.1, 0.2, 1.0, 0.1, 0.2, 2.0],
        transient=[False, True, False, False, True, False, False, False],
    ),
    **{f'graph {s}': functools.partial(toys.random_graph, s) for s in range(3)},
}


@functools.cache
def problem_of(network: str) -> Problem:
    """Planners share it as in ``compare``, which finds the bound once for a limit."""
    if network in PROFILES:
        return problem_named(network)
    return make_problem(NETWORKS[network]())


@pytest.mark.matrix
class TestOurs(PlannerConformance):
    """Each planner of the registry, on more networks than the suite brings."""

    @pytest.fixture(params=list(PLANNERS))
    def planner(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def options(self, planner: str) -> dict[str, Any]:
        return OPTIONS.get(planner, {})

    @pytest.fixture(params=list(NETWORKS))
    def problem(self, request: pytest.FixtureRequest) -> Problem:
        return problem_of(request.param)


def test_a_problem_has_to_be_asked_before() -> None:
    profile = toys.with_persistent(toys.chain(), 1)
    problem = make_problem(profile, cross_iteration='states')
    with pytest.raises(OptionError, match='give it to make_problem'):
        make_plan(problem, 2**40, cross_iteration='all')
    with pytest.raises(OptionError, match="'parameters'; False, True, 'states'"):
        make_problem(profile, cross_iteration='parameters')


SCRIPT = """
import dataclasses
from support import toys
from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.planning.planners import PLANNERS, make_plan
from chainer_hybridmem.planning.records.plan_file import serialise_plan
from chainer_hybridmem.planning.records.profile_file import serialise_profile
profile = toys.random_network(6, 7)
print(serialise_profile(profile))
for name in PLANNERS:
    try:
        plan = make_plan(profile, limit, name)
    except (InfeasibleError, TypeError) as error:
        print(error)
    else:
        print(serialise_plan(dataclasses.replace(plan, planning_seconds=0.0)))
"""


def run_here(limit: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(SCRIPT, {'limit': limit})
    return out.getvalue()


def run_elsewhere(limit: int, hash_seed: str) -> str:
    here = pathlib.Path(__file__).parents[1]
    path = os.pathsep.join([str(here), str(here.parent)])
    env = {**os.environ, 'PYTHONHASHSEED': hash_seed, 'PYTHONPATH': path}
    done = subprocess.run(
        [sys.executable, '-W', 'error', '-c', f'limit = {limit}\n{SCRIPT}'],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_process_with_another_hash_seed_plans_the_same() -> None:
    """And no import or compilation warns."""
    limit = limits_of(problem_of('network 6'))[-1]
    hash_seed = '1' if os.environ.get('PYTHONHASHSEED') != '1' else '2'
    first, second = run_here(limit), run_elsewhere(limit, hash_seed)
    assert first == second
    assert first.count('"chainer_hybridmem/plan"') >= 4


@every_planner
def test_every_option_is_checked(name: str) -> None:
    planner = find_planner(name)
    assert planner.source, 'Planner(source=...) says where it is published'
    assert planner.options.keys() == planner.defaults.keys(), 'Planner(options=...)'


def test_a_planner_that_needs_more_than_swap_all_says_so() -> None:
    profile = toys.chain()
    with pytest.raises(InfeasibleError) as caught:
        make_plan(profile, 60 * MIB, 'in-core')
    message = str(caught.value)
    for part in (
        "Planner 'in-core'",
        '89128960',
        '62914560',
        "'swap-all' has a plan from",
    ):
        assert part in message
    assert '47185920 bytes' in message


@pytest.mark.parametrize('limit', ['', 'much', '12 parsecs', 0, -1, '0GiB', 2**70])
def test_limits_that_are_none(limit: Any) -> None:
    with pytest.raises(OptionError, match='memory_limit'):
        make_plan(toys.chain(2), limit, 'swap-all')


def test_unknown_names_are_refused_with_a_hint() -> None:
    with pytest.raises(UnknownNameError, match=r"'poch'.*Did you mean 'pooch'\?"):
        make_plan(toys.chain(2), '1GiB', 'poch')


def test_a_problem_is_as_good_as_its_profile() -> None:
    profile = toys.chain()
    of_profile, of_problem = (
        make_plan(p, 85 * MIB) for p in (profile, make_problem(profile))
    )
    assert of_profile.maps == of_problem.maps


def test_a_limit_may_be_text() -> None:
    assert make_plan(toys.chain(), '85MiB').memory_limit_bytes == 85 * MIB


def test_a_limit_in_percent_is_a_share_of_the_in_core_peak() -> None:
    profile = toys.chain()
    peak = make_problem(profile).in_core_peak_bytes
    plan = make_plan(profile, '70%')
    assert plan.memory_limit_bytes == int(0.7 * peak)
    assert plan.maps == make_plan(profile, int(0.7 * peak)).maps
