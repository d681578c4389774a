"""Pickles are data: what would run something, or never end, is refused in a line."""

import contextlib
import os
import pickle
import struct

import pytest

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.lab.importing import pickles
from chainer_hybridmem.lab.importing.pickles import Thing, read_pickle

ADMITTED = {
    'builtins set': lambda arguments: list(*arguments),
    'a Thing': lambda _: Thing(),
}


class Runs:
    """What unpickling would call."""

    def __init__(self, *called):
        self.called = called

    def __reduce__(self):
        return self.called[0], self.called[1:]


@pytest.mark.parametrize('protocol', range(3, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    'value',
    [
        None,
        [1, -1, 2**40, 1.5, True, 'text', b'bytes', ()],
        {'a': [{'b': (1, 2, 3, 4)}], 7: {}},
        [[0] * 3] * 3,
        list(range(2000)),
    ],
)
def test_data_comes_out_as_it_went_in(value, protocol):
    assert read_pickle(pickle.dumps(value, protocol), {}) == value


HOSTILE = {
    'system': (pickle.dumps(Runs(os.system, 'true')), "names '(posix|nt) system'"),
    'eval': (pickle.dumps(Runs(eval, '1')), "names 'builtins eval'"),
    'old global': (b"cos\nsystem\n(S'true'\ntR.", 'names|uses'),
    'old instance': (b"(S'true'\nios\nsystem\n.", 'uses'),
    'name as data': (b'\x80\x02cbuiltins\nset\n.', 'a name stands'),
    'name in a list': (b'\x80\x02]cbuiltins\nset\na.', 'a name stands'),
    'calls a number': (b'\x80\x02K\x01)R.', 'no name'),
    'attributes of a name': (b'\x80\x02cbuiltins\nset\n}b.', 'what is no object'),
    'attributes of a list': (b'\x80\x02]}b.', 'what is no object'),
    'numbered attributes': (b'\x80\x02ca\nThing\n)\x81}K\x01K\x02sb.', 'no names'),
    'persistent': (b'\x80\x02K\x01Q.', 'uses BINPERSID'),
    'extension': (b'\x80\x02\x82\x01.', 'uses EXT1|no pickle'),
    'nested key': (b'\x80\x02}(K\x01tK\x02s.', 'a key is a tuple'),
    'deep tuples': (b'\x80\x02)' + b'\x85' * 10**5 + b'.', 'levels deep'),
    'deep lists': (
        b'\x80\x02' + b']' * 10**5 + b'a' * (10**5 - 1) + b'.',
        'levels deep',
    ),
    'marks': (b'\x80\x02' + b'(' * 10**5 + b'.', 'a name stands'),
    'no mark': (b'\x80\x02K\x01t.', 'no pickle'),
    'empty stack': (b'\x80\x02\x86.', 'no pickle'),
    'memo': (b'\x80\x02h\x07.', 'no pickle'),
    'large memo': (b'\x80\x02]r\xff\xff\xff\x7f0h\x01.', 'no pickle'),
    'long': (b'\x80\x02\x8a\x14' + b'\x01' * 20 + b'.', '64 bits'),
    'promises bytes': (b'\x80\x04\x8e' + struct.pack('<Q', 2**60) + b'x.', 'no pickle'),
    'unending': (b'\x80\x02]' + b'0]' * 10, 'no pickle'),
    'text': (b'hello', 'no pickle'),
    'nothing': (b'', 'no pickle'),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_what_is_hostile_is_refused_in_a_line(name):
    data, says = HOSTILE[name]
    with pytest.raises(FormatError, match=says) as caught:
        read_pickle(data, ADMITTED)
    assert '\n' not in str(caught.value)


@pytest.mark.filterwarnings('ignore:invalid escape')
def test_each_byte_that_is_wrong_is_refused_or_harmless():
    data = pickle.dumps([{'a': [1, (2, 'x')]}, b'yz'], 2)
    for place in range(len(data)):
        for byte in range(256):
            damaged = data[:place] + bytes([byte]) + data[place + 1 :]
            with contextlib.suppress(FormatError):
                read_pickle(damaged, ADMITTED)


def test_sizes_are_bounded(monkeypatch):
    monkeypatch.setattr(pickles, 'MOST_OPCODES', 100)
    with pytest.raises(FormatError, match='more than 100 opcodes'):
        read_pickle(pickle.dumps(list(range(200))), {})
    monkeypatch.setattr(pickles.files, 'MAXIMUM_FILE_BYTES', 10)
    with pytest.raises(FormatError, match='10 are allowed'):
        read_pickle(pickle.dumps(list(range(200))), {})
