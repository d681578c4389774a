"""What is printed of names that others have chosen."""

from __future__ import annotations

import unicodedata

import pytest

from chainer_hybridmem.reporting.tables import named_values, table
from chainer_hybridmem.terminal import printable

STEERING = [
    *map(chr, range(32)),
    *map(chr, range(127, 160)),
    *map(chr, range(0x202A, 0x202F)),
    *map(chr, range(0x2066, 0x206A)),
    *'\u200e\u200f\u061c\u2028\u2029\ufeff\udc80',
]


@pytest.mark.parametrize('character', STEERING)
def test_what_steers_a_terminal_is_shown(character: str) -> None:
    shown = printable(f'a{character}b')
    assert shown.isascii() and shown.isprintable()
    assert shown[0] + shown[-1] == 'ab' and '\\' in shown
    if character == '\n':
        assert printable('a\nb', lines=True) == 'a\nb'


def test_names_of_all_languages_stay() -> None:
    for name in ('conv1/relu', 'Größe', '層', 'شبكة', 'नेटवर्क', 'می\u200cخواهم', '🙂'):
        assert printable(name) == unicodedata.normalize('NFC', name) == name


def test_a_cell_is_a_cell() -> None:
    text = table(['name', 'size'], [['a\x1b[2Jb\nc', '1']])
    assert len(text.splitlines()) == 3 and '\x1b' not in text
    lines = text.splitlines()
    assert len({len(line) for line in lines[1:]}) == 1, 'what is shown is aligned'
    text = named_values('a\u202eb', [('c\nd', '\x9be')])
    assert text.isascii() and len(text.splitlines()) == 3
