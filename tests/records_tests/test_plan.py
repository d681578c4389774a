"""Plans: JSON, counts, and what damaged files are told."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan, Replay
from chainer_hybridmem.planning.records.plan_file import parse_plan, serialise_plan
from chainer_hybridmem.planning.records.profile_file import serialise_profile
from chainer_hybridmem.planning.search.candidates import Search
from chainer_hybridmem.planning.simulation import make_problem

EXAMPLE = Plan(
    planner='test',
    options={'node_budget': 5, 'tree_complete': True},
    profile_fingerprint='0123456789abcdef',
    memory_limit_bytes=1000,
    maps=(
        MapPlan(0, Action.KEEP, drop_before=9),
        MapPlan(1, Action.SWAP, 2, 3, 5, 6, 8),
        MapPlan(2, Action.RECOMPUTE, release_before=3, needed_before=5, drop_before=7),
    ),
    replays=(Replay(5, 1, keeps=(2,), frees=(4,)),),
    predicted_seconds=12.0,
    predicted_peak_bytes=900,
    in_core_seconds=10.0,
    lower_bound_seconds=8.0,
    planning_seconds=0.25,
    simulations=17,
)
BODY: dict[str, Any] = json.loads(serialise_plan(EXAMPLE))


def body() -> dict[str, Any]:
    return copy.deepcopy(BODY)


def read(damaged: dict[str, Any]) -> Plan:
    return parse_plan(json.dumps(damaged))


def test_json_and_back() -> None:
    assert read(body()) == EXAMPLE
    text = serialise_plan(EXAMPLE)
    assert serialise_plan(parse_plan(text)) == text


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_random_plans_and_back(seed: int) -> None:
    rng = random.Random(seed)
    problem = make_problem(toys.random_network(seed, 6))
    actions = [rng.choice([0, 1, 2] if r else [0, 1]) for r in problem.recomputable]
    search = Search(problem, 2**50)
    plan = search.finish('test', search.evaluate(np.array(actions, np.int64)))
    assert parse_plan(serialise_plan(plan)) == plan


def test_numbers_of_actions_and_ratios() -> None:
    assert [EXAMPLE.count(action) for action in Action] == [1, 1, 1]
    assert EXAMPLE.overhead == pytest.approx(0.2)
    assert EXAMPLE.gap == pytest.approx(0.5)
    nothing = read({**body(), 'in_core_seconds': 0.0, 'lower_bound_seconds': 0.0})
    assert (nothing.overhead, nothing.gap) == (0, 0)


def test_another_format_and_version_are_refused_with_both_values() -> None:
    with pytest.raises(FormatError, match="'x/y'; 'chainer_hybridmem/plan' was"):
        read({**body(), 'format': 'x/y'})
    with pytest.raises(FormatError, match=r'has version 0 .* reads version 1'):
        read({**body(), 'version': 0})


def test_a_profile_is_not_a_plan() -> None:
    with pytest.raises(FormatError, match=r"'chainer_hybridmem/profile'; 'chainer_hyb"):
        parse_plan(serialise_profile(toys.chain(1)))


@pytest.mark.parametrize('key', [k for k in BODY if k not in ('format', 'version')])
def test_a_missing_key_is_named(key: str) -> None:
    damaged = body()
    del damaged[key]
    with pytest.raises(FormatError, match=f"it lacks '{key}'"):
        read(damaged)


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('memory_limit_bytes', -1),
        ('predicted_seconds', -1.0),
        ('predicted_seconds', math.nan),
        ('in_core_seconds', math.inf),
        ('lower_bound_seconds', -2.0),
        ('planning_seconds', math.nan),
        ('simulations', -1),
    ],
)
def test_a_figure_out_of_range_is_refused(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match=f'plan cannot be used: {key} is {value}'):
        read({**body(), key: value})


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('memory_limit_bytes', 'much'),
        ('memory_limit_bytes', None),
        ('memory_limit_bytes', math.nan),
        ('predicted_seconds', 'soon'),
        ('predicted_seconds', None),
        ('options', 3),
        ('options', 'fast'),
        ('maps', 3),
        ('maps', [[]]),
        ('maps', [[0, 'swap', 1, 2, 3]]),
        ('maps', [[0, 'burn', 1, 2, 3, 4, 5, 'ram']]),
        ('maps', [[0, 'swap', 1, 2, 3, 4, None, 'ram']]),
        ('maps', [[0, 'swap', 1, 2, 3, 4, 5.5, 'ram']]),
        ('maps', [[0, 'swap', 1, 2, 3, 4, 5, 'tape']]),
        ('replays', [[5, 1, [2]]]),
        ('replays', [[5, 1, 2, 4]]),
        ('replays', [[5, '1', [2], [4]]]),
        ('replays', {'a': 1}),
    ],
)
def test_a_wrong_type_is_refused(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match='plan cannot be used'):
        read({**body(), key: value})


def test_plans_of_planners_and_back() -> None:
    for name in ('pooch', 'superneurons'):
        plan = make_plan(toys.random_network(6, 7), '1TiB', name)
        assert parse_plan(serialise_plan(plan)) == plan


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_file_it_is_read_or_refused(data: st.DataObject) -> None:
    damaged: Any = body()
    at, keys = damaged, []
    while isinstance(at, dict | list) and at and (not keys or data.draw(st.booleans())):
        choices = sorted(at) if isinstance(at, dict) else range(len(at))
        keys.append(data.draw(st.sampled_from(choices)))
        parent, at = at, at[keys[-1]]
    parent[keys[-1]] = data.draw(st.one_of(scalars, st.lists(scalars, max_size=2)))
    try:
        plan = read(damaged)
    except FormatError:
        return
    assert isinstance(plan, Plan)
