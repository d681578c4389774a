"""Hand-made profiles of which some functions can run in parts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem import files
from chainer_hybridmem.errors import (
    FormatError,
    InfeasibleError,
    OptionError,
    PlanError,
)
from chainer_hybridmem.forecasting.estimation.structure import (
    assemble,
    events_by_operation,
)
from chainer_hybridmem.planning.layouts import planned_trace
from chainer_hybridmem.planning.planners import PLANNERS, make_plan
from chainer_hybridmem.planning.records.plan import Part
from chainer_hybridmem.planning.records.plan_file import parse_plan, serialise_plan
from chainer_hybridmem.planning.records.profile import Category, Profile, Split, Storage
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.records.splits import in_parts, part_of
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import SWAP, Search, least_memory
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.planning.simulation.fitting import fitted
from chainer_hybridmem.planning.simulation.problem import with_parts
from chainer_hybridmem.reporting.memory_viz import planned_snapshot

MIB = toys.MIB
HUGE = 100 * MIB  # temporaries of one function


def with_temporaries(
    profile: Profile, sizes: dict[int, int], late: bool = True
) -> Profile:
    """The profile with temporaries in some operations: half, then half, freed again.

    The second half comes after the output, or with it.

    In 2 and 4 parts they take as much less, with 8 parts the bits change.
    """
    groups = events_by_operation(profile)
    storages: list[Storage | None] = list(profile.storages)
    splits = []
    for k, nbytes in sizes.items():
        made = []
        for _ in range(2):
            made.append(len(storages))
            storages.append(
                Storage(len(storages), nbytes // 2, Category.WORKSPACE, '', k, -1, -1)
            )
        output = profile.storages[groups[k][0] - 1].nbytes
        # One before the output, one after it.
        groups[k][:0] = [made[0] + 1]
        groups[k][1 + late : 1 + late] = [made[1] + 1]
        groups[k][3:3] = [-made[1] - 1, -made[0] - 1]
        for parts in (2, 4, 8):
            peak = output + nbytes // parts
            splits.append(
                Split(k, 0, 'F', 'batch', parts, parts < 8, made[0], tuple(made), peak)
            )
    profile = dataclasses.replace(profile, splits=tuple(splits))
    return assemble(profile, groups, storages, profile.recipes, profile.initial_bytes)


def example() -> Profile:
    """Operation 3 is forward, 9 backward; a function of both has large temporaries."""
    return with_temporaries(toys.chain(), {3: HUGE, 9: HUGE // 2})


def needed(profile: Profile, splitting: bool | str) -> int:
    return least_memory(make_problem(profile, splitting=splitting))[0]


def test_json_and_back() -> None:
    profile = example()
    assert len(profile.splits) == 6
    assert parse_profile(serialise_profile(profile)) == profile
    plan = make_plan(profile, needed(profile, 'exact'), 'swap-all')
    assert plan.parts
    assert parse_plan(serialise_plan(plan)) == plan


def test_a_profile_with_splits_and_a_disk_link_and_back() -> None:
    with_both = dataclasses.replace(example(), disk_link=example().link)
    assert parse_profile(serialise_profile(with_both)) == with_both


@pytest.mark.parametrize(
    'change',
    [
        {'operation': -1},
        {'operation': 99},
        {'function': -1},
        {'parts': 1},
        {'first': 999},
        {'first': 0},
        {'temporaries': ()},
        {'temporaries': (3,)},
        {'temporaries': (-1,)},
        {'peak_bytes': -1},
        {'peak_bytes': files.LARGEST_SIZE},
    ],
)
def test_contradictory_splits_are_refused(change: dict[str, object]) -> None:
    profile = example()
    split = dataclasses.replace(profile.splits[0], **change)
    damaged = dataclasses.replace(profile, splits=(split,))
    with pytest.raises(FormatError, match='cannot be used: (Split|storage .* Split)'):
        parse_profile(serialise_profile(damaged))


@pytest.mark.parametrize('late', [True, False])
def test_the_peak_in_parts_is_the_recorded_one(late: bool) -> None:
    profile = with_temporaries(toys.chain(), {3: HUGE, 9: HUGE // 2}, late)
    for split in profile.splits:
        cut = in_parts(profile, (part_of(split),))
        assert _peak_within(cut, split.operation) == split.peak_bytes
        assert cut.fingerprint() == profile.fingerprint()
        assert in_parts(cut, (part_of(split),)) == cut
        workspace_bytes = cut.operations[split.operation].workspace_bytes
        assert workspace_bytes < profile.operations[split.operation].workspace_bytes


def _peak_within(profile: Profile, k: int) -> int:
    load = peak = 0
    for event in events_by_operation(profile)[k]:
        nbytes = profile.storages[abs(event) - 1].nbytes
        load += nbytes if event > 0 else -nbytes
        peak = max(peak, load)
    return peak


def test_a_replay_runs_in_the_parts_of_its_forward() -> None:
    profile = example()
    recipes = [
        dataclasses.replace(r, peak_bytes=HUGE) if r.operation in (3, 4) else r
        for r in profile.recipes
    ]
    profile = dataclasses.replace(profile, recipes=tuple(recipes))
    cut = in_parts(profile, (part_of(profile.splits[0]),))
    assert cut.recipes[3].peak_bytes == profile.splits[0].peak_bytes < HUGE
    assert cut.recipes[4].peak_bytes == HUGE
    one_pass = dataclasses.replace(profile.recipes[3], covers=(2, 3))
    recipes[3] = one_pass
    profile = dataclasses.replace(profile, recipes=tuple(recipes))
    assert in_parts(profile, (part_of(profile.splits[0]),)).recipes[3] == one_pass


def test_as_few_parts_as_fit_and_only_where_needed() -> None:
    profile = example()
    whole, exact, rounded = (needed(profile, s) for s in (False, 'exact', True))
    assert whole > exact > rounded
    problem = make_problem(profile)
    assert fitted(problem, whole) is problem
    assert _parts(fitted(problem, whole - 1)) == {3: 2}
    assert _parts(fitted(problem, exact)) == {3: 4, 9: 4}
    begun = make_problem(profile, parts=(part_of(profile.splits[1]),))
    assert _parts(fitted(begun, exact)) == {3: 4, 9: 4}
    assert _parts(fitted(make_problem(profile, splitting=False), exact)) == {}
    # Below what parts can do: the error names the least that works.
    with pytest.raises(InfeasibleError, match=f'memory of any plan is {exact} bytes'):
        make_plan(profile, exact - 1, 'swap-all')
    with pytest.raises(InfeasibleError, match=f'memory of any plan is {whole} bytes'):
        make_plan(profile, exact, 'swap-all', splitting=False)
    plan = make_plan(profile, rounded, 'swap-all', splitting=True)
    assert plan.predicted_peak_bytes == rounded
    assert not all(part.exact for part in plan.parts)


def _parts(problem) -> dict[int, int]:
    return {part.operation: part.parts for part in problem.parts}


def test_ways_that_need_more_than_the_ones_before_are_left_out() -> None:
    profile = example()
    worse = dataclasses.replace(
        profile.splits[1], peak_bytes=profile.splits[0].peak_bytes + 1
    )
    splits = (profile.splits[0], worse, *profile.splits[2:])
    profile = dataclasses.replace(profile, splits=splits)
    assert _parts(fitted(make_problem(profile), 0))[3] == 2
    assert _parts(fitted(make_problem(profile, splitting=True), 0))[3] == 8


def test_more_parts_for_a_lower_limit_later() -> None:
    profile = example()
    first = fitted(make_problem(profile), needed(profile, False) - 1)
    assert _parts(first) == {3: 2}
    second = fitted(first, needed(profile, 'exact'))
    assert with_parts(second, first.parts) is not second
    assert with_parts(second, second.parts[:1]) is second
    assert second.parts == fitted(make_problem(profile), needed(profile, 'exact')).parts


@pytest.mark.parametrize(
    'planner', [p for p in PLANNERS if p not in ('manual', 'exact')]
)
def test_every_planner_plans_with_parts(planner: str) -> None:
    profile = example()
    limit = (needed(profile, 'exact') + needed(profile, False)) // 2
    try:
        plan = make_plan(profile, limit, planner)
    except InfeasibleError:
        assert planner in ('in-core', 'vdnn-conv', 'checkpoint-speed')
        return
    assert plan.parts
    assert max(check_plan(profile, plan, limit)) == plan.predicted_peak_bytes
    for judged in (profile, make_problem(profile)):
        assert simulate(judged, plan).peak_bytes == plan.predicted_peak_bytes
    assert planned_trace(profile, plan).peak_load_bytes == plan.predicted_peak_bytes


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_is_unavoidable_is_what_swapping_everything_needs(seed: int) -> None:
    rng = np.random.RandomState(seed)
    profile = toys.random_graph(seed)
    chosen = rng.choice(16, 4, replace=False)
    profile = with_temporaries(
        profile, {int(k): int(rng.randint(2, 60)) * MIB for k in chosen}
    )
    least = needed(profile, 'exact')
    plan = make_plan(profile, least, 'swap-all')
    assert plan.predicted_peak_bytes == least
    problem = make_problem(profile, parts=plan.parts)
    search = Search(problem, least)
    assert search.evaluate(search.fill(SWAP)).peak_bytes == least


def test_the_picture_of_a_plan_has_its_parts() -> None:
    profile = example()
    plan = make_plan(profile, needed(profile, 'exact'), 'swap-all')
    cut = in_parts(profile, plan.parts)
    assert planned_snapshot(profile, plan) == planned_snapshot(cut, plan)


def test_unknown_parts_are_refused() -> None:
    profile = example()
    plan = make_plan(profile, needed(profile, 'exact'), 'swap-all')
    other = Part(3, 0, 'F', 'batch', 3, True)
    strange = dataclasses.replace(plan, parts=(other,))
    with pytest.raises(PlanError, match='runs F of operation 3 in 3 parts along batch'):
        check_plan(profile, strange)
    with pytest.raises(OptionError, match="splitting is 'some'"):
        make_problem(profile, splitting='some')
