"""What the executor tells about one iteration; here it is ignored."""

from __future__ import annotations

from collections.abc import Callable

from chainer_hybridmem.devices.protocol import Span


class Observer:
    """Listens to the executor; what it does not override goes by."""

    def copy(self, kind: str, storage: int, span: Span) -> None:
        """A copy has been started; its kind is ``'swap-out'`` or ``'swap-in'``."""

    def released(self) -> None:
        """What leaves before an operation has left."""

    def wait(self, kind: str, storage: int, action: Callable[[], None]) -> None:
        """Does something that may wait for a copy."""
        action()

    def use(self, storage: int) -> None:
        """The next operation uses what has been swapped in."""

    def replay(self, operation: int, action: Callable[[], None]) -> None:
        """Runs one replay."""
        action()
