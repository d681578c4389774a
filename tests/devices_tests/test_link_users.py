"""A link that processes measure together, though some are late."""

from __future__ import annotations

import pytest
from support.own_time import own_time

from chainer_hybridmem.devices.link import measure_link
from chainer_hybridmem.devices.link_users import Copied, LinkUsers, seconds_among

_MIB = 2**20


def runs(*copies):
    return [[Copied(*copy) for copy in copies]]


@pytest.mark.parametrize(
    ('others', 'seconds'),
    [
        ([], 4),
        ([runs((10, 14))], 4),  # all the time
        ([runs((9, 20))], 4),
        ([[]], 8),  # never
        ([runs((0, 10), (14, 15))], 8),
        ([runs((12, 20))], 2 * 2 + 2),  # 2 s late
        ([runs((11, 12), (12, 13))], 1 * 2 + 2 + 1 * 2),
        ([runs((10, 14)), runs((10, 14))], 4),
        ([runs((10, 14)), []], 4 * 3 / 2),
        ([runs((12, 14)), runs((13, 14))], 2 * 3 + 1 * 3 / 2 + 1),
    ],
)
def test_late_copies_count_as_if_none_were(others, seconds):
    assert seconds_among(runs((10, 14)), others) == [pytest.approx(seconds)]


def test_two_copies_are_one_after_the_other():
    own = runs((10, 11), (12, 14))
    assert seconds_among(own, [runs((12, 14))]) == [pytest.approx(1 * 2 + 2)]


def test_each_run_has_its_own_copies():
    own = runs((0, 1)) + runs((10, 12))
    others = [runs((0, 1)) + runs((11, 12)), runs((0, 1))]
    assert seconds_among(own, others) == pytest.approx([1, 3 + 3 / 2])


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

    def exchange(self, tracks):
        return [[[self._late(copies) for copies in runs] for runs in tracks]]

    def _late(self, copies):
        share = self.late_share
        return [Copied(c.began_seconds + share * c.seconds, c[1]) for c in copies]


@pytest.mark.parametrize('late_share', [0.0, 0.25, 1.0])
def test_a_process_that_is_late_changes_no_rate(late_share, open_host):
    """Nothing is shared here: what was found alone is divided by two."""
    device = open_host(64 * _MIB, link_bandwidth=50e6)
    other = Other(late_share)
    with own_time():
        link = measure_link(device, users=other)
    assert other.gathered > 0
    expected = pytest.approx(50e6 / (1 + late_share), rel=0.15)
    assert link.d2h_bytes_per_second == expected
    assert link.h2d_bytes_per_second == expected
    assert link.duplex_share > 0.8
