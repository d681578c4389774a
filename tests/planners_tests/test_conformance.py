"""One suite that every planner passes."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError, OptionError, UnknownNameError
from chainer_hybridmem.planners import PLANNERS, find_planner, make_plan
from chainer_hybridmem.records.plan import Action, Plan
from chainer_hybridmem.records.plan_file import parse_plan, serialise_plan
from chainer_hybridmem.records.profile import Profile
from chainer_hybridmem.records.validation import check_plan
from chainer_hybridmem.search.candidates import least_memory
from chainer_hybridmem.simulation import Problem, make_problem, simulate

MIB = toys.MIB
# Planners that cannot run, or run for long, without being told something.
OPTIONS: dict[str, dict[str, Any]] = {
    'exact': {'time_budget': 2.0},
    'autoswap-bo': {'evaluations': 10},  # the last two by regression
}

every_planner = pytest.mark.parametrize('name', list(PLANNERS))


def plan_with(profile: Profile | Problem, limit: int, name: str) -> Plan:
    return make_plan(profile, limit, name, **OPTIONS.get(name, {}))


def networks() -> dict[str, Profile]:
    named = {
        'chain': toys.chain(),
        'convolutions': toys.chain(8, function='Convolution2DFunction'),
        'slow link': toys.chain(7, bandwidth=2.0 * MIB),
        'residual': toys.graph(
            [[], [0], [1], [0, 2], [3], [4], [3, 5], [6]],
            seconds=[1.0, 0.1, 0.1, 0.2, 1.0, 0.1, 0.2, 2.0],
            transient=[False, True, False, False, True, False, False, False],
        ),
    }
    named.update({f'graph {s}': toys.random_graph(s) for s in range(3)})
    named.update({f'network {s}': toys.random_network(s, 7) for s in (1, 3, 6, 14, 16)})
    return named


NETWORKS = networks()
# Planners share a problem as in `compare`, which finds the bound once for each limit.
problem_of = functools.cache(lambda network: make_problem(NETWORKS[network]))
every_network = pytest.mark.parametrize('network', list(NETWORKS))


def limits(problem: Problem) -> list[int]:
    """From the least possible to one byte less than in-core training needs."""
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    rng = random.Random(least)
    between = [rng.randint(least, max(least, most - 1)) for _ in range(3)]
    return sorted({least, *between, max(least, most - 1)})


@pytest.mark.matrix
@every_network
@every_planner
def test_plans_are_valid_and_keep_the_limit(name: str, network: str) -> None:
    """At every moment, as the independent checker sees it; as fast as it says."""
    profile, problem = NETWORKS[network], problem_of(network)
    for limit in limits(problem):
        try:
            plan = plan_with(problem, limit, name)
        except InfeasibleError as error:
            assert error.limit_bytes == limit
            assert error.requested_bytes > limit
            continue
        loads = check_plan(profile, plan, limit)
        timeline = simulate(profile, plan)
        assert max(loads) == timeline.peak_bytes == plan.predicted_peak_bytes
        assert timeline.total_seconds == pytest.approx(plan.predicted_seconds)
        assert plan.lower_bound_seconds <= plan.predicted_seconds + 1e-9
        assert plan.in_core_seconds == pytest.approx(profile.compute_seconds)
        assert (plan.planner, plan.memory_limit_bytes) == (name, limit)
        assert plan.profile_fingerprint == profile.fingerprint()
        assert parse_plan(serialise_plan(plan)) == plan


@pytest.mark.matrix
@pytest.mark.parametrize('cross_iteration', ['states', True])
@every_planner
def test_plans_for_what_crosses_iterations(name: str, cross_iteration: Any) -> None:
    profile = toys.with_persistent(NETWORKS['residual'], 1)
    problem = make_problem(profile, cross_iteration)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    assert least < least_memory(make_problem(profile))[0]
    options = {**OPTIONS.get(name, {}), 'cross_iteration': cross_iteration}
    for limit in (least, (least + most) // 2):
        try:
            plan = make_plan(profile, limit, name, **options)
        except InfeasibleError:
            continue
        assert max(check_plan(profile, plan, limit)) == plan.predicted_peak_bytes
        seconds = simulate(profile, plan).total_seconds
        assert seconds == pytest.approx(plan.predicted_seconds)
        assert plan.lower_bound_seconds <= plan.predicted_seconds + 1e-9
        assert {e.storage for e in plan.maps} == {s.id for s in problem.maps}


def test_a_problem_has_to_be_asked_before() -> None:
    profile = toys.with_persistent(toys.chain(), 1)
    problem = make_problem(profile, cross_iteration='states')
    with pytest.raises(OptionError, match='give it to make_problem'):
        make_plan(problem, 2**40, cross_iteration='all')
    with pytest.raises(OptionError, match="'parameters'; False, True, 'states'"):
        make_problem(profile, cross_iteration='parameters')


@every_planner
def test_planning_is_deterministic(name: str) -> None:
    profile = NETWORKS['network 6']
    limit = limits(problem_of('network 6'))[-1]
    try:
        plans = [plan_with(profile, limit, name) for _ in range(2)]
    except InfeasibleError:
        pytest.skip(f'{name} has no plan here')
    first, second = (dataclasses.replace(p, planning_seconds=0.0) for p in plans)
    assert first == second


SCRIPT = """
import dataclasses, sys
from support import toys
from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.planners import PLANNERS, make_plan
from chainer_hybridmem.records.plan_file import serialise_plan
from chainer_hybridmem.records.profile_file import serialise_profile
profile = toys.random_network(6, 7)
print(serialise_profile(profile))
for name in PLANNERS:
    try:
        plan = make_plan(profile, int(sys.argv[1]), name)
    except (InfeasibleError, TypeError) as error:
        print(error)
    else:
        print(serialise_plan(dataclasses.replace(plan, planning_seconds=0.0)))
