"""What plain Chainer would need where graphs of older iterations live on.

A profile knows one iteration, and is recorded while maps of older graphs are away.
Plain Chainer holds them as well. What comes back of them while an iteration is recorded
counts as the iteration's, and so twice: the peak is told too high rather than too low.
"""

from __future__ import annotations


class PlainPeak:
    """Highest load of plain Chainer over all iterations that begin beside older graphs.

    Attributes:
        older_bytes (int): Most that older graphs had away when an iteration began.
    """

    def __init__(self) -> None:
        self.older_bytes = 0
        self._begin_bytes = self._unknown_begin_bytes = 0
        self._bytes = 0

    def note(self, begin_bytes: int, older_bytes: int, above_bytes: int | None) -> None:
        """Takes an iteration.

        Args:
            begin_bytes: What plain Chainer would have held when it began.
            older_bytes: Of these, maps of older graphs that were away.
            above_bytes: Its highest load without swapping, above what was there when
                it began; None if that is not known.
        """
        if not older_bytes:
            return
        self.older_bytes = max(self.older_bytes, older_bytes)
        if above_bytes is None:
            self._unknown_begin_bytes = max(self._unknown_begin_bytes, begin_bytes)
            return
        self._begin_bytes = max(self._begin_bytes, begin_bytes)
        self._bytes = max(self._bytes, begin_bytes + above_bytes)

    def of(self, profile_bytes: int | None) -> int | None:
        """The peak of the session.

        Args:
            profile_bytes: That of an iteration alone, as its profile tells it.

        Returns:
            int or None: None if it is not known: no profile tells it, or an iteration
            that none tells of began with more than all others.
        """
        unknown = self._unknown_begin_bytes > self._begin_bytes
        if profile_bytes is None or unknown:
            return None
        return max(profile_bytes, self._bytes)
