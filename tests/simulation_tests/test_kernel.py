"""What the compiled inner loop does at its edges."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable

import numpy as np
import pytest
from support import toys

from chainer_hybridmem.errors import FormatError, PlanError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Plan, Replay
from chainer_hybridmem.planning.records.profile import Link, Profile
from chainer_hybridmem.planning.search.annealing import actions_of
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    LATE,
    PASSED,
    RECOMPUTE,
    SWAP,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.planning.simulation.timeline import positions_from_plan

hybrid = importlib.import_module('chainer_hybridmem.planning.planners.hybrid')
MIB = toys.MIB


def test_a_map_without_a_recipe_cannot_be_recomputed() -> None:
    """A planner's mistake does not fit; it does not crash."""
    node = toys.Node((), exact=False, reads_inputs=False, reads_outputs=True)
    problem = make_problem(toys.network([node]))
    assert not problem.recomputable.any()
    candidate = Search(problem, 2**40).evaluate(np.array([RECOMPUTE], np.int64))
    assert not candidate.fits
    assert candidate.seconds == float('inf')


def test_a_chain_does_not_grow_with_the_number_of_paths() -> None:
    """40 diamonds have 2**40 paths; each operation runs once per chain."""
    parents: list[list[int]] = [[]]
    for i in range(40):
        parents += [[3 * i], [3 * i], [3 * i + 1, 3 * i + 2]]
    problem = make_problem(toys.graph(parents))
    search = Search(problem, 2**50)
    candidate = search.evaluate(search.fill(RECOMPUTE))
    assert len(search.positions(candidate).program) <= 3 * len(parents)


def assignment_of(search: Search, plan: Plan) -> np.ndarray:
    """The (M,) actions of a plan, with LATE or PASSED for what a replay frees."""
    action = actions_of(plan)
    passed = {storage for replay in plan.replays for storage in replay.frees}
    for m, entry in enumerate(plan.maps):
        if action[m] == RECOMPUTE and entry.storage in passed:
            first = search.problem.arrays.first_use[m]
            action[m] = LATE if entry.needed_before == first else PASSED
    return action


def seconds_of(search: Search, action: list[int]) -> float:
    """Of a plan with these actions; the timeline and the plan itself say the same."""
    plan = search.finish('test', search.evaluate(np.array(action)))
    assert simulate(search.problem, plan).total_seconds == plan.predicted_seconds
    again = search.evaluate(assignment_of(search, plan))
    assert again.seconds == plan.predicted_seconds
    return plan.predicted_seconds


def test_what_is_late_leaves_its_room_to_what_is_dear() -> None:
    """Two maps would stay after the first chain; only one fits, the cheap one."""
    nodes = [
        toys.Node((), reads_inputs=False, reads_outputs=True, seconds=10.0),
        toys.Node(((0, 0),), reads_inputs=False, reads_outputs=True),
        toys.Node(((1, 0),), reads_inputs=False, reads_outputs=True),
        toys.Node(((2, 0),), reads_inputs=False, reads_outputs=True),
    ]
    nodes[2] = dataclasses.replace(nodes[2], workspace=20 * MIB)
    nodes[3] = dataclasses.replace(nodes[3], workspace=40 * MIB)
    problem = make_problem(toys.network(nodes), rules={'*': 'no swap'})
    limit = least_memory(problem)[0]
    search = Search(problem, limit)
    found = {}
    for cheap in (RECOMPUTE, LATE):
        found[cheap] = seconds_of(search, [RECOMPUTE, cheap, RECOMPUTE, KEEP])
    assert found[RECOMPUTE] - found[LATE] == pytest.approx(9)
    for few in (hybrid.FEW_ASSIGNMENTS, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hybrid, 'FEW_ASSIGNMENTS', few)
            plan = make_plan(problem, limit, 'hybrid', steps=1000)
        assert plan.predicted_seconds == found[LATE]


def test_what_has_passed_one_replay_stays_of_the_next() -> None:
    """The first chain has room for one of two maps, the second one for both."""
    nodes = [
        toys.Node(
            ((i - 1, 0),) if i else (),
            reads_inputs=False,
            reads_outputs=True,
            seconds=seconds,
            workspace=mib * MIB,
        )
        for i, (seconds, mib) in enumerate([(10.0, 0), (5.0, 0), (1.0, 0), (1.0, 20)])
    ]
    problem = make_problem(toys.network(nodes), rules={'*': 'no swap'})
    limit = least_memory(problem)[0] + 10 * MIB
    search = Search(problem, limit)
    found = {}
    for second in (RECOMPUTE, LATE, PASSED):
        found[second] = seconds_of(search, [RECOMPUTE, second, LATE, RECOMPUTE])
    assert found[PASSED] == min(found.values())
    assert found[LATE] - found[PASSED] == pytest.approx(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid, 'FEW_ASSIGNMENTS', 0)
        plan = make_plan(problem, limit, 'hybrid', steps=1000)
    assert plan.predicted_seconds <= found[PASSED]


