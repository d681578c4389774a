"""Files of minimalloc are read and written, and broken ones refused."""

from __future__ import annotations

import problems
import pytest
from hypothesis import given, settings
from support import toys

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.lab.pools import minimalloc
from chainer_hybridmem.planning.layouts import check_layout, exact, in_core_trace
from chainer_hybridmem.planning.layouts.offline import given as given_layout

EXAMPLE = """id,lower,upper,size
b1,0,3,4
b2,3,9,4
b3,0,9,4
b4,9,21,4
b5,0,21,4
"""


def test_the_example_of_minimalloc():
    trace, offsets = minimalloc.loads(EXAMPLE)
    assert offsets is None
    layout = exact(trace)
    assert layout.footprint_bytes == 12 and layout.optimal
    written, offsets = minimalloc.loads(minimalloc.dumps(trace, layout))
    assert offsets == layout.offsets
    check_layout(written, given_layout(written, offsets))


@settings(deadline=None)
@given(problems.lifetimes(10))
def test_what_is_written_is_read_again(trace):
    again, _ = minimalloc.loads(minimalloc.dumps(trace))
    assert again.sizes == trace.sizes and again.times == trace.times
    assert again.peak_load_bytes == trace.peak_load_bytes
    assert exact(again).footprint_bytes == exact(trace).footprint_bytes


def test_a_profile_goes_out_and_comes_back():
    trace = in_core_trace(toys.random_network(1, 12))
    again, _ = minimalloc.loads(minimalloc.dumps(trace))
    assert again.peak_load_bytes == trace.peak_load_bytes
    assert again.names == trace.names


@pytest.mark.parametrize(
    'text, why',
    [
        ('', 'lacks column'),
        ('id,lower,upper\n', "lacks column 'size'"),
        ('id,lower,upper,size\n', 'no buffer'),
        ('id,lower,upper,size,hint\na,0,1,2,3\n', "'hint' is not understood"),
        ('id,lower,upper,size,size\na,0,1,2,3\n', 'not understood'),
        ('id,lower,upper,size\na,0,1\n', 'Line 2 has 3 values'),
        ('id,lower,upper,size\na,0,1,x\n', "size is 'x'"),
        ('id,lower,upper,size\na,0,1,-4\n', "size is '-4'"),
        ('id,lower,upper,size\na,0,1,1e3\n', "size is '1e3'"),
        ('id,lower,upper,size\na,0,1,99999999999999999999\n', '2**53'),
        ('id,lower,upper,size\na,2,2,4\n', 'after the start'),
        ('id,lower,upper,size\na,0,1,4\na,1,2,4\n', 'a is there twice'),
    ],
)
def test_broken_files(text, why):
    with pytest.raises(FormatError) as error:
        minimalloc.loads(text)
    assert why in str(error.value)


def test_too_many_rows(monkeypatch):
    monkeypatch.setattr(minimalloc, 'MOST_ROWS', 3)
    with pytest.raises(FormatError, match='more than 3'):
        minimalloc.loads(EXAMPLE)
