"""What the program holds beyond what its profile knows, and what plans do about it."""

from __future__ import annotations

EVICTING_ITERATIONS = 3  # in a row under a plan, after which there is another one


class ForeignMemory:
    """Memory that a guide's plans leave free for the program.

    Args:
        nbytes (int): What plans leave free.

    Attributes:
        refused_bytes (int or None): Held so much, no plan fits beside it.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self.refused_bytes: int | None = None
        self._evicting = 0  # iterations in a row that have evicted

    def end_iteration(self, evicted: bool) -> bool:
        """A guided iteration has ended.

        Returns:
            bool: Whether so many in a row have evicted that there must be another plan.
        """
        self._evicting = self._evicting + 1 if evicted else 0
        if self._evicting < EVICTING_ITERATIONS:
            return False
        self._evicting = 0
        return True

    def is_refused(self, held_bytes: int) -> bool:
        """Whether it is known that no plan fits beside so much."""
        return self.refused_bytes is not None and held_bytes >= self.refused_bytes

    def leave_free(self, nbytes: int) -> None:
        """Plans leave so much free from now on."""
        self.nbytes = nbytes

    def refuse(self, held_bytes: int, former_bytes: int) -> None:
        """No plan fits beside what is held: plans leave free what they did."""
        self.nbytes, self.refused_bytes = former_bytes, held_bytes
