"""What it costs to copy a map out and in, and what replays cost instead.

Note: [hidden copies]
    A part of the copies runs beside compute and costs nothing, and a replay takes
    longer than its trial did, whose inputs lay in the cache. Iterations show which part
    of the copies the program has waited for, and how long replays really took; the next
    ones expect the same. One slow iteration can make all replays too dear, and then no
    replay would show that they are not: so iterations without replays forget it slowly.
"""

from __future__ import annotations

from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.execution.movements import Counters
from chainer_hybridmem.records.plan import Tier
from chainer_hybridmem.session.setting.link_measurement import LinkMeasurement

LEAST_SECONDS = 2e-4  # that it takes to copy out and in what a function reads
WORTH_MEASURING = 1.0  # seconds lost, from which on the link is measured for this
KEPT_SHARE = 0.9  # that an iteration has of the weight of the next one
_MUCH_BYTES = 1 << 24


class Experience:
    """How far what happens differs from what is expected; newer iterations count more.

    Attributes:
        ratio (float): What has happened over what was expected.
    """

    def __init__(self) -> None:
        self.ratio = 1.0
        self._happened = self._expected = 0.0

    def add(self, happened: float, expected: float) -> None:
        """Takes one iteration in; nothing expected brings the ratio closer to 1."""
        if expected > 0:
            self._happened = KEPT_SHARE * self._happened + happened
            self._expected = KEPT_SHARE * self._expected + expected
        else:
            difference = self._happened - self._expected
            self._happened = self._expected + KEPT_SHARE * difference
        if self._expected > 0:
            self.ratio = self._happened / self._expected


class CopyCosts:
    """Compares copies with replays, from what iterations have shown.

    Args:
        device (Device): Copies.
        links (LinkMeasurement): Tell what a copy costs, once they are measured.
    """

    def __init__(self, device: Device, links: LinkMeasurement) -> None:
        self._device = device
        self._links = links
        self._lost_seconds = 0.0  # by iterations without a plan
        self._waited = Experience()  # of the seconds that copies take
        self._slowness = Experience()  # of replays, over what trials say

    def are_known(self) -> bool:
        """Whether the links are measured, which is done once that is worth it."""
        if self._links.measured is None and self._lost_seconds >= WORTH_MEASURING:
            self._links.measure_once()
        return self._links.measured is not None

    def learn(self, counters: Counters, active: bool) -> None:
        """Takes an iteration in; see [hidden copies].

        Args:
            counters: What it has moved.
            active: Whether it knew the links.
        """
        self._lost_seconds += counters.lost_seconds
        if not active or not counters.evictions:
            return
        copied = self._copy_seconds(
            counters.swapped_out_bytes, counters.swapped_in_bytes
        )
        if copied > 0:
            waited = max(counters.lost_seconds - counters.replay_seconds, 0.0)
            self._waited.add(min(waited, copied), copied)
        if not self._device.clock.asynchronous:
            self._slowness.add(counters.replay_seconds, counters.expected_seconds)

    def most_seconds(self, nbytes: int) -> float:
        """That replays may take by their trials, instead of copying so many bytes."""
        waited = self._waited.ratio * self._copy_seconds(nbytes, nbytes)
        return waited / max(self._slowness.ratio, 1.0)

    def find_least_bytes(self) -> int:
        """How much takes long enough to copy."""
        nothing = self._copy_seconds(0, 0)
        much = self._copy_seconds(_MUCH_BYTES, _MUCH_BYTES)
        left = max(LEAST_SECONDS - nothing, 0.0)
        return int(left / (much - nothing) * _MUCH_BYTES) if much > nothing else 0

    def _copy_seconds(self, out_bytes: int, in_bytes: int) -> float:
        links = self._links.measured
        assert links is not None
        link, room = links.link, self._device.copies.host_room(Tier.RAM)
        if links.disk is not None and room < out_bytes:
            link = links.disk
        return link.d2h_seconds(out_bytes) + link.h2d_seconds(in_bytes)
