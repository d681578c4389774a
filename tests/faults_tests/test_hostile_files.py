"""Files from strangers: refused with one clear error, or usable. Nothing else."""

from __future__ import annotations

import copy
import gzip
import json
import math
import pathlib
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError, HybridMemoryError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.plan_file import parse_plan, serialise_plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.simulation import simulate

PROFILE = toys.chain(4)
PLAN = make_plan(PROFILE, '1GiB', 'swap-all')
TEXTS = {'profile': serialise_profile(PROFILE), 'plan': serialise_plan(PLAN)}
PARSERS: dict[str, Any] = {'profile': parse_profile, 'plan': parse_plan}

evil = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**300, -(10**300)]
    ),
    st.sampled_from([0.5, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf]),
    st.sampled_from(['', 'forward', '\0', '\ud800', 'x' * 10_000, '__class__', '1']),
    st.sampled_from([[], {}, [[]], [None], {'a': []}, [0] * 100]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to everything inside of a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            found += places(inner, (*path, key))
    return found


def mutated(draw: Any, body: Any) -> None:
    """Changes one value somewhere, or takes it away, or doubles it."""
    *way, last = draw(st.sampled_from(places(body)))
    for key in way:
        body = body[key]
    kind = draw(st.sampled_from(['replace', 'replace', 'replace', 'remove', 'double']))
    if kind == 'replace':
        body[last] = copy.deepcopy(draw(evil))
    elif kind == 'remove':
        del body[last]
    elif isinstance(body, list):
        body.insert(last, copy.deepcopy(body[last]))
    else:
        body[f'{last}2'] = body[last]


def read(kind: str, text: str) -> Any:
    """What a parser makes of a text; None if it refuses it as it should."""
    try:
        return PARSERS[kind](text)
    except FormatError as error:
        assert str(error) and len(str(error)) < 100_000
        return None


@pytest.mark.parametrize('kind', TEXTS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_values_that_make_no_sense(kind: str, data: Any) -> None:
    body = json.loads(TEXTS[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        mutated(data.draw, body)
    result = read(kind, json.dumps(body))
    if result is not None:
        use(result)


def use(result: Any) -> None:
    """What was read can be planned and simulated, or is refused then."""
    if isinstance(result, Profile):
        assert parse_profile(serialise_profile(result))
    else:
        assert parse_plan(serialise_plan(result))
    try:
        if isinstance(result, Profile):
            make_plan(result, '1GiB', 'swap-all')
        else:
            simulate(PROFILE, result)
    except HybridMemoryError:
        pass


@pytest.mark.parametrize('kind', TEXTS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_texts_that_are_cut_or_patched(kind: str, data: Any) -> None:
    text = TEXTS[kind]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 20, len(text))))
    patch = data.draw(st.text(max_size=8) | st.sampled_from(['[' * 50, '{"a":' * 50]))
    result = read(kind, text[:start] + patch + text[end:])
    if result is not None:
        use(result)


@pytest.mark.parametrize('kind', TEXTS)
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_text(kind: str, data: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / 'file.json'
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r'file\.json'):
        (library.load_profile if kind == 'profile' else library.load_plan)(str(path))


@pytest.mark.parametrize('kind', TEXTS)
@pytest.mark.parametrize(
    'text',
    [
        '[' * 1_000_000,
        '{"a":' * 1_000_000,
        '{"format":' + '[' * 100_000 + ']' * 100_000 + '}',
        '1' * 1_000_000,
        '{"format": 1' + '0' * 10_000 + '}',
    ],
    ids=['lists', 'objects', 'closed lists', 'digits', 'number'],
)
def test_deep_and_long(kind: str, text: str) -> None:
    assert read(kind, text) is None


@pytest.mark.parametrize('kind', TEXTS)
@pytest.mark.parametrize('field', ['options', 'device'])
def test_free_fields_are_no_way_in(kind: str, field: str) -> None:
    """They may hold anything that JSON can, up to its depth."""
    body = json.loads(TEXTS[kind])
    if field not in body:
        return
    deep: Any = 'end'
    for _ in range(500):
        deep = [deep]
    body[field] = {'deep': deep, '__class__': 'os.system'}
    result = read(kind, json.dumps(body))
    assert result is None or getattr(result, field)['__class__'] == 'os.system'


def test_a_compressed_file_is_not_opened(tmp_path: pathlib.Path) -> None:
    """Only the package's own are decompressed: nobody sends a small one that grows."""
    path = tmp_path / 'bomb.json.gz'
    path.write_bytes(gzip.compress(b' ' * 50_000_000))
    tracemalloc.start()
    with pytest.raises(FormatError, match='cannot be read'):
        library.load_profile(str(path))
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_large_file_takes_bounded_memory(tmp_path: pathlib.Path) -> None:
    path = tmp_path / 'large.json'
    with path.open('wb') as file:
        file.truncate(100 * files.MAXIMUM_FILE_BYTES)  # takes no space
    tracemalloc.start()
    with pytest.raises(FormatError, match='is larger than'):
        library.load_plan(str(path))
    assert tracemalloc.get_traced_memory()[1] < 5 * files.MAXIMUM_FILE_BYTES
    tracemalloc.stop()
