"""Traces from lifetimes and raw logs, and what is refused."""

from __future__ import annotations

import pytest

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.planning.layouts import Trace, from_lifetimes, from_log


def test_lifetimes_are_half_open():
    trace = from_lifetimes([10, 20], [0, 5], [5, 9])
    assert trace.peak_load_bytes == 20
    assert from_lifetimes([10, 20], [0, 4], [5, 9]).peak_load_bytes == 30


def test_what_is_there_before_counts():
    trace = Trace((5, 7), (-1, 2))
    assert list(trace.loads()) == [5, 0, 7]
    assert trace.peak_load_bytes == 7


def test_a_raw_log_with_reused_ids():
    trace = from_log([('p', 10), ('p', -1), ('q', -1), ('p', 30)])
    assert trace.sizes == (10, 30)
    assert trace.events == (1, -1, 2)


def test_a_log_that_allocates_twice():
    with pytest.raises(FormatError, match='not free'):
        from_log([('p', 10), ('p', 20)])


@pytest.mark.parametrize('sizes', [(-1,), (2**53, 1)])
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(FormatError, match='bytes'):
        from_lifetimes(sizes, [0] * len(sizes), [1] * len(sizes))


def test_an_empty_lifetime():
    with pytest.raises(FormatError, match='after the start'):
        from_lifetimes([1], [3], [3])


@pytest.mark.parametrize('names', [['a'], ['a', 'b', 'c']])
def test_each_buffer_of_a_trace_with_names_has_one(names):
    with pytest.raises(FormatError, match='2 buffers'):
        from_lifetimes([1, 2], [0, 0], [1, 1], names)
