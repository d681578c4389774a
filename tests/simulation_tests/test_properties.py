"""Kernel, validator and a reference simulator agree on random networks."""

from __future__ import annotations

import dataclasses
import functools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Candidate,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate
from chainer_hybridmem.planning.simulation.timeline import plan_from_positions

many = settings(max_examples=120, deadline=None)
seeds = st.integers(0, 2**32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A random network, random actions, a random limit."""

    problem: Problem
    search: Search
    candidate: Candidate

    @property
    def profile(self) -> Profile:
        return self.problem.profile

    def plan(self) -> Plan:
        """The candidate as a plan, whether or not it fits."""
        maps, replays, _ = plan_from_positions(
            self.problem,
            self.candidate.action,
            self.search.positions(self.candidate),
        )
        return Plan(
            planner='test',
            options={},
            profile_fingerprint=self.profile.fingerprint(),
            memory_limit_bytes=self.search.limit_bytes,
            maps=maps,
            replays=replays,
            predicted_seconds=self.candidate.seconds,
            predicted_peak_bytes=self.candidate.peak_bytes,
            in_core_seconds=self.problem.in_core_seconds,
            lower_bound_seconds=0.0,
        )


def random_case(seed: int, fits: bool = False) -> Case:
    """If it must fit and does not, the limit is raised to what it needs."""
    rng = random.Random(seed)
    make = toys.random_graph if seed % 4 == 0 else toys.random_network
    profile = make(seed, rng.randint(1, 10))
    if seed % 3 == 1:
        profile = toys.with_persistent(profile, seed)
    problem = make_problem(profile, cross_iteration=seed % 5 > 0)
    recompute = [KEEP, SWAP, RECOMPUTE, RECOMPUTE]
    action = np.array(
        [rng.choice(recompute if r else [KEEP, SWAP]) for r in problem.recomputable],
        np.int64,
    )
    least, _ = least_memory(problem)
    most = max(least, problem.in_core_peak_bytes)
    search = Search(problem, rng.randint(int(0.9 * least), int(1.2 * most)))
    candidate = search.evaluate(action)
    while fits and not candidate.fits:
        search = Search(problem, candidate.peak_bytes)
        candidate = search.evaluate(action)
    return Case(problem, search, candidate)


def reference_seconds(profile: Profile, plan: Plan) -> float:
    """Time of a plan as the longest path through a graph of waits.

    Written from the words of :mod:`.records.plan`: compute does one thing after the
    other; each direction copies one map after the other, in the order in which the
    copies are issued.
    """
    n, link, swap = len(profile.operations), profile.link, Action.SWAP
    swapped = [m for m in plan.maps if m.action is swap]
    size = {m.storage: profile.storages[m.storage].nbytes for m in swapped}
    outs = sorted(swapped, key=lambda m: (m.swap_out_before, m.storage))
    ins = sorted(swapped, key=lambda m: (m.swap_in_before, m.needed_before, m.storage))
    before_out = dict(zip([m.storage for m in outs[1:]], outs, strict=False))
    before_in = dict(zip([m.storage for m in ins[1:]], ins, strict=False))
    entry = {m.storage: m for m in swapped}
    recipes = {r.operation: r for r in profile.recipes}

    @functools.cache
    def arrived(k: int) -> float:  # everything before operation k is over
        if k == 0:
            return 0.0
        again = [r.operation for r in plan.replays if r.before == k - 1]
        spent = sum(recipes[o].seconds for o in again)
        return ready(k - 1) + spent + profile.operations[k - 1].device_seconds

    @functools.cache
    def copied_out(s: int) -> float:
        earlier = before_out.get(s)
        free = copied_out(earlier.storage) if earlier else 0.0
        return max(arrived(entry[s].swap_out_before), free) + link.d2h_seconds(size[s])

    @functools.cache
    def released(k: int) -> float:
        waited = [copied_out(m.storage) for m in swapped if m.release_before == k]
        return max([arrived(k), *waited])

    @functools.cache
    def copied_in(s: int) -> float:
        earlier = before_in.get(s)
        free = copied_in(earlier.storage) if earlier else 0.0
        return max(released(entry[s].swap_in_before), free) + link.h2d_seconds(size[s])

    @functools.cache
    def ready(k: int) -> float:
        waited = [copied_in(m.storage) for m in swapped if m.needed_before == k]
        return max([released(k), *waited])

    return arrived(n)


@many
@given(seeds)
def test_validator_and_kernel_agree_on_the_peak_of_any_assignment(seed: int) -> None:
    case = random_case(seed)
    loads = check_plan(case.profile, case.plan())
    assert max(loads) == case.candidate.peak_bytes
    assert case.candidate.fits == (max(loads) <= case.search.limit_bytes)


@many
@given(seeds)
def test_what_fits_is_accepted_and_takes_the_time_it_says(seed: int) -> None:
    case = random_case(seed, fits=True)
    plan = case.search.finish('test', case.candidate)
    timeline = simulate(case.problem, plan)
    assert timeline.total_seconds == case.candidate.seconds
    assert timeline.peak_bytes == plan.predicted_peak_bytes
    assert timeline.peak_bytes <= case.search.limit_bytes


@many
@given(seeds)
def test_the_reference_simulator_agrees_on_the_time(seed: int) -> None:
    case = random_case(seed, fits=True)
    expected = reference_seconds(case.profile, case.plan())
    assert case.candidate.seconds == pytest.approx(expected, rel=1e-9)


@many
@given(seeds)
def test_the_timeline_is_whole(seed: int) -> None:
    """Compute is busy or stalled at every moment, copies never overlap."""
    case = random_case(seed, fits=True)
    timeline = simulate(case.problem, case.plan())
    for lane in ('compute', 'd2h', 'h2d'):
        clock = 0.0
        for interval in (i for i in timeline.intervals if i.lane == lane):
            gap = interval.start_seconds - clock
            assert gap > -1e-9, interval
            assert lane != 'compute' or gap < 1e-9, interval
            clock = interval.end_seconds
        assert clock <= timeline.total_seconds + 1e-9
    spent = case.problem.in_core_seconds
    spent += timeline.stall_seconds + timeline.recompute_seconds
    assert timeline.total_seconds == pytest.approx(spent)


def load_after(case: Case, storage: int, **change: int) -> list[int] | None:
    """Loads with one entry changed; None if the rules forbid it."""
    plan = case.plan()
    maps = tuple(
        dataclasses.replace(m, **change) if m.storage == storage else m
        for m in plan.maps
    )
    try:
        return check_plan(case.profile, dataclasses.replace(plan, maps=maps))
    except PlanError:
        return None


@many
@given(seeds)
def test_no_swap_in_could_start_earlier(seed: int) -> None:
    """One position earlier breaks the limit, or overtakes an earlier need."""
    case = random_case(seed, fits=True)
    swapped = [m for m in case.plan().maps if m.action is Action.SWAP]
    swapped.sort(key=lambda m: (m.needed_before, m.storage))
    earliest = case.profile.first_backward
    for entry in swapped:
        assert earliest <= entry.swap_in_before <= entry.needed_before
        if entry.swap_in_before > earliest:
            early = entry.swap_in_before - 1
            loads = load_after(case, entry.storage, swap_in_before=early)
            assert loads is not None
            assert max(loads) > case.search.limit_bytes
        earliest = entry.swap_in_before


@many
@given(seeds)
def test_no_swap_out_is_waited_for_without_need(seed: int) -> None:
    """Of the maps released together in forward, the youngest was needed too."""
    case = random_case(seed, fits=True)
    b0 = case.profile.first_backward
    youngest = {
        m.release_before: m
        for m in sorted(case.plan().maps, key=lambda m: (m.swap_out_before, m.storage))
        if m.action is Action.SWAP and m.release_before < b0
    }
    for k, entry in youngest.items():
        loads = load_after(case, entry.storage, release_before=k + 1)
        assert loads is not None
        assert loads[k] > case.search.limit_bytes


@many
@given(seeds)
def test_keeping_everything_is_in_core(seed: int) -> None:
    case = random_case(seed)
    plan = Search(case.problem, 2**60).finish_in_core('in-core')
    timeline = simulate(case.problem, plan)
    assert timeline.peak_bytes == case.problem.in_core_peak_bytes
    assert timeline.total_seconds == pytest.approx(case.problem.in_core_seconds)


@many
@given(seeds)
def test_with_endless_memory_every_recompute_runs_once(seed: int) -> None:
    case = random_case(seed)
    search = Search(case.problem, 2**60)
    candidate = search.evaluate(case.candidate.action)
    made = [s for r in search.finish('test', candidate).replays for s in r.keeps]
    wanted = [
        m.id
        for m, action in zip(case.problem.maps, candidate.action, strict=True)
        if action == RECOMPUTE
    ]
    assert sorted(made) == wanted


@many
@given(seeds)
def test_a_chain_runs_no_operation_twice(seed: int) -> None:
    case = random_case(seed)
    runs = [(r.before, r.operation) for r in case.plan().replays]
    assert len(runs) == len(set(runs))


@many
@given(seeds)
def test_copies_that_take_no_time_stall_nobody(seed: int) -> None:
    case = random_case(seed, fits=True)
    timeline = simulate(
        dataclasses.replace(
            case.profile,
            link=dataclasses.replace(
                case.profile.link,
                latency_seconds=0.0,
                d2h_bytes_per_second=1e300,
                h2d_bytes_per_second=1e300,
            ),
        ),
        case.plan(),
    )
    assert timeline.stall_seconds == pytest.approx(0)
