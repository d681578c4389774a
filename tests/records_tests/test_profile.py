"""Profiles: types, JSON, and what damaged files are told."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.planning.records.profile import (
    Category,
    Link,
    Operation,
    Phase,
    Profile,
    Recipe,
    Storage,
)
from chainer_hybridmem.planning.records.profile_file import (
    check_profile,
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.simulation import make_problem

NAMES: dict[str, list[str]] = {}
for name, kind in (
    ('operations', Operation),
    ('storages', Storage),
    ('recipes', Recipe),
):
    NAMES[name] = [field.name for field in dataclasses.fields(kind)]

BODY: dict[str, Any] = json.loads(serialise_profile(toys.random_network(6, 7)))


def body() -> dict[str, Any]:
    return copy.deepcopy(BODY)


def read(damaged: dict[str, Any]) -> Profile:
    return parse_profile(json.dumps(damaged))


def put(what: str, index: int, field: str, value: Any) -> dict[str, Any]:
    """The example file with one value replaced."""
    damaged = body()
    damaged[what][index][NAMES[what].index(field)] = value
    return damaged


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 9))
def test_json_and_back(seed: int, nodes: int) -> None:
    profile = toys.random_network(seed, nodes)
    check_profile(profile)
    again = parse_profile(serialise_profile(profile))
    assert again == profile
    assert serialise_profile(again) == serialise_profile(profile)
    assert again.fingerprint() == profile.fingerprint()


def test_the_example_is_fine() -> None:
    assert serialise_profile(read(body())) == json.dumps(BODY)


HEADER = ('format', 'version')


@pytest.mark.parametrize('key', [k for k in BODY if k not in HEADER])
def test_a_missing_key_is_named(key: str) -> None:
    damaged = body()
    del damaged[key]
    with pytest.raises(FormatError, match=f"it lacks '{key}'"):
        read(damaged)


def test_another_format_and_version_are_refused_with_both_values() -> None:
    with pytest.raises(
        FormatError, match=r"'other/thing'; 'chainer_hybridmem/profile'"
    ):
        read({**body(), 'format': 'other/thing'})
    with pytest.raises(FormatError, match=r'has version 99 .* reads version 1'):
        read({**body(), 'version': 99})


WRONG_KIND = {
    'operations': {
        'index': ['0', None, 1.0],
        'label': [1, None],
        'phase': ['sideways', None],
        'device_seconds': ['1', None, [1]],
        'reads': [None, 3, [None], [1.5]],
        'workspace_bytes': [1.5, '1'],
        'specs': [[1], None],
        'first_event': [None, 1.0],
    },
    'storages': {
        'nbytes': [1.5, '1', None, True],
        'category': ['feature', 1],
        'backward_uses': [3, ['3']],
        'slots': [[1], [[0, 'output']], [[0, 'nowhere', 0]], [[0, 'output', 1.5]]],
    },
    'recipes': {
        'operation': [None, '0'],
        'inputs': [None, [0.5]],
        'exact': [1, None, 'yes'],
        'seconds': ['fast', None],
        'attributes': [[1], 'mask'],
    },
}


@pytest.mark.parametrize(
    ('what', 'field', 'value'),
    [
        (what, field, value)
        for what, fields in WRONG_KIND.items()
        for field, values in fields.items()
        for value in values
    ],
)
def test_a_wrong_type_is_refused(what: str, field: str, value: Any) -> None:
    with pytest.raises(FormatError):
        read(put(what, 1, field, value))


FAR = 10**6


@pytest.mark.parametrize(
    ('what', 'index', 'field', 'value', 'message'),
    [
        ('operations', 1, 'index', 2, 'operation 1 says it is 2'),
        ('operations', 1, 'device_seconds', math.nan, 'takes nan seconds'),
        ('operations', 1, 'device_seconds', -1e-9, 'takes -1e-09 seconds'),
        ('operations', 1, 'device_seconds', math.inf, 'takes inf seconds'),
        ('operations', 1, 'forward', 1, 'differentiates operation 1'),
        ('operations', 1, 'forward', -2, 'differentiates operation -2'),
        ('operations', 1, 'host_seconds', -1.0, 'issued in -1.0 seconds'),
        ('operations', 1, 'host_seconds', math.nan, 'issued in nan seconds'),
        ('operations', 1, 'workspace_bytes', -1, '-1 bytes workspace'),
        ('operations', 1, 'reads', [FAR], 'touches storages'),
        ('storages', 1, 'allocated_at', FAR, 'lives from event'),
        ('storages', 1, 'freed_at', FAR, 'lives from event'),
        ('storages', 1, 'id', 2, 'storage 1 is'),
        ('storages', 1, 'nbytes', -1, 'storage 1 is'),
        ('storages', 1, 'producer', FAR, 'storage 1 is used by'),
        ('storages', 1, 'producer', -2, 'storage 1 is used by'),
        ('storages', 1, 'backward_uses', [FAR], 'storage 1 is used by'),
        ('storages', 1, 'forward_uses', [-2], 'storage 1 is used by'),
        ('storages', 1, 'releasable_from', FAR, 'storage 1 is'),
        ('recipes', 1, 'inputs', [FAR], 'unknown storages'),
        ('recipes', 1, 'products', [-1], 'unknown storages'),
        ('recipes', 1, 'products', [], 'makes something else'),
        ('recipes', 1, 'operation', FAR, 'out of range'),
        ('recipes', 1, 'operation', -1, 'out of range'),
        ('recipes', 1, 'seconds', math.nan, 'out of range'),
        ('recipes', 1, 'seconds', -0.5, 'out of range'),
        ('recipes', 1, 'seconds', math.inf, 'out of range'),
        ('recipes', 1, 'covers', [-1, 1], 'covers (-1, 1)'),
        ('recipes', 1, 'covers', [1, FAR], 'covers (1, '),
        ('recipes', 1, 'covers', [1, 1], 'covers (1, 1)'),
    ],
)
def test_contradictions_are_named(
    what: str, index: int, field: str, value: Any, message: str
) -> None:
    with pytest.raises(FormatError) as caught:
        read(put(what, index, field, value))
    assert message in str(caught.value)


def test_dependencies_with_a_cycle_are_refused() -> None:
    profile = toys.chain(3)
    recipe = dataclasses.replace(profile.recipes[0], inputs=(2,))
    looped = dataclasses.replace(profile, recipes=(recipe, *profile.recipes[1:]))
    with pytest.raises(FormatError, match=r'operation 0 needs storage 2.* a cycle'):
        parse_profile(serialise_profile(looped))


@pytest.mark.parametrize('event', [0, FAR, -FAR])
def test_an_event_of_nothing(event: int) -> None:
    damaged = body()
    damaged['events'][3] = event
    with pytest.raises(FormatError, match='there is no such storage'):
        read(damaged)


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('latency_seconds', -1.0),
        ('latency_seconds', math.nan),
        ('d2h_bytes_per_second', 0.0),
        ('h2d_bytes_per_second', -5.0),
        ('h2d_bytes_per_second', math.nan),
        ('d2h_bytes_per_second', math.inf),
        ('latency_seconds', math.inf),
        ('duplex_share', 0.0),
        ('d2h_compute_share', 1.01),
        ('h2d_compute_share', math.nan),
        ('issue_seconds', -1e-6),
        ('ranks', 0),
    ],
)
def test_a_link_that_cannot_be(field: str, value: float) -> None:
    damaged = body()
    damaged['link'][field] = value
    with pytest.raises(FormatError, match=f'its link has {field} .*; it must be'):
        read(damaged)


def twice(body: dict[str, Any]) -> None:
    body['events'].insert(4, body['events'][3])


def backwards(body: dict[str, Any]) -> None:
    events = body['events']
    freed = next(-e for e in events if e < 0)
    first, second = events.index(freed), events.index(-freed)
    events[first], events[second] = -freed, freed
    storage = body['storages'][freed - 1]
    storage[NAMES['storages'].index('allocated_at')] = second
    storage[NAMES['storages'].index('freed_at')] = first


def after_the_end(body: dict[str, Any]) -> None:
    body['graph_end_event'] = len(body['events']) + 1


def two_recipes(body: dict[str, Any]) -> None:
    body['recipes'].append(body['recipes'][0])


@pytest.mark.parametrize(
    ('damage', 'words'),
    [
        (twice, 'comes twice'),
        (backwards, 'freed before it is allocated'),
        (after_the_end, 'its graph ends at event'),
        (two_recipes, 'has two recipes'),
    ],
)
def test_parts_that_contradict_each_other(
    damage: Callable[[dict[str, Any]], None], words: str
) -> None:
    damaged = body()
    damage(damaged)
    with pytest.raises(FormatError, match=words):
        read(damaged)


@pytest.mark.parametrize('link', [{}, None, [], {'speed': 1}, 'fast'])
def test_a_link_without_figures(link: Any) -> None:
    with pytest.raises(FormatError, match='its link lacks latency_seconds'):
        read({**body(), 'link': link})


def test_a_link_of_another_shape() -> None:
    link = body()['link']
    with pytest.raises(FormatError, match="an unknown figure 'speed'"):
        read({**body(), 'link': {**link, 'speed': 1}})
    with pytest.raises(FormatError, match='TypeError'):
        read({**body(), 'link': {**link, 'latency_seconds': None}})
    for ranks in (1.5, True, 'two'):
        with pytest.raises(FormatError, match='ranks: int was expected'):
            read({**body(), 'link': {**link, 'ranks': ranks}})


def test_an_iteration_without_operations() -> None:
    with pytest.raises(FormatError, match='no operation'):
        read({**body(), 'operations': []})


# -- properties ---------------------------------------------------------------------
def test_feature_maps_are_what_a_plan_can_decide_about() -> None:
    storage = Storage(0, 8, Category.FEATURE_MAP, 'x', 0, 0, 1, (), (3,), 1)
    assert storage.plannable
    for change in (
        {'category': Category.WORKSPACE},
        {'producer': -1},
        {'backward_uses': ()},
        {'releasable_from': -1},
    ):
        assert not dataclasses.replace(storage, **change).plannable  # type: ignore[arg-type]


def test_derived_numbers() -> None:
    profile = toys.chain(3)
    assert profile.first_backward == 3
    assert profile.compute_seconds == pytest.approx(9.1)
    assert [s.id for s in profile.feature_maps()] == [0, 1, 2]
    assert profile.operations[0].function == 'Layer'
    forward = [op for op in profile.operations if op.phase is Phase.FORWARD]
    only_forward = dataclasses.replace(profile, operations=tuple(forward))
    assert only_forward.first_backward == 3


def test_the_fingerprint_is_of_structure_not_of_times() -> None:
    profile = toys.chain(3)
    assert toys.chain(3, seconds=2.0).fingerprint() == profile.fingerprint()
    assert toys.chain(3, bandwidth=1.0).fingerprint() == profile.fingerprint()
    for other in (toys.chain(4), toys.chain(3, nbytes=8), toys.chain(3, function='F')):
        assert other.fingerprint() != profile.fingerprint()


def test_seconds_of_a_copy() -> None:
    link = Link(0.5, 10.0, 20.0)
    assert link.d2h_seconds(40) == 4.5
    assert link.h2d_seconds(40) == 2.5


def test_a_shared_link_in_a_file() -> None:
    profile = toys.chain(3)
    link = dataclasses.replace(profile.link, ranks=4)
    shared = dataclasses.replace(profile, link=link)
    assert parse_profile(serialise_profile(shared)).link == link


# -- arbitrary damage ---------------------------------------------------------------
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**62, 2**63, 2**70, -(2**63)]),
    st.floats(),
    st.text(max_size=3),
)
anything = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.text(max_size=3), scalars, max_size=2),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_file_it_is_read_or_refused(data: st.DataObject) -> None:
    """One place anywhere in the file is replaced by anything."""
    damaged: Any = body()
    at, keys = damaged, []
    while isinstance(at, dict | list) and at and (not keys or data.draw(st.booleans())):
        choices = sorted(at) if isinstance(at, dict) else range(len(at))
        keys.append(data.draw(st.sampled_from(choices)))
        parent, at = at, at[keys[-1]]
    parent[keys[-1]] = data.draw(anything)
    try:
        profile = read(damaged)
        make_problem(profile)
    except FormatError:
        return
    check_profile(profile)


def test_what_crosses_iterations_survives_a_file() -> None:
    profile = toys.with_persistent(toys.chain(), 1)
    assert len(profile.persistent_storages()) > 1
    assert parse_profile(serialise_profile(profile)) == profile
    assert profile.fingerprint() == toys.chain().fingerprint()


def test_parameters_beyond_what_the_iteration_starts_with() -> None:
    profile = toys.with_persistent(toys.chain(), 1)
    broken = dataclasses.replace(profile, initial_bytes=toys.MIB)
    with pytest.raises(FormatError, match='starts with 1048576 bytes'):
        check_profile(broken)


def test_a_parameter_that_the_update_does_not_use() -> None:
    profile = toys.with_persistent(toys.chain(), 1)
    state = dataclasses.replace(profile.storages[-1], backward_uses=(8,))
    broken = dataclasses.replace(profile, storages=(*profile.storages[:-1], state))
    expected = r'operations \(8,\); those after backward are \[12\]'
    with pytest.raises(FormatError, match=expected):
        check_profile(broken)
