"""Which signature has the host memory where it is limited."""

from __future__ import annotations

from chainer_hybridmem.execution import Executor
from chainer_hybridmem.session.guides.guide import Guide
from chainer_hybridmem.session.guides.known_signatures import KnownSignatures
from chainer_hybridmem.session.planning.planning import Planning
from chainer_hybridmem.session.setting.link_measurement import LinkMeasurement
from chainer_hybridmem.session.setting.options import Options


class HostShare:
    """Under a host limit, one signature has all host memory while it runs.

    Args:
        executor (Executor): Uses host copies.
        options (Options): Has the host limit.
        signatures (KnownSignatures): Their guides have host copies.
        links (LinkMeasurement): Need host memory to be measured.
        planning (Planning): Knows what a plan needs.
    """

    def __init__(
        self,
        executor: Executor,
        options: Options,
        signatures: KnownSignatures,
        links: LinkMeasurement,
        planning: Planning,
    ) -> None:
        self._limit_bytes = options.host_limit_bytes
        self._executor = executor
        self._signatures = signatures
        self._links = links
        self._planning = planning
        self._user: Guide | None = None  # whose copies the host holds

    def give_to(self, guide: Guide | None) -> None:
        """An iteration begins that follows this guide."""
        if self._limit_bytes is None:
            return
        if self._limit_bytes > 0:
            self._links.measure_once()  # while there is room
        if guide is self._user:
            return
        self._executor.settle()
        for other in self._signatures:
            if other is not guide:
                other.forget_copies()
        self._user = guide
        if guide is not None:
            self._planning.reserve(guide)
