"""Rules of a plan, each broken on purpose."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan, Replay
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import KEEP, RECOMPUTE, SWAP, Search
from chainer_hybridmem.planning.simulation import make_problem, simulate

MIB = toys.MIB
FIELDS = (
    'swap_out_before',
    'release_before',
    'swap_in_before',
    'needed_before',
    'drop_before',
)


def plan_for(profile: Profile, *actions: int, limit_bytes: int = 2**40) -> Plan:
    search = Search(make_problem(profile), limit_bytes)
    return search.finish('test', search.evaluate(np.array(actions, np.int64)))


def changed(plan: Plan, index: int, **fields: object) -> Plan:
    maps = list(plan.maps)
    maps[index] = dataclasses.replace(maps[index], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(plan, maps=tuple(maps))


def with_replays(plan: Plan, *replays: Replay) -> Plan:
    return dataclasses.replace(plan, replays=replays)


@pytest.fixture
def profile() -> Profile:
    return toys.chain()


@pytest.fixture
def swapped(profile: Profile) -> Plan:
    """Everything swapped; map 2 leaves after F3 and is read by B3 and B2."""
    return plan_for(profile, *[SWAP] * 6)


@pytest.fixture
def recomputed(profile: Profile) -> Plan:
    """Maps 0 to 2 recomputed: before B3 (operation 8) r0 r1 r2."""
    plan = plan_for(profile, *[RECOMPUTE] * 3, *[KEEP] * 3, limit_bytes=50 * MIB)
    assert [(r.before, r.operation) for r in plan.replays][:3] == [
        (8, 0),
        (8, 1),
        (8, 2),
    ]
    return plan


def test_loads_are_those_of_the_hand_made_timeline(profile: Profile) -> None:
    plan = make_plan(profile, 45 * MIB, 'swap-all')
    loads = check_plan(profile, plan, 45 * MIB)
    expected = [15, 25, 35, 45, 45, 45, 45, 45, 45, 45, 45, 35, 15]
    assert [load // MIB for load in loads] == expected


def test_one_byte_over_the_limit_is_refused(profile: Profile) -> None:
    plan = make_plan(profile, 45 * MIB, 'swap-all')
    with pytest.raises(PlanError, match=r'Operation 3 .* needs 47185920 .* 47185919'):
        check_plan(profile, plan, 45 * MIB - 1)


def test_use_before_needed(profile: Profile, swapped: Plan) -> None:
    late = changed(swapped, 2, swap_in_before=8, needed_before=9)
    with pytest.raises(PlanError, match=r'needed_before .9. must not come after first'):
        check_plan(profile, late)


def test_needed_before_it_is_taken(profile: Profile, swapped: Plan) -> None:
    early = changed(swapped, 2, swap_in_before=8, needed_before=7)
    with pytest.raises(
        PlanError, match=r'swap_in_before .8. must not .* needed_before'
    ):
        check_plan(profile, early)


def test_release_before_the_copy_starts(profile: Profile, swapped: Plan) -> None:
    broken = changed(swapped, 2, swap_out_before=5, release_before=4)
    with pytest.raises(
        PlanError, match=r'swap_out_before .5. must not .* release_befo'
    ):
        check_plan(profile, broken)


def test_copy_before_the_last_forward_use(profile: Profile, swapped: Plan) -> None:
    with pytest.raises(PlanError, match='last forward use'):
        check_plan(profile, changed(swapped, 2, swap_out_before=3))


def test_swap_in_before_the_release(profile: Profile, swapped: Plan) -> None:
    broken = changed(swapped, 2, release_before=6, swap_in_before=5)
    with pytest.raises(
        PlanError, match=r'release_before .6. must not .* swap_in_before'
    ):
        check_plan(profile, broken)


def test_drop_before_the_last_use(profile: Profile, swapped: Plan) -> None:
    with pytest.raises(
        PlanError, match=r'Operation 9 .* uses feature map 2.* not there'
    ):
        check_plan(profile, changed(swapped, 2, drop_before=9))


def test_keep_dropped_before_the_last_use(profile: Profile) -> None:
    plan = plan_for(profile, *[KEEP] * 6)
    with pytest.raises(PlanError, match='uses feature map 2'):
        check_plan(profile, changed(plan, 2, drop_before=9))


def test_dropped_before_it_is_there(profile: Profile) -> None:
    plan = plan_for(profile, *[KEEP] * 6)
    with pytest.raises(PlanError, match=r'2 is released before operation 1,.*until 4'):
        check_plan(profile, changed(plan, 2, drop_before=1))


def test_released_twice(profile: Profile) -> None:
    """No replay makes it, but it is dropped after its last use."""
    plan = plan_for(profile, *[KEEP] * 5, RECOMPUTE)
    missing = with_replays(plan)
    with pytest.raises(PlanError, match=r'Operation 6 .* uses feature map 5'):
        check_plan(profile, missing)
    unused = dataclasses.replace(profile.storages[5], backward_uses=(11,))
    storages = (*profile.storages[:5], unused, *profile.storages[6:])
    late = dataclasses.replace(profile, storages=storages)
    broken = changed(missing, 5, needed_before=11, drop_before=11)
    with pytest.raises(PlanError, match='Feature map 5 is released twice'):
        check_plan(late, broken)


def test_dropped_before_it_is_needed(profile: Profile, swapped: Plan) -> None:
    """Not in memory is not complete, whatever the copy did."""
    broken = changed(swapped, 5, swap_in_before=6, needed_before=6, drop_before=6)
    early = changed(broken, 5, release_before=6)
    with pytest.raises(PlanError):
        check_plan(profile, early)
    broken = changed(swapped, 2, swap_in_before=7, needed_before=8, drop_before=8)
    with pytest.raises(PlanError, match='needed before operation 8, but it is not'):
        check_plan(profile, broken)


def held_network() -> Profile:
    """Map 1 is read by F1 last, but the program holds it until operation 3."""
    return toys.network(
        [
            toys.Node((), reads_outputs=True, held=2),
            toys.Node(((0, 0),)),
            toys.Node(((1, 0),)),
            toys.Node(((2, 0),), held=-1),
        ]
    )


@pytest.mark.parametrize('action', [SWAP, RECOMPUTE])
def test_released_while_the_program_holds_it(action: int) -> None:
    profile = held_network()
    plan = plan_for(profile, action, KEEP, KEEP)
    entry = plan.maps[0]
    assert entry.storage == 1
    early = changed(plan, 0, release_before=2)
    if action == SWAP:
        early = changed(early, 0, swap_out_before=2)
    with pytest.raises(PlanError, match=r'before operation 2, .* holds it until 3'):
        check_plan(profile, early)
    check_plan(profile, changed(plan, 0, release_before=3))


def test_copied_while_the_program_holds_it() -> None:
    profile = held_network()
    plan = plan_for(profile, SWAP, KEEP, KEEP)
    assert plan.maps[0].swap_out_before == 3
    early = changed(plan, 0, swap_out_before=2)
    with pytest.raises(PlanError, match=r'1 is copied before operation 2, .* until 3'):
        check_plan(profile, early)


def test_the_same_map_decided_twice(profile: Profile, swapped: Plan) -> None:
    twice = dataclasses.replace(swapped, maps=(*swapped.maps, swapped.maps[0]))
    with pytest.raises(PlanError, match='decides twice about storage 0'):
        check_plan(profile, twice)


@pytest.mark.parametrize('storage', [-1, 12, 10**6])
def test_a_storage_that_is_not_there(
    profile: Profile, swapped: Plan, storage: int
) -> None:
    with pytest.raises(PlanError, match=str(storage)):
        check_plan(profile, changed(swapped, 0, storage=storage))


def test_a_gradient_is_not_a_feature_map(profile: Profile, swapped: Plan) -> None:
    with pytest.raises(PlanError, match='Storage 7 is not a feature map'):
        check_plan(profile, changed(swapped, 0, storage=7))


@pytest.mark.parametrize(
    ('action', 'fields'),
    [
        (Action.KEEP, FIELDS[:4]),
        (Action.RECOMPUTE, ('swap_out_before', 'swap_in_before')),
    ],
)
def test_fields_that_an_action_does_not_have(
    profile: Profile, recomputed: Plan, action: Action, fields: tuple[str, ...]
) -> None:
    index = next(i for i, m in enumerate(recomputed.maps) if m.action is action)
    for field in fields:
        for value in (0, 7, -2):
            broken = changed(recomputed, index, **{field: value})
            with pytest.raises(PlanError, match=f'{field} is {value}'):
                check_plan(profile, broken)


@pytest.mark.parametrize('position', [-2, 14, 10**9])
def test_dropped_outside_the_iteration(
    profile: Profile, swapped: Plan, position: int
) -> None:
    with pytest.raises(PlanError, match=r'drop_before'):
        check_plan(profile, changed(swapped, 0, drop_before=position))


def test_replay_without_source(profile: Profile, recomputed: Plan) -> None:
    without_first = with_replays(recomputed, *recomputed.replays[1:])
    with pytest.raises(PlanError, match=r'operation 1 .* needs storage 0'):
        check_plan(profile, without_first)


def test_replays_in_the_wrong_order(profile: Profile, recomputed: Plan) -> None:
    first, second, *rest = recomputed.replays
    with pytest.raises(PlanError, match=r'operation 1 .* needs storage 0'):
        check_plan(profile, with_replays(recomputed, second, first, *rest))


def test_replay_of_what_cannot_be_repeated(profile: Profile, recomputed: Plan) -> None:
    recipe = dataclasses.replace(profile.recipes[0], exact=False)
    inexact = dataclasses.replace(profile, recipes=(recipe, *profile.recipes[1:]))
    with pytest.raises(PlanError, match='Operation 0 is replayed but not repeatable'):
        check_plan(inexact, recomputed)


@pytest.mark.parametrize('operation', [-1, 6, 99])
def test_replay_of_what_is_no_forward_operation(
    profile: Profile, recomputed: Plan, operation: int
) -> None:
    extra = Replay(8, operation)
    with pytest.raises(PlanError, match=f'Operation {operation} is replayed'):
        check_plan(profile, with_replays(recomputed, extra, *recomputed.replays))


@pytest.mark.parametrize('before', [-1, 5, 13, 10**9])
def test_replay_outside_backward(
    profile: Profile, recomputed: Plan, before: int
) -> None:
    extra = Replay(before, 0, frees=(0,))
    broken = with_replays(recomputed, extra, *recomputed.replays)
    with pytest.raises(PlanError, match=f'before operation {before}; backward runs'):
        check_plan(profile, broken)
    with pytest.raises(PlanError):
        simulate(profile, broken)


def test_temporaries_left_behind(profile: Profile, recomputed: Plan) -> None:
    """A replay's product that nobody keeps or frees stays in memory."""
    replays = tuple(dataclasses.replace(r, frees=()) for r in recomputed.replays)
    with pytest.raises(PlanError, match=r'Storages \[0, 1\] stay behind'):
        check_plan(profile, with_replays(recomputed, *replays))


