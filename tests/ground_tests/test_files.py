"""Reading what strangers send; writing what nobody sees half of."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
from typing import Any

import pytest
from support import toys

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library


class Colour(enum.Enum):
    RED = 'red'


@dataclasses.dataclass(frozen=True)
class Inner:
    numbers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Outer:
    colour: Colour
    inner: Inner
    inners: tuple[Inner, ...]
    key: int | str
    share: float
    yes: bool


EXAMPLE = Outer(Colour.RED, Inner((1, 2)), (Inner(()), Inner((3,))), 'a', 0.5, True)
ROW: list[Any] = ['red', [[1, 2]], [[[]], [[3]]], 'a', 0.5, True]


def test_a_row_and_back() -> None:
    assert files.row(EXAMPLE) == ROW
    assert files.unrow(Outer, json.loads(json.dumps(ROW))) == EXAMPLE


def test_a_whole_number_is_a_float_where_one_is_expected() -> None:
    assert files.unrow(Outer, [*ROW[:4], 1, True]).share == 1.0


@pytest.mark.parametrize(
    ('position', 'value'),
    [
        (0, 'green'), (0, None), (0, 1),
        (1, [1, 2]), (1, [['1']]), (1, [[1.5]]), (1, [[True]]), (1, []), (1, None),
        (2, [[1]]), (2, {}), (2, 'ab'),
        (3, None), (3, 1.5), (3, []),
        (4, '0.5'), (4, None), (4, []),
        (5, 1), (5, 'yes'), (5, None),
    ],
)  # fmt: skip
def test_a_wrong_type_is_refused(position: int, value: Any) -> None:
    row = list(ROW)
    row[position] = value
    with pytest.raises((TypeError, ValueError)):
        files.unrow(Outer, row)


@pytest.mark.parametrize('row', [[], ROW[:5], [*ROW, 1], {}, None, 'red'])
def test_a_row_of_the_wrong_length(row: Any) -> None:
    with pytest.raises(ValueError, match='Outer needs 6 values'):
        files.unrow(Outer, row)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', 'not JSON'),
        ('{"format": "f"', 'not JSON'),
        ('[]', "is list, not an object; 'f' was expected"),
        ('null', "is NoneType, not an object; 'f' was expected"),
        ('{}', "has no format; 'f' was expected"),
        ('{"format": "g", "version": 3}', "format 'g'; 'f' was expected"),
        ('{"format": "f"}', 'version None of f; this release reads version 3'),
        (
            '{"format": "f", "version": 4}',
            'version 4 of f; this release reads version 3',
        ),
        ('{"format": "f", "version": "3"}', "version '3' of f"),
        ('1' * 5000, 'not JSON'),
    ],
)
def test_headers_are_checked_with_both_values(text: str, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        files.parse(text, 'f', 3)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ('error', 'why'),
    [
        (KeyError('k'), "it lacks 'k'"),
        (TypeError('t'), 'TypeError: t'),
        (ValueError('v'), 'ValueError: v'),
    ],
)
def test_errors_of_unpacking_become_one(error: Exception, why: str) -> None:
    with (
        pytest.raises(FormatError, match=f'The plan .*{why}'),
        files.reading('plan'),
    ):
        raise error


def test_a_format_error_stays_as_it_is() -> None:
    error = FormatError('as it is')
    with pytest.raises(FormatError, match=r'^as it is$'), files.reading('plan'):
        raise error


def test_profiles_and_plans_on_disk(tmp_path: pathlib.Path) -> None:
    profile = toys.chain(3)
    plan = make_plan(profile, '1GiB', 'swap-all')
    library.save(profile, str(tmp_path / 'p.json'))
    library.save(plan, str(tmp_path / 'plan.json'))
    assert library.load_profile(str(tmp_path / 'p.json')) == profile
    assert library.load_plan(str(tmp_path / 'plan.json')) == plan
    assert sorted(p.name for p in tmp_path.iterdir()) == ['p.json', 'plan.json']


def test_each_loader_refuses_the_other_kind(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / 'p.json')
    library.save(toys.chain(2), path)
    with pytest.raises(
        FormatError, match=r"hybridmem/profile'; 'chainer_hybridmem/plan"
    ):
        library.load_plan(path)


def test_missing_unreadable_binary_and_unwritable(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FormatError, match=r'missing\.json cannot be read'):
        library.load_profile(str(tmp_path / 'missing.json'))
    with pytest.raises(FormatError, match='cannot be read'):
        library.load_profile(str(tmp_path))
    (tmp_path / 'binary').write_bytes(b'\xff\xfe\x00')
    with pytest.raises(FormatError, match='binary cannot be read'):
        library.load_plan(str(tmp_path / 'binary'))
    with pytest.raises(FormatError, match='cannot be written'):
        library.save(toys.chain(1), str(tmp_path / 'no' / 'folder'))


def test_files_too_large_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, 'MAXIMUM_FILE_BYTES', 10)
    (tmp_path / 'large').write_text('x' * 11)
    with pytest.raises(FormatError, match='large is larger than 10'):
        library.load_profile(str(tmp_path / 'large'))


def test_a_failed_write_leaves_the_old_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'p.json'
    path.write_text('old')

    def refuse(source: str, target: str) -> None:
        raise OSError('disk full')

    monkeypatch.setattr('os.replace', refuse)
    with pytest.raises(FormatError, match='disk full'):
        library.save(toys.chain(1), str(path))
    assert path.read_text() == 'old'


# -- a file that is not there -------------------------------------------------------
READERS = {
    'profile': library.load_profile,
    'plan': library.load_plan,
    'timeline': library.load_timeline,
}


@pytest.mark.parametrize('name', READERS)
def test_a_missing_file_is_not_taken_for_one_of_another_kind(
    name: str, tmp_path: pathlib.Path
) -> None:
    """``plan.json`` is near ``p.json``, and no profile."""
    paths = {kind: tmp_path / f'x{number}.json' for number, kind in enumerate(READERS)}
    for kind, path in paths.items():
        text = json.dumps({'format': f'chainer_hybridmem/{kind}', 'version': 1})
        path.write_text(text)
    (tmp_path / 'xy.json').write_text('{}')
    with pytest.raises(FormatError) as told:
        READERS[name](str(tmp_path / 'x.json'))
    assert f'Did you mean {paths[name]}?' in str(told.value)
    paths[name].unlink()
    with pytest.raises(FormatError, match='Name a file that is there') as told:
        READERS[name](str(tmp_path / 'x.json'))
    assert 'Did you mean' not in str(told.value)
