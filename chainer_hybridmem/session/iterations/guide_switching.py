"""What an iteration does that is not the one it has begun like."""

from __future__ import annotations

from chainer_hybridmem.session.guides.guide import Guide, Stage
from chainer_hybridmem.session.guides.known_signatures import KnownSignatures
from chainer_hybridmem.session.iterations.iteration import Following, Iteration
from chainer_hybridmem.session.setting.runtime import Runtime


class GuideSwitching:
    """Has iterations follow another guide, or none, where their guide does not fit.

    Args:
        runtime (Runtime): Follows plans.
        signatures (KnownSignatures): Has the other guides.
    """

    def __init__(self, runtime: Runtime, signatures: KnownSignatures) -> None:
        self._executor = runtime.executor
        self._splitter = runtime.splitter
        self._instruments = runtime.instruments
        self._signatures = signatures

    def redirect(self, iteration: Iteration, k: int) -> None:
        """Operation k is not what the guide expects."""
        following = iteration.following
        guide = following.guide
        assert guide is not None
        other = self._signatures.find_alternative(following.operations, guide.stage)
        self._go_on(following, guide, other, k)

    def settle(self, iteration: Iteration) -> None:
        """An iteration ends: it follows the guide of its operations, or none."""
        following, n = iteration.following, iteration.position
        guide = following.guide
        if guide is not None and n != len(guide.signature):
            other = self._signatures.find(following.operations)
            self._go_on(following, guide, other, n)

    def _go_on(
        self, following: Following, guide: Guide, other: Guide | None, k: int
    ) -> None:
        if other is None:
            self._deviate(following)
        else:
            self._switch(following, guide, other, k)

    def _switch(self, following: Following, guide: Guide, other: Guide, k: int) -> None:
        """The iteration is one of another guide that begins in the same way."""
        following.switch(other)
        self._instruments.stop_following()
        recorder = self._instruments.recorder
        if recorder is not None and not (guide.stage is other.stage is Stage.PROFILING):
            recorder.mark_as_draft()
        if other.table is None:
            self._executor.leave_plan()
        else:
            self._executor.switch(
                other.table, other.copies, k, other.habits.outliving, other.watched
            )
        self._splitter.switch(other.ways)

    def _deviate(self, following: Following) -> None:
        """The signature is unknown: passive from here."""
        following.deviate()
        self._executor.leave_plan()
        self._splitter.switch(None)
        self._instruments.stop_following()
        if self._instruments.recorder is not None:
            self._instruments.recorder.mark_as_draft()