def test_a_duplicate_of_what_is_there_must_be_freed_too(
    profile: Profile, recomputed: Plan
) -> None:
    extra = Replay(6, 0)
    with pytest.raises(PlanError, match=r'Storages \[0\] stay behind'):
        check_plan(profile, with_replays(recomputed, extra, *recomputed.replays))


def test_freed_but_not_there(profile: Profile, recomputed: Plan) -> None:
    first, *rest = recomputed.replays
    for storage in (3, 0, 7, -1, 99):
        wrong = dataclasses.replace(first, frees=(storage, storage))
        with pytest.raises(PlanError, match='freed but not there'):
            check_plan(profile, with_replays(recomputed, wrong, *rest))


@pytest.mark.parametrize('storage', [1, 7, 99, -1])
def test_a_replay_keeps_what_it_does_not_make(
    profile: Profile, recomputed: Plan, storage: int
) -> None:
    first, *rest = recomputed.replays
    wrong = dataclasses.replace(first, keeps=(storage,), frees=())
    with pytest.raises(PlanError, match=f'keeps storage {storage}, which it does not'):
        check_plan(profile, with_replays(recomputed, wrong, *rest))


def test_made_twice_in_one_chain(profile: Profile, recomputed: Plan) -> None:
    first, *rest = recomputed.replays
    with pytest.raises(PlanError, match='Storage 0 is made twice'):
        check_plan(profile, with_replays(recomputed, first, first, *rest))


