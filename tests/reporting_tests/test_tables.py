"""Aligned text."""

import pytest

from chainer_hybridmem.reporting import tables


def test_no_rows():
    assert tables.table(['a', 'bc'], []) == 'a  bc\n-  --'
    assert tables.named_values('nothing', []) == 'nothing\n-------'


def test_columns_aligned_to_the_left():
    assert tables.table(['a', 'b', 'c'], [['1', '22', '33']], left=2) == (
        'a  b    c\n-  --  --\n1  22  33'
    )


def test_every_row_has_all_columns():
    with pytest.raises(ValueError):
        tables.table(['a', 'b'], [['1']])
