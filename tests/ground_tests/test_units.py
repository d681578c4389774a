"""Sizes and times as text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.units import (
    format_apart,
    format_bytes,
    format_count,
    format_enough,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_limit,
)


@pytest.mark.parametrize(
    ('text', 'nbytes'),
    [
        ('16GiB', 16 * 2**30),
        ('16GB', 16 * 10**9),
        (' 500 MB ', 500 * 10**6),
        ('1.5 kib', 1536),
        ('.5KiB', 512),
        ('1e3B', 1000),
        ('2TB', 2 * 10**12),
        ('1TiB', 2**40),
        ('8G', 8 * 2**30),
        ('8g', 8 * 2**30),
        ('512M', 512 * 2**20),
        ('4Ki', 4096),
        ('1.5T', 3 * 2**39),
        ('7', 7),
        (7, 7),
        (7.9, 7),
    ],
)
def test_sizes(text: Any, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert type(parse_bytes(text)) is int


@pytest.mark.parametrize(
    'text',
    ['', 'GiB', '-1GiB', '16 Gib s', '16GG', '1,5GB', 'nan', 'inf', '1e999GB',
     0, -1, True, 10**400, 0.5, '0.5', None, [1], float('nan'), float('inf'), 2**62,
     '0', '0GiB'],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_its_name(text: Any) -> None:
    with pytest.raises(OptionError, match='memory_limit'):
        parse_bytes(text, 'memory_limit')


@pytest.mark.parametrize(
    ('text', 'least', 'nbytes'),
    [('50%', 1, 500), (' 12.5 % ', 1, 125), ('0.001%', 1, 1), ('0%', 0, 0)],
)
def test_a_percentage_of_a_whole(text: str, least: int, nbytes: int) -> None:
    assert parse_bytes(text, least=least, whole_bytes=1000) == nbytes


@pytest.mark.parametrize('text', ['0%', '-1%', 'nan%', '%', 'x%', '1e9%', '50%%'])
def test_what_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match='size .*is not a percentage above zero'):
        parse_bytes(text, whole_bytes=1000)


def test_a_percentage_of_nothing_is_refused_and_says_where_it_works() -> None:
    """A share of the device's memory elsewhere, of the peak here: nobody guesses."""
    with pytest.raises(OptionError, match="memory_limit '50%'.*8GiB.*verify") as told:
        parse_bytes('50%', 'memory_limit')
    assert 'in-core peak' in str(told.value)


@pytest.mark.parametrize(
    ('text', 'rate'),
    [('12GB/s', 12e9), ('12 GiB / sec', 12 * 2.0**30), ('500MB', 5e8), (1e9, 1e9)],
)
def test_bandwidths(text: Any, rate: float) -> None:
    assert parse_bandwidth(text) == rate
    assert type(parse_bandwidth(text)) is float


@pytest.mark.parametrize('text', ['12GB/min', 'fast', 0, '-1GB/s'])
def test_what_is_no_bandwidth(text: Any) -> None:
    with pytest.raises(OptionError, match='link_bandwidth.* bandwidth'):
        parse_bandwidth(text, 'link_bandwidth')


@pytest.mark.parametrize(
    ('given', 'meant'), [(100, '100MB/s'), ('100', '100MB/s'), ('2/s', '2GB/s')]
)
def test_a_bandwidth_without_its_unit_asks_what_was_meant(
    given: Any, meant: str
) -> None:
    with pytest.raises(OptionError, match=f"bandwidth is .* mean '{meant}'"):
        parse_bandwidth(given, 'link_bandwidth')
    assert parse_bandwidth('100B/s') == 100


@pytest.mark.parametrize(
    ('nbytes', 'text'),
    [
        (0, '0 B'),
        (1023, '1023 B'),
        (1024, '1.0 KiB'),
        (16 * 2**30, '16.0 GiB'),
        (3 * 2**39, '1.50 TiB'),
        (-2048, '-2.0 KiB'),
    ],
)
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(1, 2**50))
def test_formatted_bytes_read_back_within_rounding(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.06)


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [
        (0, '0.000 s'),
        (1.2344, '1.234 s'),
        (0.0123, '12.3 ms'),
        (45.6e-6, '45.6 us'),
        (-0.5, '-500.0 ms'),
    ],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ('words', 'text'),
    [
        ((1, 'plan'), '1 plan'),
        ((0, 'plan'), '0 plans'),
        ((2, 'plan'), '2 plans'),
        ((1, 'class', 'classes'), '1 class'),
        ((3, 'class', 'classes'), '3 classes'),
    ],
)
def test_counts(words: Any, text: str) -> None:
    assert format_count(*words) == text


@given(st.lists(st.integers(0, 2**50), min_size=2, max_size=3))
def test_sizes_that_differ_look_different(sizes: list[int]) -> None:
    """``needs 14.9 GiB, the limit is 14.9 GiB`` tells nobody anything."""
    texts = format_apart(*sizes)
    assert len(set(texts)) == len(set(sizes))
    assert format_apart(sizes[0], sizes[0]) == [format_bytes(sizes[0])] * 2


def test_sizes_that_look_different_anyway_have_no_more_digits() -> None:
    assert format_apart(2**30, 2**31) == ['1.0 GiB', '2.0 GiB']
    assert format_apart(16 * 10**9, 16 * 10**9 + 2**20) == ['14.901 GiB', '14.902 GiB']


@given(st.integers(1, 2**61))
def test_enough_is_no_less_and_little_more(nbytes: int) -> None:
    text = format_enough(nbytes)
    found = parse_bytes(text)
    assert parse_bytes(text.replace(' ', '')) == found
    assert nbytes <= found <= max(nbytes * 1.011, nbytes + 1)
    assert len(text) <= 8 or nbytes > 2**50


@pytest.mark.parametrize(
    ('given', 'meant'),
    [
        (8, '8GiB'),
        (8.5, '8.5GiB'),
        ('16', '16GiB'),
        (8000, '8000MiB'),
        ('12000', '12000MiB'),
        (0.6, '60%'),
    ],
)
def test_a_limit_that_lacks_its_unit_is_refused_with_what_was_meant(
    given: Any, meant: str
) -> None:
    with pytest.raises(OptionError, match=f"memory_limit is .* Did you mean '{meant}'"):
        parse_limit(given)


@pytest.mark.parametrize('given', ['8KiB', 300_000, 16e9, '70000', '1B'])
def test_a_limit_that_can_be_meant_is_taken(given: Any) -> None:
    assert parse_limit(given) == parse_bytes(given)


@pytest.mark.parametrize('given', [True, None, -1, 0, 'much', float('nan'), '-5'])
def test_what_is_no_limit_is_refused_with_its_name(given: Any) -> None:
    with pytest.raises(OptionError, match='memory_limit'):
        parse_limit(given)


def test_a_comma_for_a_point_is_told() -> None:
    with pytest.raises(OptionError, match=r"Did you mean '8\.5GiB'\?"):
        parse_bytes('8,5GiB')


def test_a_percentage_names_the_command_that_takes_one() -> None:
    with pytest.raises(OptionError, match='`hybridmem run`'):
        parse_limit('60%')
