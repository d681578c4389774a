"""The simulator on examples worked out by hand.

All on the running example (:func:`toys.chain`): layer i makes map i of 10 MiB in
1 s, its backward takes 2 s and reads maps i and i - 1, the update takes 0.1 s. 5 MiB
are always there, gradients are 10 MiB each, two of them alive at a time.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import toys

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.timeline import Timeline
from chainer_hybridmem.planning.search.candidates import KEEP, RECOMPUTE, SWAP, Search
from chainer_hybridmem.planning.simulation import make_problem, simulate

MIB = toys.MIB


def plan_for(profile: Profile, limit_mib: int, *actions: int) -> Plan:
    """The plan the kernel makes of given actions."""
    search = Search(make_problem(profile), limit_mib * MIB)
    return search.finish('test', search.evaluate(np.array(actions, np.int64)))


def in_mib(timeline: Timeline) -> list[int]:
    return [load // MIB for load in timeline.load_bytes]


def lane(timeline: Timeline, kind: str) -> list[tuple[int, float, float]]:
    """(storage, start, end) of one kind of interval."""
    return [
        (i.storage, round(i.start_seconds, 9), round(i.end_seconds, 9))
        for i in timeline.intervals
        if i.kind == kind
    ]


def test_in_core_takes_the_sum_of_all_operations() -> None:
    """Every map stays: 6 maps, two gradients, 5 MiB."""
    profile = toys.chain()
    plan = make_plan(profile, 85 * MIB, 'in-core')
    timeline = simulate(profile, plan)
    assert timeline.total_seconds == pytest.approx(6 + 12 + 0.1)
    assert in_mib(timeline) == [15, 25, 35, 45, 55, 65, 75, 85, 85, 85, 85, 85, 75]
    assert timeline.stall_seconds == timeline.recompute_seconds == 0


def test_swap_all_in_just_enough_memory() -> None:
    """45 MiB: room for three maps beside two gradients, one prefetch at most.

    ::

        s        0  1  2  3  4  5  6  7  8  9 10   12   14 15   17 18   20 21   23   25
        compute  F0 F1 F2 F3 F4 F5 ...........|B5  |B4  |..|B3  |..|B2  |..|B1  |B0  |u
        d2h            m0 m1 m2 m3 m4 m5
        h2d                              m4 m5 m3       m2      m1      m0
    """
    profile = toys.chain()
    timeline = simulate(profile, make_plan(profile, 45 * MIB, 'swap-all'))
    assert timeline.total_seconds == pytest.approx(25.1)
    assert timeline.stall_seconds == pytest.approx(7)
    assert in_mib(timeline) == [15, 25, 35, 45, 45, 45, 45, 45, 45, 45, 45, 35, 15]
    assert timeline.peak_bytes == 45 * MIB
    outs = [(0, 2, 3), (1, 3, 4), (2, 4, 5), (3, 5, 6), (4, 6, 7), (5, 7, 8)]
    assert lane(timeline, 'swap-out') == outs
    ins = [(4, 8, 9), (5, 9, 10), (3, 10, 11), (2, 14, 15), (1, 17, 18), (0, 20, 21)]
    assert lane(timeline, 'swap-in') == ins
    stalls = [(4, 6, 7), (5, 7, 8), (4, 8, 9), (5, 9, 10)]
    stalls += [(2, 14, 15), (1, 17, 18), (0, 20, 21)]
    assert lane(timeline, 'stall') == stalls


def test_swap_ins_start_as_early_as_memory_allows() -> None:
    """10 MiB more than above hide every swap-in but the first two."""
    profile = toys.chain()
    plan = make_plan(profile, 55 * MIB, 'swap-all')
    assert [m.swap_in_before for m in plan.maps] == [9, 8, 6, 6, 6, 6]
    timeline = simulate(profile, plan)
    assert timeline.total_seconds == pytest.approx(22.1)
    # B5 runs with maps 5, 4 and 3, 2 prefetched; B4 with 4, 3 and 2; B3 with 3, 2, 1.
    assert in_mib(timeline)[6:] == [55, 55, 55, 55, 45, 35, 15]


def test_scheduling_moves_a_swap_in_over_a_short_operation() -> None:
    """Figure 9 of Ito et al.; copies take 2 s, B2 only 1 s, B3 8 s.

    ::

        s              14.5                22.5  23.5  24.5  25.5
        unscheduled    |B3                 |B2   |.....|B1
        h2d            |m1 ----|           |m0 --------|
        scheduled      |B3                 |B2   |B1         |B0
        h2d            |m1 ----|m0 ----|
    """
    profile = toys.chain(4, seconds=[1.0, 1.0, 0.5, 4.0], bandwidth=5.0 * MIB)
    plans = {
        name: make_plan(profile, 100 * MIB, name)
        for name in ('swap-all', 'swap-all-unscheduled')
    }
    early = simulate(profile, plans['swap-all'])
    late = simulate(profile, plans['swap-all-unscheduled'])
    assert early.total_seconds == pytest.approx(27.6)
    assert late.total_seconds == pytest.approx(28.6)
    first = [(2, 10.5, 12.5), (3, 12.5, 14.5), (1, 14.5, 16.5)]
    assert lane(early, 'swap-in') == [*first, (0, 16.5, 18.5)]
    assert lane(late, 'swap-in') == [*first, (0, 22.5, 24.5)]
    assert (0, 23.5, 24.5) in lane(late, 'stall')


def test_unscheduled_swap_ins_start_with_the_operation_before() -> None:
    profile = toys.chain()
    plan = make_plan(profile, 80 * MIB, 'swap-all-unscheduled')
    for entry in plan.maps:
        assert entry.swap_in_before == max(6, entry.needed_before - 1)


def test_memory_makes_forward_wait_for_a_copy() -> None:
    """45 MiB and copies of 2 s: F5 waits until map 1 has left.

    ::

        s        0  1  2  3  4  5  6  7  8    10    12    14
        compute  F0 F1 F2 F3 F4 ...F5 ....................|B5
        d2h            m0----m1----m2----m3----m4----m5----
    """
    profile = toys.chain(bandwidth=5.0 * MIB)
    plan = make_plan(profile, 45 * MIB, 'swap-all')
    assert [m.release_before for m in plan.maps] == [4, 5, 6, 6, 6, 6]
    timeline = simulate(profile, plan)
    outs = [(0, 2, 4), (1, 4, 6), (2, 6, 8), (3, 8, 10), (4, 10, 12), (5, 12, 14)]
    assert lane(timeline, 'swap-out') == outs
    stalls = lane(timeline, 'stall')
    assert stalls[0] == (1, 5, 6)
    assert stalls[1:5] == [(2, 7, 8), (3, 8, 10), (4, 10, 12), (5, 12, 14)]


def test_with_memory_forward_does_not_wait() -> None:
    """The same as above in 55 MiB: F5 only needs map 0 to have left."""
    profile = toys.chain(bandwidth=5.0 * MIB)
    plan = make_plan(profile, 55 * MIB, 'swap-all')
    assert [m.release_before for m in plan.maps] == [5, 6, 6, 6, 6, 6]
    assert lane(simulate(profile, plan), 'stall')[0] == (2, 6, 8)


def test_trimming_keeps_the_maps_whose_swap_out_is_exposed() -> None:
    """Maps 4 and 5 stay; of the 7 s of stalls in 45 MiB 3 s are left.

    ::

        s        0  1  2  3  4  5  6    8    10 11   13 14   16 17   19   21
        compute  F0 F1 F2 F3 F4 F5 B5   B4   |..|B3  |..|B2  |..|B1  |B0  |u
        d2h            m0 m1 m2 m3
        h2d                        m3        m2      m1      m0
    """
    profile = toys.chain()
    plan = make_plan(profile, 45 * MIB, 'swap-opt')
    assert [m.action for m in plan.maps] == [Action.SWAP] * 4 + [Action.KEEP] * 2
    timeline = simulate(profile, plan)
    assert timeline.total_seconds == plan.predicted_seconds == pytest.approx(21.1)
    assert lane(timeline, 'stall') == [(2, 10, 11), (1, 13, 14), (0, 16, 17)]
    assert lane(timeline, 'swap-in')[0] == (3, 6, 7)


def test_a_recompute_costs_its_replay_and_gains_its_bytes() -> None:
    """Map 0 is dropped before F2 and made again before B1, which reads it.

    ::

        s        0  1  2  3    5  6    8    10
        compute  F0 F1 F2 B2   r0 B1   B0   u
    """
    profile = toys.chain(3)
    plan = plan_for(profile, 45, RECOMPUTE, KEEP, KEEP)
    assert plan.maps[0].release_before == 2
    assert [(r.before, r.operation, r.keeps) for r in plan.replays] == [(4, 0, (0,))]
    timeline = simulate(profile, plan)
    assert timeline.total_seconds == pytest.approx(10.1)
    assert timeline.recompute_seconds == pytest.approx(1)
    assert lane(timeline, 'recompute') == [(-1, 5, 6)]
    # F2 without map 0; B1 with maps 1, 0 and two gradients.
    assert in_mib(timeline) == [15, 25, 25, 35, 45, 35, 15]


@pytest.mark.parametrize(
    ('limit_mib', 'replays', 'seconds', 'peak_mib'),
    [
        # Before B2: r0 r1, map 0 stays for B1.
        (65, [(3, 0, (0,), ()), (3, 1, (1,), ())], 11.1, 65),
        # Before B2: r0 r1, map 0 only passes; before B1: r0 again.
        (60, [(3, 0, (), ()), (3, 1, (1,), (0,)), (4, 0, (0,), ())], 12.1, 55),
    ],
)
def test_a_chain_keeps_what_it_passes_only_if_memory_allows(
    limit_mib: int, replays: list[object], seconds: float, peak_mib: int
) -> None:
    """Maps 0 and 1 are recomputed; map 2 and its gradient have 20 MiB."""
    profile = toys.chain(3, nbytes=[10 * MIB, 10 * MIB, 20 * MIB])
    plan = plan_for(profile, limit_mib, RECOMPUTE, RECOMPUTE, KEEP)
    found = [(r.before, r.operation, r.keeps, r.frees) for r in plan.replays]
    assert found == replays
    timeline = simulate(profile, plan)
    assert timeline.total_seconds == pytest.approx(seconds)
    assert timeline.peak_bytes == peak_mib * MIB


def test_a_swapped_source_comes_back_for_the_replay() -> None:
    """Map 1 is made of map 0 before B2, which does not read map 0 itself."""
    profile = toys.chain(3)
    plan = plan_for(profile, 60, SWAP, RECOMPUTE, KEEP)
    assert plan.maps[0].needed_before == 3
    assert plan.maps[0].drop_before == 6
    assert [(r.before, r.operation) for r in plan.replays] == [(3, 1)]


@pytest.mark.parametrize('action', [KEEP, SWAP])
def test_a_source_stays_longer_for_the_replay(action: int) -> None:
    """B2 is the last to read map 1; map 2 is made of it later, before B1."""
    nodes = [
        toys.Node((), reads_inputs=False),
        toys.Node(((0, 0),), reads_inputs=False, reads_outputs=True),
        toys.Node(((0, 0),), held=-1),
    ]
    profile = toys.network(nodes)
    assert profile.storages[1].backward_uses == (3,)
    plan = plan_for(profile, 80, action, RECOMPUTE)
    assert plan.maps[0].drop_before == 5
    assert [(r.before, r.operation, r.keeps) for r in plan.replays] == [(4, 1, (2,))]


def test_a_recomputed_source_is_made_once_and_stays() -> None:
    """Maps 1 and 2 are read by their own functions only: r0 r1 before B1."""
    nodes = [
        toys.Node((), reads_inputs=False, reads_outputs=True),
        toys.Node(((0, 0),), reads_inputs=False, reads_outputs=True),
        toys.Node(((1, 0),), reads_inputs=False, held=-1),
    ]
    plan = plan_for(toys.network(nodes), 80, RECOMPUTE, RECOMPUTE)
    replays = [(r.before, r.operation, r.keeps) for r in plan.replays]
    assert replays == [(4, 0, (1,)), (4, 1, (2,))]


def test_an_output_nobody_needs_is_freed_with_its_own_replay() -> None:
    """A function with two outputs runs again for the first one only."""
    nodes = [
        toys.Node((), outputs=(10 * MIB, 6 * MIB), reads_inputs=False),
        toys.Node(((0, 0),)),
        toys.Node(((0, 1), (1, 0)), reads_inputs=False, held=-1),
    ]
    profile = toys.network(nodes)
    problem = make_problem(profile)
    (first,) = (m.id for m in problem.maps)
    (replay,) = plan_for(profile, 60, RECOMPUTE).replays
    assert replay.keeps == (first,)
    assert replay.frees == (first + 1,)


def test_a_swapped_output_made_again_by_its_sibling_is_freed_at_once() -> None:
    nodes = [
        toys.Node((), outputs=(10 * MIB, 6 * MIB), reads_inputs=False),
        toys.Node(((0, 0), (0, 1))),
    ]
    profile = toys.network(nodes)
    first, second = (m.id for m in make_problem(profile).maps)
    (replay,) = plan_for(profile, 60, RECOMPUTE, SWAP).replays
    assert (replay.keeps, replay.frees) == ((first,), (second,))


def test_a_mask_is_a_source_of_its_own_recipe_and_not_made_again() -> None:
    """A dropout mask can be swapped or kept; recomputing it is not offered."""
    nodes = [
        toys.Node(()),
        toys.Node(((0, 0),), mask=3 * MIB, reads_inputs=False, reads_outputs=True),
        toys.Node(((1, 0),), reads_inputs=False, held=-1),
    ]
    profile = toys.network(nodes)
    problem = make_problem(profile)
    mask = next(s.id for s in profile.storages if s.nbytes == 3 * MIB)
    recomputable = {
        m.id: bool(r) for m, r in zip(problem.maps, problem.recomputable, strict=True)
    }
    assert not recomputable[mask]
    output = next(s for s in recomputable if s != mask and recomputable[s])
    actions = [RECOMPUTE if m.id == output else SWAP for m in problem.maps]
    plan = plan_for(profile, 80, *actions)
    assert [(r.operation, r.keeps) for r in plan.replays][-1] == (1, (output,))
    assert all(mask not in (*r.keeps, *r.frees) for r in plan.replays)


def test_what_is_held_until_its_last_use_is_kept_and_dropped_then() -> None:
    """Chainer has the inputs of the first backward function before a plan can act."""
    nodes = [toys.Node((), reads_outputs=True, held=3), toys.Node(((0, 0),))]
    profile = toys.network(nodes)
    output = profile.storages[1]
    assert output.releasable_from == max(output.backward_uses) + 1
    problem = make_problem(profile)
    assert [m.id for m in problem.maps] == [1]
    assert problem.arrays.allowed.tolist() == [[True, False, False]]
    search = Search(problem, 80 * MIB)
    assert search.fill(SWAP).tolist() == search.fill(RECOMPUTE).tolist() == [KEEP]
    plan = search.finish('test', search.evaluate(np.array([SWAP], np.int64)))
    assert plan.maps[0].action is Action.KEEP
    assert plan.maps[0].drop_before == output.releasable_from
    kept = dataclasses.replace(plan.maps[0], drop_before=-1)
    left = simulate(profile, dataclasses.replace(plan, maps=(kept,)))
    dropped = simulate(profile, plan)
    assert dropped.load_bytes[4] == left.load_bytes[4] - 10 * MIB  # in the update
    forced = make_problem(profile, rules={'*': 'swap'})  # no rule is about it
    assert forced.arrays.allowed.tolist() == [[True, False, False]]
    assert make_problem(profile, rules={'*': 'at most 0'}).rules


def test_a_map_that_is_held_into_backward_counts_until_the_graph_dies() -> None:
    """The program lets go of it in the update, the graph does not: no plan gains it."""
    nodes = [toys.Node((), reads_outputs=True, held=4), toys.Node(((0, 0),))]
    profile = toys.network(nodes)
    problem = make_problem(profile)
    assert [m.id for m in problem.maps] == []
    assert problem.in_core_peak_bytes == problem.arrays.fixed_peak.max()
    free = profile.storages[1].freed_at
    assert free >= profile.operations[4].first_event
    # Not freed by its own event: present during the update as well.
    assert problem.arrays.fixed_start[4] == (5 + 10 + 10) * MIB


def test_copies_pay_the_latency_of_the_link() -> None:
    node = toys.Node((), reads_inputs=False, reads_outputs=True)
    profile = toys.network([node], latency=0.25)
    timeline = simulate(profile, make_plan(profile, 60 * MIB, 'swap-all'))
    assert lane(timeline, 'swap-out') == [(1, 1, 2.25)]
    assert lane(timeline, 'swap-in') == [(1, 2.25, 3.5)]
    assert timeline.total_seconds == pytest.approx(3.5 + 2 + 0.1)


def test_memory_is_not_gained_from_a_map_the_program_holds() -> None:
    """35 MiB: map 0 is held until F4, so F3 waits for map 1 instead."""
    nodes = [
        toys.Node(
            ((i - 1, 0),) if i else (),
            reads_inputs=False,
            reads_outputs=True,
            workspace=0,
            held=3 if i == 0 else -2,
        )
        for i in range(5)
    ]
    profile = toys.network(nodes)
    plan = make_plan(profile, 35 * MIB, 'swap-all')
    assert [m.swap_out_before for m in plan.maps] == [4, 3, 4, 5, 5]
    assert [m.release_before for m in plan.maps] == [4, 3, 5, 5, 5]
    assert in_mib(simulate(profile, plan))[:5] == [15, 25, 35, 35, 35]