def negative_time(profile: Profile) -> Profile:
    first = dataclasses.replace(profile.operations[0], device_seconds=-1.0)
    return dataclasses.replace(profile, operations=(first, *profile.operations[1:]))


def uses_out_of_order(profile: Profile) -> Profile:
    first = dataclasses.replace(profile.storages[0], backward_uses=(11, 10))
    return dataclasses.replace(profile, storages=(first, *profile.storages[1:]))


def with_a_cycle(profile: Profile) -> Profile:
    first = dataclasses.replace(profile.recipes[0], inputs=(2,))
    return dataclasses.replace(profile, recipes=(first, *profile.recipes[1:]))


def dead_link(profile: Profile) -> Profile:
    return dataclasses.replace(profile, link=Link(0.0, 0.0, 1.0))


def endless_link(profile: Profile) -> Profile:
    return dataclasses.replace(profile, link=Link(math.inf, 1.0, 1.0))


@pytest.mark.parametrize(
    ('damage', 'words'),
    [
        (negative_time, r'operation 0 takes -1\.0 seconds'),
        (uses_out_of_order, r'used at \(11, 10\)'),
        (with_a_cycle, 'have a cycle'),
        (dead_link, r'its link has d2h_bytes_per_second 0\.0; it must be above zero'),
        (endless_link, 'latency_seconds inf; it must be zero or more, and finite'),
    ],
)
def test_a_profile_made_by_hand_is_checked_like_a_file(
    damage: Callable[[Profile], Profile], words: str
) -> None:
    damaged = damage(toys.chain())
    with pytest.raises(FormatError, match=words):
        make_plan(damaged, '60MiB')
    plan = make_plan(toys.chain(), '60MiB', 'swap-all')
    with pytest.raises(FormatError, match=words):
        simulate(damaged, plan)


def test_a_map_forward_reads_after_backward_has_begun_is_left_alone() -> None:
    """Two losses, two backwards: the second forward reads a map of the first."""
    profile = toys.chain(3)
    operations = list(profile.operations)
    operations[3] = dataclasses.replace(
        operations[3], phase=operations[0].phase, forward=-1
    )
    operations[2] = dataclasses.replace(
        operations[2], phase=profile.operations[3].phase, forward=1
    )
    storages = list(profile.storages)
    storages[1] = dataclasses.replace(storages[1], forward_uses=(3,))
    both = dataclasses.replace(
        profile, operations=tuple(operations), storages=tuple(storages)
    )
    assert [s.id for s in make_problem(both).maps] == [0]


def test_an_iteration_that_ends_with_forward() -> None:
    """Evaluation: no backward, nothing to plan, nothing to crash."""
    profile = toys.chain(3)
    end = profile.operations[3].first_event
    cut = dataclasses.replace(
        profile,
        operations=profile.operations[:3],
        storages=tuple(
            dataclasses.replace(
                s, backward_uses=(), freed_at=s.freed_at if s.freed_at < end else -1
            )
            for s in profile.storages[:3]
        ),
        events=profile.events[:end],
        graph_end_event=end,
    )
    plan = make_plan(cut, '1GiB', 'swap-all')
    assert plan.maps == ()
    assert plan.predicted_seconds == pytest.approx(3)


def test_the_least_memory_is_that_of_single_operations() -> None:
    """45 MiB: B1 to B4 read two maps beside two gradients and 5 MiB."""
    assert least_memory(make_problem(toys.chain())) == (45 * MIB, 7)
    problem = make_problem(toys.chain(3, nbytes=[10 * MIB, 40 * MIB, 10 * MIB]))
    # B1: 5 + gradients of maps 2 and 1 (10 + 40) + maps 1 and 0.
    assert least_memory(problem) == (105 * MIB, 4)


def test_the_limit_of_the_kernel_is_inclusive() -> None:
    problem = make_problem(toys.chain())
    for limit, fits in ((45 * MIB, True), (45 * MIB - 1, False)):
        search = Search(problem, limit)
        assert search.evaluate(search.fill(SWAP)).fits is fits


@pytest.mark.parametrize(
    'replay', [Replay(99, 0), Replay(-1, 0), Replay(8, 99), Replay(8, -1), Replay(8, 7)]
)
def test_replays_of_a_strange_plan_are_refused(replay: Replay) -> None:
    problem = make_problem(toys.chain())
    plan = make_plan(problem, 45 * MIB, 'swap-all')
    with pytest.raises(PlanError):
        positions_from_plan(problem, dataclasses.replace(plan, replays=(replay,)))


@pytest.mark.parametrize('field', ['swap_out_before', 'needed_before', 'drop_before'])
@pytest.mark.parametrize('value', [-2, 14, 10**18])
def test_positions_of_a_strange_plan_are_refused(field: str, value: int) -> None:
    profile = toys.chain()
    plan = make_plan(profile, 45 * MIB, 'swap-all')
    entry = dataclasses.replace(plan.maps[0], **{field: value})  # type: ignore[arg-type]
    strange = dataclasses.replace(plan, maps=(entry, *plan.maps[1:]))
    with pytest.raises(PlanError, match=f'{field} lies outside the 13 operations'):
        simulate(profile, strange)
