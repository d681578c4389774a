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


def test_figures_are_told_with_their_units():
    rows = [
        tables.Row('peak', '{peak:bytes} of {limit:bytes}'),
        tables.Row('planning', '{took:seconds}, {plans:plan}'),
        tables.Row('overhead', '{over:difference} in {name}'),
    ]
    figures = {'peak': 2**20, 'limit': 2**30, 'took': 1.5, 'plans': 1, 'over': 0.125}
    assert tables.told(rows, {**figures, 'name': 'a {brace}'}) == [
        ('peak', '1.0 MiB of 1.0 GiB'),
        ('planning', '1.500 s, 1 plan'),
        ('overhead', '+12.5% in a {brace}'),
    ]


def test_a_row_of_nothing_is_left_out_and_what_is_not_known_is_said():
    row = tables.Row('disk', '{disk:bytes} / {seen:bytes}', 'disk')
    for disk in (0, None):
        assert tables.told([row], {'disk': disk, 'seen': 1}) == []
    with pytest.raises(KeyError):  # a slip in the name
        tables.told([row], {})
    known = {'disk': 1024, 'seen': None}
    assert tables.told([row], known) == [('disk', '1.0 KiB / -')]
    assert tables.told([row], known, {'bytes': '?'}) == [('disk', '1.0 KiB / ?')]


def test_every_row_has_all_columns():
    with pytest.raises(ValueError):
        tables.table(['a', 'b'], [['1']])
