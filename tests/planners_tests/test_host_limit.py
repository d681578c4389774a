"""Every planner keeps the limit for host copies, with a disk and without."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError, OptionError, PlanError
from chainer_hybridmem.planning.planners import PLANNERS, make_plan
from chainer_hybridmem.planning.planners.uniform import swap_all
from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan, Tier
from chainer_hybridmem.planning.records.plan_file import parse_plan, serialise_plan
from chainer_hybridmem.planning.records.profile import Link, Profile
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.search.relaxed import relaxed
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate
from chainer_hybridmem.planning.simulation.problem import with_host_limit

DISK_SHARE = 0.2  # of the speed of the link to RAM
SEEDS = range(6)
OPTIONS: dict[str, dict[str, Any]] = {
    'exact': {'time_budget': 0.5},
    'hybrid': {'steps': 3000},
    'autoswap-bo': {'evaluations': 10},  # the last two by regression
}


def with_disk(profile: Profile, share: float = DISK_SHARE) -> Profile:
    link = profile.link
    disk = Link(
        link.latency_seconds,
        link.d2h_bytes_per_second * share,
        link.h2d_bytes_per_second * share,
    )
    return dataclasses.replace(profile, disk_link=disk)


def drawn(seed: int, disk: bool) -> Profile:
    make = toys.random_graph if seed % 2 else toys.random_network
    profile = make(seed + 40, 5 + seed % 5)
    return with_disk(profile) if disk else profile


def middle(profile: Profile) -> int:
    problem = make_problem(profile)
    least = least_memory(problem)[0]
    return (least + max(least, problem.in_core_peak_bytes - 1)) // 2


@pytest.mark.matrix
@pytest.mark.parametrize('disk', [True, False], ids=['disk', 'no disk'])
@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize('name', list(PLANNERS))
def test_every_plan_keeps_the_host_limit(name: str, seed: int, disk: bool) -> None:
    profile = drawn(seed, disk)
    limit = middle(profile)
    total = sum(s.nbytes for s in make_problem(profile).maps)
    for host_limit in (0, total // 4, total // 2, total):
        problem = make_problem(profile, host_limit_bytes=host_limit)
        options = OPTIONS.get(name, {})
        try:
            plan = make_plan(problem, limit, name, **options)
        except InfeasibleError as error:
            if 'host_limit' in str(error):
                assert not disk and error.limit_bytes == host_limit
                assert error.requested_bytes > host_limit
                assert 'swap_dir' in str(error)
            continue
        check_plan(profile, plan, limit, host_limit)
        assert plan.host_limit_bytes == host_limit
        in_ram, on_disk = (plan.tier_bytes(profile, tier) for tier in Tier)
        assert in_ram <= host_limit
        assert in_ram + on_disk == plan.action_bytes(profile, Action.SWAP)
        assert disk or not on_disk
        seconds = simulate(profile, plan).total_seconds
        assert seconds == pytest.approx(plan.predicted_seconds)
        assert plan.lower_bound_seconds <= plan.predicted_seconds * (1 + 1e-9)
        assert parse_plan(serialise_plan(plan)) == plan


@pytest.mark.parametrize('disk', [True, False], ids=['disk', 'no disk'])
@pytest.mark.parametrize('seed', SEEDS)
def test_no_valid_plan_is_faster_than_the_bound(seed: int, disk: bool) -> None:
    """Whatever is swapped, and whatever of it goes to the disk."""
    profile = drawn(seed, disk)
    limit = middle(profile)
    rng = np.random.default_rng(seed)
    total = sum(s.nbytes for s in make_problem(profile).maps)
    tried = 0
    for host_limit in (0, total // 3, total // 2):
        problem = make_problem(profile, host_limit_bytes=host_limit)
        bound = lower_bound(problem, limit).seconds
        search = Search(problem, limit, barrier=False)
        for _ in range(60):
            action = rng.choice(3, size=len(problem.maps))
            action[(action == RECOMPUTE) & ~problem.recomputable] = KEEP
            candidate = search.evaluate(action)
            if not candidate.fits:
                continue
            work = search.positions(candidate)
            on_disk = work.on_disk
            if not disk and on_disk.any():
                assert candidate.seconds > 10 * problem.in_core_seconds
                continue
            for _ in range(4 if disk else 1):
                if disk:  # other tiers than the rule has chosen
                    swapped = action == SWAP
                    on_disk[:] = swapped & (rng.random(len(action)) < 0.7)
                    kept = problem.arrays.size[: len(action)][swapped & ~on_disk]
                    if kept.sum() > host_limit:
                        continue
                assert search.seconds(work) >= bound * (1 - 1e-9)
                tried += 1
    assert tried


def test_the_bound_knows_the_host_limit() -> None:
    """It rises as RAM is taken away: then there is more to make again, or slower."""
    profile = toys.chain(8)
    limit = middle(profile)
    for disk in (True, False):
        problem = make_problem(with_disk(profile, 0.02) if disk else profile)
        total = sum(s.nbytes for s in problem.maps)
        bounds = [
            lower_bound(with_host_limit(problem, host), limit).seconds
            for host in (0, total // 4, total)
        ]
        assert bounds[0] > bounds[2] * 1.01
        assert bounds[0] >= bounds[1] >= bounds[2]
        assert bounds[2] == lower_bound(problem, limit).seconds


@pytest.mark.parametrize('disk', [True, False], ids=['disk', 'no disk'])
@pytest.mark.parametrize('seed', range(8))
def test_more_host_memory_is_never_slower(seed: int, disk: bool) -> None:
    """But for the tolerance, at which the search stops."""
    profile = drawn(seed, disk)
    limit = middle(profile)
    problem = make_problem(profile)
    total = sum(s.nbytes for s in problem.maps)
    found: list[Plan] = []
    for part in range(9):
        limited = with_host_limit(problem, total * part // 8)
        try:
            found.append(make_plan(limited, limit, 'hybrid', steps=4000))
        except InfeasibleError:
            assert not found and not disk
    assert found
    free = make_plan(problem, limit, 'hybrid', steps=4000)
    assert found[-1].maps == free.maps
    for less, more in itertools.pairwise(found):
        goal = more.lower_bound_seconds * (1 + 1e-3)
        most = max(less.predicted_seconds, goal)
        assert more.predicted_seconds <= most * (1 + 1e-9)


def test_without_a_disk_hybrid_keeps_and_recomputes_instead() -> None:
    """Where swapping everything is no way any more, it is no way to begin either."""
    profile = toys.chain(8)
    limit = middle(profile)
    free = make_plan(profile, limit, 'hybrid')
    assert free.count(Action.SWAP)
    plan = make_plan(profile, limit, 'hybrid', host_limit=0)
    assert plan.count(Action.SWAP) == 0 and plan.count(Action.RECOMPUTE)
    assert plan.predicted_seconds >= free.predicted_seconds
    with pytest.raises(InfeasibleError, match=r'host_limit is 0 B.*swap_dir'):
        make_plan(profile, limit, 'swap-all', host_limit=0)
    with pytest.raises(InfeasibleError, match='host_limit'):
        swap_all(make_problem(profile, host_limit_bytes=0), limit)


def test_a_planner_that_knows_no_host_limit_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of another package that writes its plan by itself, say."""

    def careless(problem: Problem, limit_bytes: int) -> Plan:
        return swap_all(with_host_limit(problem, None), limit_bytes)

    monkeypatch.setitem(PLANNERS, 'careless', careless)
    profile = toys.chain(8)
    make_plan(profile, middle(profile), 'careless')
    with pytest.raises(InfeasibleError, match='host_limit'):
        make_plan(profile, middle(profile), 'careless', host_limit=0)


