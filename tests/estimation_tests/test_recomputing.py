"""Recipes of the recording as the device would have them."""

import dataclasses

import pytest
from support import networks

from chainer_hybridmem.forecasting.estimation import (
    Estimator,
    SamplePair,
    load_device_model,
    lower_to_cudnn,
)
from chainer_hybridmem.forecasting.estimation.costs import LRN, with_whole_forwards
from chainer_hybridmem.planning.planners import PLANNERS, make_plan
from chainer_hybridmem.planning.records.profile_file import check_profile
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem


def by_operation(profile):
    return {recipe.operation: recipe for recipe in profile.recipes}


def test_a_whole_forward_reads_what_the_function_has_read(profiles):
    recorded = profiles[6]
    whole = with_whole_forwards(recorded)
    check_profile(whole)
    assert not any(recipe.covers for recipe in whole.recipes)
    changed = 0
    for before, after in zip(recorded.recipes, whole.recipes, strict=True):
        op = recorded.operations[before.operation]
        if not before.covers:
            assert after == before
            continue
        changed += 1
        assert set(after.inputs) == set(op.reads)
        assert after.products == before.products
        assert after.seconds == op.device_seconds
        products = sum(recorded.storages[s].nbytes for s in after.products)
        assert after.peak_bytes >= products
    assert changed > 3


def test_what_forward_drops_is_made_on_the_way(profiles):
    """The ReLU behind a normalisation is two replays instead of one."""
    passes = make_problem(profiles[6])
    whole = make_problem(with_whole_forwards(profiles[6]))
    assert (whole.recomputable == passes.recomputable).all()
    covering = next(r for r in profiles[6].recipes if len(r.covers) > 1)
    inside = covering.covers[-2]
    made = {
        whole.profile.storages[s].producer
        for s in by_operation(whole.profile)[covering.operation].inputs
    }
    assert inside in made


@pytest.mark.parametrize('recompute', ['whole', 'pass'])
def test_plans_are_executable(pair, recompute):
    model = load_device_model('v100-16gb-pcie3')
    estimator = dataclasses.replace(Estimator.make(pair, model), recompute=recompute)
    profile = estimator.profile(64)
    check_profile(profile)
    assert any(recipe.covers for recipe in profile.recipes) == (recompute == 'pass')
    problem = make_problem(profile)
    limit = (least_memory(problem)[0] + problem.in_core_peak_bytes) // 2
    for planner in PLANNERS:
        if planner not in networks.BLIND:
            options = networks.OPTIONS.get(planner, {})
            plan = make_plan(problem, limit, planner, **options)
            check_plan(profile, plan, limit)


@pytest.mark.parametrize('convolution', ['im2col', 'cudnn'])
def test_local_responses_are_one_kernel_on_a_gpu(pair, convolution):
    model = load_device_model('v100-16gb-pcie3')
    estimator = Estimator.make(pair, model, convolution)
    whole, passes = (
        dataclasses.replace(estimator, recompute=recompute).profile(64)
        for recompute in ('whole', 'pass')
    )
    operation = next(op for op in whole.operations if op.function == LRN).index
    before, after = (by_operation(p)[operation] for p in (whole, passes))
    assert (before.covers, after.covers) == ((), (operation,))
    assert after.seconds < 0.7 * before.seconds
    assert (before.inputs, before.products) == (after.inputs, after.products)
    assert before.peak_bytes == after.peak_bytes


def test_a_pass_needs_nothing_but_its_products(profiles):
    lowered = lower_to_cudnn(profiles[6])
    for recipe in lowered.recipes:
        if recipe.covers:
            products = sum(lowered.storages[s].nbytes for s in recipe.products)
            assert recipe.peak_bytes == products


def test_passes_that_cover_different_functions_count_as_whole(profiles):
    def shorter(recipe):
        cut = len(recipe.covers) > 1
        return dataclasses.replace(recipe, covers=()) if cut else recipe

    small = dataclasses.replace(
        profiles[4], recipes=tuple(map(shorter, profiles[4].recipes))
    )
    estimate = SamplePair.match(small, profiles[6], (4, 6)).at(6)
    found, whole = by_operation(estimate), by_operation(with_whole_forwards(estimate))
    for recipe in profiles[6].recipes:
        if len(recipe.covers) > 1:
            assert found[recipe.operation] == whole[recipe.operation]
            assert found[recipe.operation].covers == ()
        else:
            assert found[recipe.operation].covers == recipe.covers


def test_what_is_modelled_is_told(pair):
    model = load_device_model('v100-16gb-pcie3')
    assert Estimator.make(pair).profile(6).device['recompute'] == 'recorded'
    assert Estimator.make(pair, model).profile(6).device['recompute'] == 'pass'


def test_recorded_recipes_do_not_change_without_a_model(profiles, pair):
    estimate = Estimator.make(pair).profile(6)
    assert [r.covers for r in estimate.recipes] == [
        r.covers for r in profiles[6].recipes
    ]
