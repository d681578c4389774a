"""Late swap-ins move earlier, as far as memory lets them, and never else."""

from __future__ import annotations

import dataclasses

import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.lab.planners.feedback import (
    STEP,
    moved_earlier,
    noticeable,
    reachable,
    rehearsed,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate

MIB = toys.MIB


def late_plan(limit: int = 85 * MIB) -> tuple[Problem, Plan]:
    """The running example, all swapped, every swap-in as late as can be.

    Operations 6 to 11 are the backward ones of layers 5 to 0; map m is needed at
    11 - m, or at 10 - m by the layer behind it.
    """
    problem = make_problem(toys.chain())
    plan = make_plan(problem, limit, 'swap-all')
    maps = tuple(
        dataclasses.replace(m, swap_in_before=m.needed_before) for m in plan.maps
    )
    plan = dataclasses.replace(plan, maps=maps)
    seconds = simulate(problem, plan).total_seconds
    return problem, dataclasses.replace(plan, predicted_seconds=seconds)


def positions(plan: Plan) -> dict[int, int]:
    return {m.storage: m.swap_in_before for m in plan.maps if m.action is Action.SWAP}


def test_a_late_swap_in_begins_an_operation_earlier_at_least() -> None:
    problem, plan = late_plan()
    before = positions(plan)
    moved = moved_earlier(problem, plan, {1: 1e-6})
    after = positions(moved)
    assert after[1] == before[1] - 1
    assert {s: k for s, k in after.items() if s != 1} == {
        s: k for s, k in before.items() if s != 1
    }
    assert moved.predicted_seconds < plan.predicted_seconds
    assert moved.predicted_seconds == simulate(problem, moved).total_seconds
    assert moved.replays == plan.replays


def test_by_as_many_operations_as_it_was_late() -> None:
    """Backward operations take 2 s, and 1 s more where compute waits for a copy."""
    problem, plan = late_plan()
    steps = {0.5: 1, 2.9: 1, 3.1: 2, 6.1: 3}
    for late, operations in steps.items():
        moved = moved_earlier(problem, plan, {0: late})
        assert positions(plan)[0] - positions(moved)[0] == operations


def test_copies_in_front_of_it_are_taken_along() -> None:
    """The link is one queue: nobody is overtaken."""
    problem, plan = late_plan()
    moved = moved_earlier(problem, plan, {0: 6.1})
    order = sorted(positions(moved).items(), key=lambda item: -item[0])
    starts = [k for _, k in order]
    assert starts == sorted(starts)
    assert positions(moved)[1] < positions(plan)[1]


def test_memory_is_the_end_of_it() -> None:
    problem = make_problem(toys.chain())
    least, _ = least_memory(problem)
    plan = make_plan(problem, least, 'swap-all')
    late = dict.fromkeys(positions(plan), 100.0)
    moved = moved_earlier(problem, plan, late)
    check_plan(problem.profile, moved, least)
    assert moved_earlier(problem, moved, late) is moved


def test_who_is_not_swapped_is_not_late() -> None:
    problem, plan = late_plan()
    maps = tuple(
        dataclasses.replace(
            m, action=Action.KEEP, swap_out_before=-1, release_before=-1,
            swap_in_before=-1, needed_before=-1,
        ) if m.storage == 2 else m
        for m in plan.maps
    )  # fmt: skip
    plan = dataclasses.replace(plan, maps=maps)
    assert moved_earlier(problem, plan, {2: 5.0, -1: 5.0, 999: 5.0}) is plan
    assert moved_earlier(problem, plan, {}) is plan


@pytest.mark.parametrize('planner', ['swap-all-unscheduled', 'superneurons', 'hybrid'])
@pytest.mark.parametrize('seed', range(6))
def test_of_any_planner_under_any_limit(seed: int, planner: str) -> None:
    """Feedback settles; every plan on the way is valid and inside the limit."""
    problem = make_problem(toys.random_network(seed, 8))
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    options = {'steps': 200} if planner == 'hybrid' else {}
    for limit in (least, (least + most) // 2, most - 1):
        try:
            plan = make_plan(problem, limit, planner, **options)
        except InfeasibleError:
            continue
        late = dict.fromkeys(positions(plan), 0.7)
        for _ in range(len(problem.arrays.seconds) * (len(plan.maps) + 1)):
            moved = moved_earlier(problem, plan, late)
            if moved is plan:
                break
            check_plan(problem.profile, moved, limit)
            assert moved.predicted_peak_bytes <= limit
            b0 = problem.arrays.first_backward
            for old, new in zip(plan.maps, moved.maps, strict=True):
                assert new.swap_in_before <= old.swap_in_before
                if new.action is Action.SWAP:
                    assert new.swap_in_before >= max(b0, new.release_before)
                assert dataclasses.replace(new, swap_in_before=0) == (
                    dataclasses.replace(old, swap_in_before=0)
                )
            plan = moved
        assert moved is plan


def test_everybody_reaches_what_swap_all_does() -> None:
    """As early as memory allows, in order of need, is where wishes end."""
    problem, plan = late_plan()
    wanted = dict.fromkeys(positions(plan), 0)
    best = make_plan(problem, plan.memory_limit_bytes, 'swap-all')
    assert reachable(problem, plan, wanted) == positions(best)


def test_rehearsals_never_make_a_plan_slower() -> None:
    problem, plan = late_plan()
    assert rehearsed(problem, plan, 0) is plan
    seconds = [rehearsed(problem, plan, n).predicted_seconds for n in range(12)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]
    best = make_plan(problem, plan.memory_limit_bytes, 'swap-all')
    assert seconds[-1] == pytest.approx(best.predicted_seconds)


def test_what_is_noticed() -> None:
    """Copies take 1 s; a hundredth of that is nothing, and so are other storages."""
    problem, _ = late_plan()
    late = {0: 0.009, 1: 0.011, 2: STEP, 77: 9.0}
    assert noticeable(problem, late) == {1: 0.011, 2: STEP}