def test_kept_twice(profile: Profile, recomputed: Plan) -> None:
    keeper = next(r for r in recomputed.replays if r.keeps)
    at = recomputed.replays.index(keeper)
    again = (*recomputed.replays[: at + 1], *recomputed.replays[at:])
    with pytest.raises(PlanError, match=r'taken twice|not there|made twice'):
        check_plan(profile, with_replays(recomputed, *again))


def test_kept_at_another_position_than_planned(
    profile: Profile, recomputed: Plan
) -> None:
    keeper = next(r for r in recomputed.replays if r.keeps)
    index = next(i for i, m in enumerate(recomputed.maps) if m.storage in keeper.keeps)
    needed = recomputed.maps[index].needed_before - 1
    with pytest.raises(PlanError, match='is kept by a replay before operation 8, but'):
        check_plan(profile, changed(recomputed, index, needed_before=needed))


def test_a_map_nobody_decides_about_stays_until_the_graph_dies(
    profile: Profile, swapped: Plan
) -> None:
    """It is not gained: the load is higher by its bytes from its release on."""
    undecided = dataclasses.replace(swapped, maps=swapped.maps[1:])
    before, after = check_plan(profile, swapped), check_plan(profile, undecided)
    assert after[12] - before[12] == 10 * MIB
    with pytest.raises(PlanError, match='decides about 5 feature maps'):
        simulate(profile, undecided)


