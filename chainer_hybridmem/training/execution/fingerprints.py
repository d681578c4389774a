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
    later (training/devices/cuda/late_checks). So what is dropped on CUDA has digests,
    and only what the program has read while it was away has fingerprints.
"""

from __future__ import annotations

from chainer_hybridmem.training.devices.protocol import Device, Digest, Root, View
from chainer_hybridmem.training.execution.graph_slots import GraphSlots, Prints

_NONE: dict[View, int] = {}  # shared by all maps; no dictionary here is changed
_NO_DIGESTS: dict[View, Digest] = {}


class Fingerprints:
    """Tells what a map must be when a replay has made it, and if it was written into.

    Args:
        device (Device): Where the memory is.
        slots (GraphSlots): The graph's references to it.

    Attributes:
        final (dict): Fingerprints of the contents that must come back, by view.
        digests (dict): Digests of them, where the host cannot read the memory.
        rewritten (bool): The program has written into the map in this iteration.
    """

    __slots__ = '_device', '_slots', '_watched', 'digests', 'final', 'rewritten'

    def __init__(self, device: Device, slots: GraphSlots) -> None:
        self._device = device
        self._slots = slots
        self._watched: Prints = _NONE  # as they were when the program could write
        self.final: Prints = _NONE
        self.digests: dict[View, Digest] = _NO_DIGESTS
        self.rewritten = False

    def begin_iteration(self) -> None:
        """Forgets what the program has done so far."""
        self.rewritten = False
        self._watched = _NONE

    # -- before the map leaves ------------------------------------------------
    def take_before_drop(self) -> None:
        """The map is about to be dropped, and a replay must make it again."""
        if self._device.clock.asynchronous:
            self.digests = self._issue_digests()
        else:
            self.final = self._slots.compute_prints()

    def expect(self, final: Prints) -> None:
        """Contents with these fingerprints must come back."""
        self.final = final

    def watch(self) -> None:
        """The program has the array from here on, or can get it: it may be written."""
        if not self._watched:
            self._watched = self._slots.compute_prints()

    # -- afterwards -----------------------------------------------------------
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
        before = self._watched
        if before and not self.rewritten:
            now = self._slots.compute_prints()
            self.rewritten = any(
                now.get(view, old) != old for view, old in before.items()
            )
        return self.rewritten

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