"""


def run_script(limit: int, hash_seed: str) -> str:
    here = pathlib.Path(__file__).parents[1]
    path = os.pathsep.join([str(here), str(here.parent)])
    env = {**os.environ, 'PYTHONHASHSEED': hash_seed, 'PYTHONPATH': path}
    done = subprocess.run(
        [sys.executable, '-W', 'error', '-c', SCRIPT, str(limit)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_process_with_another_hash_seed_plans_the_same() -> None:
    """And no import or compilation warns."""
    limit = limits(make_problem(toys.random_network(6, 7)))[-1]
    first, second = run_script(limit, '1'), run_script(limit, '2')
    assert first == second
    assert first.count('"chainer_hybridmem/plan"') >= 4


@every_planner
def test_what_fits_is_kept(name: str) -> None:
    if find_planner(name).acts_always:
        pytest.skip('a baseline that acts by definition')
    profile = NETWORKS['network 6']
    problem = make_problem(profile)
    plan = plan_with(profile, problem.in_core_peak_bytes, name)
    assert plan.count(Action.KEEP) == len(plan.maps) == len(problem.maps)
    assert plan.predicted_seconds == pytest.approx(plan.in_core_seconds)
    assert plan.predicted_peak_bytes == problem.in_core_peak_bytes
    assert plan.replays == ()
    assert plan.overhead == pytest.approx(0)


@every_planner
def test_every_option_is_checked(name: str) -> None:
    planner = find_planner(name)
    assert planner.source
    assert planner.options.keys() == planner.defaults.keys()


@pytest.mark.matrix
@every_network
@every_planner
def test_one_byte_too_little_for_any_plan(name: str, network: str) -> None:
    """The error names operation, bytes and the smallest limit, which works."""
    profile, problem = NETWORKS[network], problem_of(network)
    least, worst = least_memory(problem)
    with pytest.raises(InfeasibleError) as caught:
        plan_with(problem, least - 1, name)
    message = str(caught.value)
    assert f'Operation {worst} ({profile.operations[worst].label})' in message
    assert f'({least} bytes)' in message
    assert f'({least - 1} bytes)' in message
    assert f'least memory of any plan is {least} bytes' in message
    assert caught.value.requested_bytes == least
    assert caught.value.limit_bytes == least - 1
    assert make_plan(problem, least, 'swap-all').predicted_peak_bytes == least


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


@every_planner
def test_options_it_does_not_have(name: str) -> None:
    with pytest.raises(OptionError, match=rf"'{name}' has no option 'no_such_option'"):
        make_plan(toys.chain(2), '1GiB', name, no_such_option=1)


@pytest.mark.parametrize('limit', ['', 'much', '12 parsecs', 0, -1, '0GiB', 2**70])
def test_limits_that_are_none(limit: Any) -> None:
    with pytest.raises(OptionError, match='memory_limit'):
        make_plan(toys.chain(2), limit, 'swap-all')


def test_unknown_names_are_refused_with_a_hint() -> None:
    with pytest.raises(UnknownNameError, match=r"'poch'.*Did you mean 'pooch'\?"):
        make_plan(toys.chain(2), '1GiB', 'poch')


@every_planner
def test_a_profile_without_feature_maps(name: str) -> None:
    profile = toys.network([toys.Node((), reads_inputs=False)])
    problem = make_problem(profile)
    assert problem.maps == ()
    peak = problem.in_core_peak_bytes
    plan = plan_with(profile, peak, name)
    assert (plan.maps, plan.replays) == ((), ())
    assert plan.predicted_seconds == pytest.approx(profile.compute_seconds)
    with pytest.raises(InfeasibleError):
        plan_with(profile, peak - 1, name)


@every_planner
def test_a_single_operation(name: str) -> None:
    profile = toys.chain(1)
    plan = plan_with(profile, 100 * MIB, name)
    assert len(plan.maps) == 1
    check_plan(profile, plan, 100 * MIB)


@every_planner
def test_only_the_update(name: str) -> None:
    """An iteration without any function, as when a loop skips its training."""
    profile = toys.network([])
    assert len(profile.operations) == 1
    plan = plan_with(profile, 100 * MIB, name)
    assert plan.predicted_seconds == pytest.approx(0.1)


@every_planner
def test_a_problem_is_as_good_as_its_profile(name: str) -> None:
    profile = toys.chain()
    plans = [
        plan_with(p, 85 * MIB, name)
        for p in (profile, make_problem(profile))  # type: ignore[arg-type]
    ]
    assert plans[0].maps == plans[1].maps


@every_planner
def test_a_limit_may_be_text(name: str) -> None:
    plan = make_plan(toys.chain(), '85MiB', name, **OPTIONS.get(name, {}))
    assert plan.memory_limit_bytes == 85 * MIB


def test_a_limit_in_percent_is_a_share_of_the_in_core_peak() -> None:
    profile = NETWORKS['chain']
    peak = make_problem(profile).in_core_peak_bytes
    plan = make_plan(profile, '70%')
    assert plan.memory_limit_bytes == int(0.7 * peak)
    assert plan.maps == make_plan(profile, int(0.7 * peak)).maps
