"""What a program does with feature maps beside what its graph tells.

Note: [habits of a family]
    Which signature an iteration has, only its end tells. Until then it follows the plan
    of one that begins in the same way. So all signatures that begin alike share what is
    learnt about any of them: what later iterations ask of one may be asked of each.
"""

from __future__ import annotations

from collections.abc import Iterable

from chainer_hybridmem.records.profile import Slot


class ProgramHabits:
    """What iterations that begin alike have been seen to do with their maps.

    Args:
        outliving (set of Slot): Of maps that later iterations have asked for.
        written (set of Slot): Of maps that the program writes into.
        recomputes (bool): No later backward comes over its graph after an update.
    """

    def __init__(
        self,
        outliving: Iterable[Slot] = (),
        written: Iterable[Slot] = (),
        recomputes: bool = True,
    ) -> None:
        self.outliving = set(outliving)
        self.written = set(written)
        self.recomputes = recomputes

    def outlive(self, slots: Iterable[Slot]) -> None:
        """A later iteration has asked for maps with these slots."""
        self.outliving.update(slots)

    def write(self, slots: Iterable[Slot]) -> None:
        """The program has written into maps with these slots."""
        self.written |= set(slots)

    def stop_recomputing(self) -> None:
        """A later backward comes over the graph after an update."""
        self.recomputes = False

    def add(self, other: ProgramHabits) -> None:
        """All that others have been seen to do."""
        self.outlive(other.outliving)
        self.write(other.written)
        self.recomputes = self.recomputes and other.recomputes
