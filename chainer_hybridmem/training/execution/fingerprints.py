"""What the contents of a live map must be when the graph has them again.

Note: [checked replays]
    What is dropped has a fingerprint, and a replay must give the same one. Whatever
    has changed since forward (an input, a setting, something outside of the function)
    is then one clear error, never a wrong gradient. On CUDA the fingerprints are not
    waited for: the error comes when a later iteration begins, or with the end of the
    session (training/devices/cuda/late_checks).

Note: [late digests]
    The host reads its own memory at once: fingerprints are numbers. On CUDA a
    fingerprint waits for the GPU, and a digest does not: the device compares digests
    later (training/devices/cuda/late_checks). So a map has fingerprints on CUDA only
    while the program is seen to write into it, and digests otherwise.
"""

from __future__ import annotations

from chainer_hybridmem.training.devices.protocol import Device, Digest, Root, View
from chainer_hybridmem.training.execution.graph_slots import (
    GraphSlots,
    Prints,
    compute_uncounted_fingerprint,
)

_WRITTEN = (
    'The program has written into a feature map of {} bytes and let go of it, which it '
    'did not do while the plan was learnt, and backward has not seen that. Write from '
    'the first iteration on, or into a copy.'
)

_NONE: dict[View, int] = {}  # shared by all maps; no dictionary here is changed
_NO_DIGESTS: dict[View, Digest] = {}


class Fingerprints:
    """Finds out what others write into the memory of one map.

    Args:
        device (Device): Where the memory is.
        slots (GraphSlots): The graph's references to it.

    Attributes:
        final (dict): Fingerprints of the contents that must come back, by view.
        digests (dict): Digests of them, where the host cannot read the memory.
        rewritten (bool): The program has written into the map in this iteration.
        watched (bool): Whether to look for what others write, also where that waits
            for the device.
    """

    __slots__ = (
        '_device', '_handed_out', '_slots', 'digests', 'final', 'rewritten', 'watched',
    )  # fmt: skip

    def __init__(self, device: Device, slots: GraphSlots) -> None:
        self._device = device
        self._slots = slots
        self._handed_out: Prints = _NONE  # of what the program has got through a door
        self.final: Prints = _NONE
        self.digests: dict[View, Digest] = _NO_DIGESTS
        self.rewritten = False
        self.watched = True

    def begin_iteration(self) -> None:
        """Forgets what the program has done so far."""
        self.rewritten = False
        self._handed_out = _NONE

    def watch(self, watched: bool = True) -> None:
        """Says whether to look for writes, also where that waits for the device."""
        self.watched = watched

    # -- before the map leaves ------------------------------------------------
    def take_before_copy(self) -> None:
        """The map is about to be copied out: others may change what they hold."""
        self.is_rewritten()
        self.digests = _NO_DIGESTS
        if self._may_be_written():
            self.final = self._slots.compute_prints()
        elif not (self._is_looked_for() or self._slots.is_exclusive()):
            self.digests = self._issue_digests()

    def take_before_drop(self) -> None:
        """The map is about to be dropped, and a replay must make it again."""
        if not self._device.clock.asynchronous or self._may_be_written():
            self.final = self._slots.compute_prints()
        else:
            self.digests = self._issue_digests()

    def find_before_move(self) -> Prints:
        """What the contents must still be after the map has been moved."""
        if not self._device.clock.asynchronous or self._may_be_written():
            return self._slots.compute_prints()
        return {}

    def expect(self, final: Prints) -> None:
        """Contents with these fingerprints must come back."""
        self.final = final

    def note_handed_out(self) -> None:
        """The program has the array from here on, and may write into it."""
        if not self._handed_out:
            self._handed_out = self._slots.compute_prints()

    def _may_be_written(self) -> bool:
        """Whether others have the memory, as far as that is looked for."""
        return self._is_looked_for() and not self._slots.is_exclusive()

    def _is_looked_for(self) -> bool:
        """Whether to look for what others write at once."""
        return self.watched or not self._device.clock.asynchronous

    # -- afterwards -----------------------------------------------------------
    @property
    def pending(self) -> bool:
        """Whether contents that must come back are known."""
        return bool(self.final or self.digests)

    def forget(self) -> None:
        """The contents are where they belong."""
        self.final, self.digests = _NONE, _NO_DIGESTS

    def forget_digests(self) -> None:
        """What was taken before an earlier copy does not count any more."""
        self.digests = _NO_DIGESTS

    def rewrite(self) -> None:
        """The program has written into the map."""
        self.rewritten = True

    def is_rewritten(self) -> bool:
        """Whether the program has written into the map, as far as one can tell."""
        before = self._handed_out
        if before and not self.rewritten:
            now = self._slots.compute_prints()
            self.rewritten = any(
                now.get(view, old) != old for view, old in before.items()
            )
        return self.rewritten

    def accept_changes(self, memory: Root) -> bool:
        """Whether memory has other contents than before, which count from here on."""
        if not self.final:
            return False
        now = {
            view: compute_uncounted_fingerprint(
                self._device.arrays.restore(memory, view)
            )
            for view in self.final
        }
        if now == self.final:
            return False
        self.final, self.rewritten = now, True
        return True

    def match(self, final: Prints) -> bool:
        """Whether the graph has contents with these fingerprints now."""
        now = self._slots.compute_prints() if final else {}
        return all(final.get(view, value) == value for view, value in now.items())

    def compare_later(self, what: str, memory: Root) -> None:
        """Memory must have what the contents were when their digests were issued.

        Args:
            what: The message if it has not.
            memory: The allocation.
        """
        checks = self._device.late_checks
        if checks is None:
            return
        for view, digest in self.digests.items():
            now = checks.digest(self._device.arrays.restore(memory, view))
            if now is not None:
                checks.expect_same(digest, now, what)

    def expect_unwritten(self, memory: Root, nbytes: int) -> None:
        """Compares digests later, of memory that the program may have written into."""
        self.compare_later(_WRITTEN.format(nbytes), memory)

    def _issue_digests(self) -> dict[View, Digest]:
        """Digests of the contents as the graph has them; waits for nothing."""
        root, checks = self._slots.find_root(), self._device.late_checks
        if root is None or checks is None:
            return {}
        views = self._slots.find_living_views()
        digests = {
            v: checks.digest(self._device.arrays.restore(root, v)) for v in views
        }
        return {view: found for view, found in digests.items() if found is not None}
