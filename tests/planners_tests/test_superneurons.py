"""The static policy, and what it does where a chain needs too much memory."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from support import toys

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.planners.superneurons import superneurons
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Candidate,
    Search,
    is_convolution,
    least_memory,
)
from chainer_hybridmem.planning.search.repairs import give_up_recomputes
from chainer_hybridmem.planning.simulation import Problem, make_problem

MIB = toys.MIB


def mixed(layers: int = 8) -> Profile:
    """Every second layer is a convolution."""
    profile = toys.chain(layers, seconds=[1.0, 0.1] * (layers // 2))
    return with_convolutions(profile, range(0, layers, 2))


def with_convolutions(profile: Profile, nodes: range) -> Profile:
    operations = tuple(
        dataclasses.replace(op, label=f'/{op.index}/Convolution2DFunction')
        if op.index in nodes or op.forward in nodes
        else op
        for op in profile.operations
    )
    return dataclasses.replace(profile, operations=operations)


@pytest.mark.parametrize(
    ('function', 'expected'),
    [
        ('Convolution2DFunction', True),
        ('Deconvolution2DFunction', True),
        ('ConvolutionND', True),
        ('BatchNormalization', False),
        ('ReLU', False),
    ],
)
def test_what_counts_as_a_convolution(function: str, expected: bool) -> None:
    assert is_convolution(function) is expected


def test_keeps_from_the_output_swaps_convolutions_recomputes_the_rest() -> None:
    plan = make_plan(mixed(), 65 * MIB, 'superneurons')
    actions = [m.action for m in plan.maps]
    first_kept = actions.index(Action.KEEP)
    assert first_kept > 1
    assert actions[first_kept:] == [Action.KEEP] * (8 - first_kept)
    static = [Action.SWAP, Action.RECOMPUTE] * 4
    assert actions[:first_kept] == static[:first_kept]
    assert plan.options == {'given_up_recomputes': 0}


def test_one_more_map_kept_would_not_fit() -> None:
    problem = make_problem(mixed())
    plan = superneurons(problem, 65 * MIB)
    codes = {Action.KEEP: KEEP, Action.SWAP: SWAP, Action.RECOMPUTE: RECOMPUTE}
    action = np.array([codes[m.action] for m in plan.maps], np.int64)
    action[[m.action for m in plan.maps].index(Action.KEEP) - 1] = KEEP
    assert not Search(problem, 65 * MIB).evaluate(action).fits


def test_a_swap_in_starts_with_the_convolution_before() -> None:
    """Convolutions run backward at 9, 11, 13, 15; never earlier than that."""
    profile = mixed()
    plan = make_plan(profile, 65 * MIB, 'superneurons')
    lead = {12: 11, 13: 11, 14: 13, 15: 13, 11: 9, 10: 9, 9: 8, 8: 8}
    swapped = [m for m in plan.maps if m.action is Action.SWAP]
    assert swapped
    for entry in swapped:
        assert entry.swap_in_before >= lead[entry.needed_before]


def greedy_workspaces() -> Problem:
    """Ten maps that would all be recomputed, with 15 MiB of workspace each time."""
    return make_problem(toys.chain(10, workspace=15 * MIB))


def test_recomputes_are_given_up_until_it_fits() -> None:
    problem = greedy_workspaces()
    least, _ = least_memory(problem)
    counts = []
    for limit in range(least, least + 20 * MIB, MIB):
        plan = make_plan(problem, limit, 'superneurons')
        check_plan(problem.profile, plan, limit)
        counts.append(plan.options['given_up_recomputes'])
        assert plan.count(Action.SWAP) <= counts[-1]
    assert counts[0] > 0
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


def test_the_map_needed_nearest_to_the_worst_operation_goes_first() -> None:
    problem = greedy_workspaces()
    least, _ = least_memory(problem)
    search = Search(problem, least)
    seen: list[Candidate] = []
    evaluate = search.evaluate

    def evaluate_and_note(action: np.ndarray, free: int = -1) -> Candidate:
        seen.append(evaluate(action, free))
        return seen[-1]

    search.evaluate = evaluate_and_note  # type: ignore[method-assign]
    last, given_up = give_up_recomputes(search, search.fill(RECOMPUTE))
    assert last is seen[-1]
    assert last.fits
    assert given_up == len(seen) - 1 > 1
    for before, after in itertools.pairwise(seen):
        assert not before.fits
        (flipped,) = np.nonzero(before.action != after.action)[0]
        assert (before.action[flipped], after.action[flipped]) == (RECOMPUTE, SWAP)
        distance = abs(problem.arrays.first_use - before.worst)
        recomputed = np.nonzero(before.action == RECOMPUTE)[0]
        assert distance[flipped] == distance[recomputed].min()


@pytest.mark.parametrize('seed', range(12))
def test_it_fits_wherever_swap_all_does(seed: int) -> None:
    problem = make_problem(toys.random_network(seed, 8))
    least, _ = least_memory(problem)
    plan = make_plan(problem, least, 'superneurons')
    check_plan(problem.profile, plan, least)
