"""Tables that forget objects which die."""

from __future__ import annotations

import sys
from typing import Any

from chainer_hybridmem.training.chainer_access.graph import ByOwner
from chainer_hybridmem.training.execution.ledger import LiveFunctions


class Owner:
    """Equal to every other, and not hashable."""

    def __eq__(self, other: object) -> bool:
        return True


def test_a_value_is_found_by_the_object_itself() -> None:
    table: ByOwner[int] = ByOwner()
    owner = Owner()
    table[owner] = 1
    assert table.get(owner) == 1 and owner in table
    assert table.get(Owner()) is None and Owner() not in table
    table[owner] = 2
    assert table.get(owner) == 2 and list(table.owners()) == [owner]


def test_an_entry_goes_with_its_object() -> None:
    table: ByOwner[int] = ByOwner()
    functions = LiveFunctions()
    owner, other = Owner(), Owner()
    table[owner], table[other] = 1, 2
    functions.know(owner)
    assert len(table.by_id) == 2 and len(functions.by_id) == 1
    del owner
    assert list(table.by_id) == [id(other)] and not functions.by_id


def test_python_runs_no_code_where_an_entry_goes() -> None:
    """In which a signal would be lost."""
    table: ByOwner[int] = ByOwner()
    functions = LiveFunctions()
    owners = [Owner()]
    table[owners[0]] = 1
    functions.know(owners[0])
    called: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == 'call':
            called.append(frame.f_code.co_name)

    former = sys.getprofile()
    sys.setprofile(note)
    owners.clear()
    sys.setprofile(former)
    assert not called and not table.by_id and not functions.by_id
