"""A link that processes measure together, though some are late."""

from __future__ import annotations

import pytest
from support.own_time import own_time

from chainer_hybridmem.training.devices.link import (
    Copied,
    LinkUsers,
    measure_link,
    seconds_among,
)

_MIB = 2**20


def copied(*spans):
    """The copies of one run, each as when it began and ended."""
    return [Copied(began, ended, ended - began) for began, ended in spans]


def among(own, others):
    """Seconds of each of one process's runs of one kind."""
    (seconds,) = seconds_among([own], [[runs] for runs in others])
    return seconds


@pytest.mark.parametrize(
    ('others', 'seconds'),
    [
        ([], 4),
        ([copied((10, 14))], 4),  # all the time
        ([copied((9, 20))], 4),
        ([[]], 8),  # never
        ([copied((0, 10), (14, 15))], 8),
        ([copied((12, 20))], 2 * 2 + 2),  # 2 s late
        ([copied((11, 12), (12, 13))], 1 * 2 + 2 + 1 * 2),
        ([copied((10, 14)), copied((10, 14))], 4),
        ([copied((10, 14)), []], 4 * 3 / 2),
        ([copied((12, 14)), copied((13, 14))], 2 * 3 + 1 * 3 / 2 + 1),
    ],
)
def test_late_copies_count_as_if_none_were(others, seconds):
    own = [copied((10, 14))]
    assert among(own, [[run] for run in others]) == [pytest.approx(seconds)]


def test_two_copies_are_one_after_the_other():
    own = [copied((10, 11), (12, 14))]
    assert among(own, [[copied((12, 14))]]) == [pytest.approx(1 * 2 + 2)]


def test_each_run_has_its_own_copies():
    own = [copied((0, 1)), copied((10, 12))]
    others = [[copied((0, 1)), copied((11, 12))], [copied((0, 1))]]
    assert among(own, others) == pytest.approx([1, 3 + 3 / 2])


def test_alone_a_copy_takes_what_it_takes_here():
    assert among([[Copied(0, 1, 1.5), Copied(2, 3, 1)]], []) == [2.5]


class Other(LinkUsers):
    """Another process, as late as it is told.

    Args:
        late_share: Of its copies; 1 if it comes when they are over.
    """

    def __init__(self, late_share):
        self.late_share = late_share
        self.gathered = 0

    def gather(self):
        self.gathered += 1

    def exchange(self, runs):
        return [[[self._late(copies) for copies in kind] for kind in runs]]

    def _late(self, copies):
        share = self.late_share
        return copied(
            *(
                ((1 - share) * began + share * ended, ended)
                for began, ended, _ in copies
            )
        )


@pytest.mark.parametrize('late_share', [0.0, 0.25, 1.0])
def test_a_process_that_is_late_changes_no_rate(late_share, open_host):
    """Nothing is shared here: what was found alone is divided by two."""
    device = open_host(64 * _MIB, link_bandwidth=50e6)
    other = Other(late_share)
    with own_time(tick_seconds=1e-3):  # one for each piece of work beside the copies
        link = measure_link(device, users=other)
    assert other.gathered > 0
    expected = pytest.approx(50e6 / (1 + late_share), rel=0.15)
    assert link.d2h_bytes_per_second == expected
    assert link.h2d_bytes_per_second == expected
    assert link.duplex_share > 0.8