def test_who_is_needed_first_has_the_ram() -> None:
    profile = with_disk(toys.chain(6))
    total = sum(s.nbytes for s in make_problem(profile).maps)
    plan = make_plan(profile, 2**40, 'vdnn-all', host_limit=total // 2)
    swapped = [m for m in plan.maps if m.action is Action.SWAP]
    needs = {
        tier: [m.needed_before for m in swapped if m.tier is tier] for tier in Tier
    }
    assert needs[Tier.RAM] and needs[Tier.DISK]
    assert max(needs[Tier.RAM]) < min(needs[Tier.DISK])


def test_a_slower_disk_is_in_the_prediction() -> None:
    slow, fast = (with_disk(toys.chain(6), share) for share in (0.05, 1.0))
    limit = middle(slow)
    of_slow, of_fast, of_ram = (
        make_plan(p, limit, 'swap-all', host_limit=host_limit)
        for p, host_limit in ((slow, 0), (fast, 0), (fast, None))
    )
    assert of_fast.predicted_seconds == of_ram.predicted_seconds
    assert of_slow.predicted_seconds > of_fast.predicted_seconds * 1.5


@pytest.mark.parametrize('seed', SEEDS)
def test_everything_on_the_disk_is_a_slower_link(seed: int) -> None:
    """Planned, simulated and relaxed alike."""
    profile = drawn(seed, disk=True)
    assert profile.disk_link is not None
    slow = dataclasses.replace(profile, link=profile.disk_link, disk_link=None)
    limit = middle(profile)
    plans = []
    for problem in (make_problem(profile, host_limit_bytes=0), make_problem(slow)):
        plan = make_plan(problem, limit, 'swap-all')
        later = relaxed(problem, plan)
        assert later.predicted_seconds <= plan.predicted_seconds
        plans.append((plan, later))
    for on_disk, in_ram in zip(*plans, strict=True):
        assert on_disk.predicted_seconds == in_ram.predicted_seconds
        assert [dataclasses.replace(m, tier=Tier.RAM) for m in on_disk.maps] == list(
            in_ram.maps
        )
        tiers = {m.tier for m in on_disk.maps if m.action is Action.SWAP}
        assert tiers == {Tier.DISK}


def test_the_checker_refuses_what_breaks_the_host_limit() -> None:
    profile = with_disk(toys.chain(6))
    plan = make_plan(profile, middle(profile), 'swap-all', host_limit=0)
    check_plan(profile, plan, host_limit_bytes=0)
    in_ram = dataclasses.replace(
        plan, maps=tuple(dataclasses.replace(m, tier=Tier.RAM) for m in plan.maps)
    )
    nbytes = in_ram.tier_bytes(profile, Tier.RAM)
    check_plan(profile, in_ram, host_limit_bytes=nbytes)
    with pytest.raises(PlanError, match=f'{nbytes} bytes of RAM'):
        check_plan(profile, in_ram, host_limit_bytes=nbytes - 1)
    with pytest.raises(PlanError, match='no disk link'):
        check_plan(dataclasses.replace(profile, disk_link=None), plan)
    with pytest.raises(PlanError, match='no disk link'):
        simulate(dataclasses.replace(profile, disk_link=None), plan)
    first = MapPlan(plan.maps[0].storage, Action.KEEP, tier=Tier.DISK)
    with pytest.raises(PlanError, match="tier is 'disk'"):
        check_plan(profile, dataclasses.replace(plan, maps=(first, *plan.maps[1:])))


def test_disk_links_are_written_and_do_not_change_the_fingerprint() -> None:
    profile = toys.chain(6)
    disk = with_disk(profile)
    assert parse_profile(serialise_profile(disk)) == disk
    assert parse_profile(serialise_profile(profile)) == profile
    assert disk.fingerprint() == profile.fingerprint()


def test_limits_that_cannot_be() -> None:
    with pytest.raises(OptionError, match='zero or more'):
        make_plan(toys.chain(), 2**40, host_limit=-1)
    with pytest.raises(OptionError, match='zero or more'):
        make_problem(toys.chain(), host_limit_bytes=-1)
