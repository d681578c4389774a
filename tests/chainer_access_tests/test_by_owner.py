"""Tables that forget objects which die, also where forgetting is broken off."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from chainer_hybridmem.chainer_access.graph import ByOwner
from chainer_hybridmem.execution.ledger import LiveFunctions


class Owner:
    """Equal to every other, and of a size that few objects have."""

    __slots__ = ('__weakref__', *(f'field{i}' for i in range(50)))

    def __eq__(self, other: object) -> bool:
        return True


class Broken(BaseException):
    """Ctrl-C, for instance."""


def break_off_forgetting(frame: FrameType, event: str, arg: Any) -> None:
    if frame.f_code.co_name == 'forget':
        raise Broken


def die_unnoticed(owners: list[Owner], monkeypatch: pytest.MonkeyPatch) -> Owner:
    """A new object at the place of one that has died; nobody could forget that one."""
    place = id(owners[0])
    dropped: list[Any] = []
    monkeypatch.setattr(sys, 'unraisablehook', lambda e: dropped.append(e.exc_type))
    traced = sys.gettrace()
    sys.settrace(break_off_forgetting)
    try:
        owners.clear()
    finally:
        sys.settrace(traced)
    assert dropped == [Broken]
    others = [Owner() for _ in range(1000)]
    return next(other for other in others if id(other) == place)


def test_values_of_the_dead_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table: ByOwner[int] = ByOwner()
    owners = [Owner()]
    table[owners[0]] = 1
    assert table.get(owners[0]) == 1 and owners[0] in table
    new = die_unnoticed(owners, monkeypatch)
    assert table.get(new) is None and new not in table
    table[new] = 2
    assert table.get(new) == 2


def test_functions_that_are_dead_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = LiveFunctions()
    owners = [Owner()]
    functions.know(owners[0]).note_run(Parameterless(), serial=3)
    new = die_unnoticed(owners, monkeypatch)
    assert not functions.is_known(new) and functions.find(new) is None
    assert functions.know(new).serial == -1


class Parameterless:
    """Reads nothing."""

    inputs = ()


def test_an_entry_goes_with_its_object() -> None:
    table: ByOwner[int] = ByOwner()
    owner = Owner()
    table[owner] = 1
    assert len(table.by_id) == 1
    del owner
    assert not table.by_id