@pytest.fixture
def crossing() -> tuple[Profile, Plan]:
    """A chain whose parameters and states are all swapped, and one index of them."""
    profile = toys.with_persistent(toys.chain(), 1)
    plan = make_plan(profile, 2**40, 'swap-all', cross_iteration=True)
    return profile, plan


@pytest.mark.parametrize('position', [0, 7, 12])
def test_what_crosses_is_not_dropped(
    crossing: tuple[Profile, Plan], position: int
) -> None:
    profile, plan = crossing
    with pytest.raises(PlanError, match='the next iteration needs it; 13 was'):
        check_plan(profile, changed(plan, -1, drop_before=position))


def test_what_crosses_is_not_recomputed(crossing: tuple[Profile, Plan]) -> None:
    profile, plan = crossing
    fields = {'swap_out_before': -1, 'swap_in_before': -1}
    again = changed(plan, -1, action=Action.RECOMPUTE, **fields)
    with pytest.raises(PlanError, match='recomputed, but nothing makes it'):
        check_plan(profile, again)


def test_what_crosses_is_back_for_the_update(crossing: tuple[Profile, Plan]) -> None:
    profile, plan = crossing
    with pytest.raises(PlanError, match='must not come after first backward use'):
        check_plan(profile, changed(plan, -1, needed_before=13))


def test_a_replay_needs_its_parameter(crossing: tuple[Profile, Plan]) -> None:
    profile, _ = crossing
    plan = make_plan(profile, 2**40, 'swap-all', cross_iteration=True)
    (recipe,) = (r for r in profile.recipes if r.operation == 0)
    parameter = next(s for s in recipe.inputs if profile.storages[s].persistent)
    entry = next(e for e in plan.maps if e.storage == parameter)
    replay = Replay(6, 0, frees=(0,))
    assert entry.release_before <= 6 < entry.needed_before
    kept = changed(plan, 0, action=Action.KEEP, **dict.fromkeys(FIELDS, -1))
    with pytest.raises(PlanError, match=f'needs storage {parameter}, which is not'):
        check_plan(profile, with_replays(kept, replay))


