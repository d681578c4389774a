"""Tables that compiled code finds by one address."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.jit_table import (
    Bools,
    Floats,
    Floats2,
    Ints,
    Ints2,
    Shorts,
    Table,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Everything(Table):
    count: int
    wide: Floats2
    share: float
    whole: Ints
    rows: Ints2
    says: bool
    small: Shorts
    flags: Bools
    single: Floats


_floats = types.float64[::1]


@compiled(types.void(Everything.compiled, _floats), apart=True)
def read(t: Everything, result: np.ndarray) -> None:
    """Every member, the last element of each array, and a row of one."""
    result[0], result[1], result[2] = t.count, t.share, t.says
    result[3] = t.wide[t.wide.shape[0] - 1, t.wide.shape[1] - 1]
    result[4], result[5] = t.whole[len(t.whole) - 1], t.rows[1][2]
    result[6], result[7] = t.small[len(t.small) - 1], t.flags[len(t.flags) - 1]
    result[8] = t.single[len(t.single) - 1]
    t.single[0] = 100.0


def make(**changed: Any) -> Everything:
    members = {
        'count': -7,
        'wide': np.arange(12.0).reshape(3, 4),
        'share': 0.25,
        'whole': np.arange(5),
        'rows': np.arange(6).reshape(2, 3),
        'says': True,
        'small': np.arange(3, dtype=np.int32),
        'flags': np.array([False, True]),
        'single': np.array([2.5, -1.5]),
    }
    return Everything(**{**members, **changed})


def contents(table: Everything) -> list[float]:
    result = np.zeros(9)
    read(table, result)
    return result.tolist()


EXPECTED = [-7, 0.25, 1, 11, 4, 5, 2, 1, -1.5]


def test_compiled_code_reads_every_member_and_writes_into_arrays() -> None:
    table = make()
    assert contents(table) == EXPECTED
    assert table.single[0] == 100.0
    other = dataclasses.replace(table, count=8, says=False, whole=np.array([9]))
    assert contents(other) == [8, 0.25, 0, 11, 9, 5, 2, 1, -1.5]


@pytest.mark.parametrize(
    'again', [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
def test_a_copy_outlives_what_it_was_made_of(again: Any) -> None:
    table = again(make())
    rest = [make(single=np.full(2, 3.0)) for _ in range(100)]  # in the same places
    assert contents(table) == EXPECTED
    assert len(rest) == 100


def test_arrays_of_other_layouts_and_types_are_copied() -> None:
    wide = np.arange(24.0).reshape(3, 8)[:, ::2]
    table = make(wide=wide, whole=np.arange(5, dtype=np.int16), flags=[0, 1])
    assert table.wide.flags.c_contiguous and table.whole.dtype == np.int64
    assert contents(table) == [-7, 0.25, 1, 22, 4, 5, 2, 1, -1.5]


def test_an_array_with_other_axes_is_refused() -> None:
    with pytest.raises(TypeError, match='rows has 1 axes, not 2'):
        make(rows=np.arange(6))
