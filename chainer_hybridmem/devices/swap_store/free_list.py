"""Which parts of a block or file are free."""

from __future__ import annotations


class FreeList:
    """First-fit space management with merging of free neighbours."""

    def __init__(self, nbytes: int = 0) -> None:
        self._holes: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []

    def take(self, nbytes: int) -> int | None:
        """Offset of the first hole that is large enough, or None."""
        for index, (start, end) in enumerate(self._holes):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._holes[index]
                else:
                    self._holes[index] = (start + nbytes, end)
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Makes a range free again."""
        holes = sorted([*self._holes, (offset, offset + nbytes)])
        merged = holes[:1]
        for start, end in holes[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._holes = merged

    def cut_tail(self, end: int) -> int:
        """Removes the hole that reaches ``end``; returns where it began."""
        if self._holes and self._holes[-1][1] == end:
            return self._holes.pop()[0]
        return end

    def tail(self, end: int) -> int:
        """Where the hole that reaches ``end`` begins."""
        if self._holes and self._holes[-1][1] == end:
            return self._holes[-1][0]
        return end