def test_a_plan_for_another_profile(swapped: Plan) -> None:
    other = toys.chain(nbytes=9 * MIB)
    with pytest.raises(PlanError, match='was made for profile'):
        simulate(other, swapped)


# -- mutations ----------------------------------------------------------------------
MUST_REFUSE = {
    # (action, field, change): no such plan can be right, because the kernel
    # chooses the first or last position there is.
    (Action.KEEP, 'drop_before', -1),  # some operation still reads it
    (Action.SWAP, 'swap_out_before', -1),  # forward still reads it
    (Action.SWAP, 'needed_before', +1),  # somebody reads it before
    (Action.SWAP, 'drop_before', -1),
    (Action.RECOMPUTE, 'release_before', -1),  # forward or program holds it
    (Action.RECOMPUTE, 'needed_before', -1),  # the replay is elsewhere
    (Action.RECOMPUTE, 'needed_before', +1),
    (Action.RECOMPUTE, 'drop_before', -1),
    *((Action.KEEP, field, change) for field in FIELDS[:4] for change in (-1, 1)),
    *((Action.RECOMPUTE, FIELDS[i], change) for i in (0, 2) for change in (-1, 1)),
}


def mutations(plan: Plan) -> Iterator[tuple[MapPlan, str, int, Plan]]:
    for index, entry in enumerate(plan.maps):
        for field in FIELDS:
            for change in (-1, 1):
                value = getattr(entry, field) + change
                yield entry, field, change, changed(plan, index, **{field: value})


def random_plan(seed: int) -> tuple[Profile, Plan]:
    rng = random.Random(seed)
    profile = toys.random_network(seed, rng.randint(1, 7))
    problem = make_problem(profile)
    actions = [
        rng.choice([KEEP, SWAP, RECOMPUTE] if r else [KEEP, SWAP])
        for r in problem.recomputable
    ]
    search = Search(problem, rng.randint(1, problem.in_core_peak_bytes))
    candidate = search.evaluate(np.array(actions, np.int64))
    search = Search(problem, max(search.limit_bytes, candidate.peak_bytes))
    return profile, search.finish('test', search.evaluate(candidate.action))


def is_valid(profile: Profile, plan: Plan) -> bool:
    try:
        loads = check_plan(profile, plan)
    except PlanError:
        return False
    assert simulate(profile, plan).peak_bytes == max(loads)
    return True


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_every_mutation_of_a_map_is_refused_or_still_valid(seed: int) -> None:
    profile, plan = random_plan(seed)
    assert is_valid(profile, plan)
    for entry, field, change, mutated in mutations(plan):
        valid = is_valid(profile, mutated)
        if (entry.action, field, change) in MUST_REFUSE:
            assert not valid, (entry, field, change)
        if field == 'swap_in_before' and entry.swap_in_before == entry.needed_before:
            assert not valid or change < 0
        if field == 'release_before' and entry.release_before == entry.swap_out_before:
            assert not valid or change > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_replay_is_needed(seed: int) -> None:
    """Left out, moved or without its frees or keeps, it is missed."""
    profile, plan = random_plan(seed)
    for i, replay in enumerate(plan.replays):
        left, right = plan.replays[:i], plan.replays[i + 1 :]
        assert not is_valid(profile, with_replays(plan, *left, *right))
        for change in (-1, 1):
            moved = dataclasses.replace(replay, before=replay.before + change)
            assert not is_valid(profile, with_replays(plan, *left, moved, *right))
        for name in ('keeps', 'frees'):
            if getattr(replay, name):
                less = dataclasses.replace(replay, **{name: ()})  # type: ignore[arg-type]
                assert not is_valid(profile, with_replays(plan, *left, less, *right))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_peak_is_sharp(seed: int) -> None:
    profile, plan = random_plan(seed)
    check_plan(profile, plan, plan.predicted_peak_bytes)
    with pytest.raises(PlanError, match=f'limit is {plan.predicted_peak_bytes - 1}'):
        check_plan(profile, plan, plan.predicted_peak_bytes - 1)
