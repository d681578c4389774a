"""What the user says is done, or it is said why not."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning.planners import check_options, make_plan
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.plan_file import serialise_plan

MIB = toys.MIB
LIMIT = '1GiB'


def actions(profile, mapping, limit=LIMIT):
    plan = make_plan(profile, limit, 'manual', actions=mapping)
    return ''.join(entry.action.value[0] for entry in plan.maps)


@pytest.fixture
def profile():
    return toys.chain(5)


def labels(profile):
    return [storage.label for storage in profile.feature_maps()]


def test_without_a_word_everything_is_kept(profile):
    assert actions(profile, None) == actions(profile, {}) == 'kkkkk'


def test_the_last_pattern_counts(profile):
    some = labels(profile)[1]
    assert actions(profile, {'*': 'swap'}) == 'sssss'
    assert actions(profile, {'*': 'swap', some: 'recompute'}) == 'srsss'
    assert actions(profile, {some: 'recompute', '*': 'swap'}) == 'sssss'


def test_one_of_many_by_the_number_of_its_operation(profile):
    assert actions(profile, {'*@2': 'swap', '*@4': 'recompute'}) == 'kkskr'


def test_the_plan_says_what_it_was_told(profile):
    told = {'*': 'swap', '*@1': 'keep'}
    plan = make_plan(profile, LIMIT, 'manual', actions=told)
    assert plan.options == {'actions': told}
    assert json.loads(serialise_plan(plan))['options']['actions'] == told
    assert plan.count(Action.KEEP) == 1


@pytest.mark.parametrize('wrong', [3, 0, '', [], False, 'swap', [('*', 'swap')]])
def test_actions_are_a_mapping(wrong, profile):
    with pytest.raises(OptionError, match='a mapping from patterns to actions'):
        actions(profile, wrong)
    with pytest.raises(OptionError, match='a mapping from patterns to actions'):
        check_options('manual', {'actions': wrong})


def test_actions_are_checked_before_anything_is_recorded():
    with pytest.raises(OptionError, match="'\\*' is 'swop'"):
        check_options('manual', {'actions': {'*': 'swop'}})
    chosen = check_options('manual', {'actions': {'*': 'swap'}})
    assert chosen == {'actions': {'*': 'swap'}}


def test_what_does_not_fit_is_refused(profile):
    with pytest.raises(InfeasibleError, match="'manual'"):
        actions(profile, {'*@4': 'swap'}, '50MiB')


@pytest.mark.parametrize(
    'told, complaint',
    [
        ({'*Conv*': 'swap'}, r"of 5 is called '\*Conv\*'.*--maps"),
        ({'*': 'swop'}, "'swop'; one of keep, swap, recompute"),
        ({'*': None}, 'None; one of keep'),
        (['swap'], "\\['swap'\\]; a mapping"),
        ('swap', "'swap'; a mapping"),
    ],
)
def test_what_is_no_order_is_refused(profile, told, complaint):
    with pytest.raises(OptionError, match=complaint):
        actions(profile, told)


def test_names_that_are_nearly_there_are_named(profile):
    nearly = labels(profile)[3][:-1]
    with pytest.raises(OptionError, match=labels(profile)[3]):
        actions(profile, {nearly: 'swap'})


def test_what_cannot_be_made_again_is_not_recomputed():
    profile = toys.graph([[], [0]], transient=[False, False])
    recipes = tuple(
        dataclasses.replace(recipe, exact=recipe.operation != 1)
        for recipe in profile.recipes
    )
    profile = dataclasses.replace(profile, recipes=recipes)
    with pytest.raises(OptionError, match='cannot be made again exactly'):
        actions(profile, {'*': 'recompute'})
