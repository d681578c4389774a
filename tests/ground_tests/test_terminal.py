"""What is printed of names that others have chosen, and what C code prints."""

from __future__ import annotations

import ctypes
import types
import unicodedata

import pytest
from support import forks

from chainer_hybridmem.reporting.tables import named_values, table
from chainer_hybridmem.terminal import c_output_dropped, printable

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


TWO_THREADS = """
import ctypes, threading
from chainer_hybridmem.terminal import c_output_dropped

printf, begun, over = ctypes.CDLL(None).printf, threading.Event(), threading.Event()

def other():
    with c_output_dropped():
        begun.set()
        over.wait()
        printf(b'dropped by the other\\n')

thread = threading.Thread(target=other)
with c_output_dropped():
    thread.start()
    begun.wait()
    for _ in range(10_000):
        printf(b'dropped by both\\n')
    print('by Python', flush=True)
printf(b'dropped by the other\\n')
over.set()
thread.join()
printf(b'shown again\\n')
"""


def test_c_output_is_dropped_until_the_last_thread_leaves() -> None:
    done = forks.run('-c', TWO_THREADS)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines() == ['by Python', 'shown again']


def test_another_c_library_keeps_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lie in memory that nothing may be written to, or have no such name."""
    monkeypatch.setattr(ctypes, 'CDLL', lambda name: types.SimpleNamespace())
    with c_output_dropped():
        pass
