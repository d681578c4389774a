"""The bandwidths of a session's links, measured once."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.planning.records.sharing import share_link
from chainer_hybridmem.training.devices.link import LinkUsers, Runs, measure_link
from chainer_hybridmem.training.session.setting.ranks import Ranks, Topic
from chainer_hybridmem.training.session.setting.runtime import Runtime

MEASURING_BYTES = 3 * 2**24  # wanted for measuring the link


class Links(NamedTuple):
    """Where swapped maps go.

    Attributes:
        link (Link): To RAM; to the disk if there is no RAM to speak of.
        disk (Link or None): To the disk, if there is one.
    """

    link: Link
    disk: Link | None


class LinkMeasurement:
    """Measures links when they are first asked for.

    Args:
        runtime (Runtime): Copies, and makes room for that.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._device = runtime.device
        self._ranks = runtime.ranks
        self._executor = runtime.executor
        self._tell = runtime.tell
        self._links: Links | None = None

    def measure_once(self) -> Links | None:
        """The links as first measured; None if there is no memory to measure yet."""
        if self._links is None:
            self._links = self._measure()
        return self._links

    def _measure(self) -> Links | None:
        device = self._device
        free_bytes = device.memory.limit_bytes - device.memory.used_bytes
        if free_bytes < MEASURING_BYTES:
            self._executor.evictor.reclaim(MEASURING_BYTES - free_bytes)
        users = None if self._ranks is None else _RankUsers(self._ranks)
        try:
            with device.memory.attempt(), device.memory.peak_kept():
                ram = measure_link(device, users=users)
                disk = measure_link(device, tier=Tier.DISK, users=users)
        except MemoryError:
            self._tell('no memory to measure the link: profiled later')
            return None
        link = ram or disk
        if link is None:
            self._tell('no host memory to measure the link: profiled later')
            return None
        if users is None:
            return Links(link, disk)
        return Links(users.share(link), disk and users.share(disk))


class _RankUsers(LinkUsers):
    """The ranks of a node, which measure its links together.

    Args:
        ranks: All of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._came = True

    def gather(self) -> None:
        self._came &= self._ranks.meet(Topic('link'))

    def agree(self, nbytes: int) -> int:
        return int(self._ranks.decide(Topic('bytes'), lambda: nbytes).value)

    def exchange(self, runs: Runs) -> list[Runs]:
        others = self._ranks.exchange(Topic('copied'), runs)
        self._came &= others is not None
        return others or []

    def share(self, link: Link) -> Link:
        """What one rank has while all copy: measured so, or as its equal part."""
        count = self._ranks.count
        measured = dataclasses.replace(link, ranks=count if self._came else 1)
        return share_link(measured, count)
