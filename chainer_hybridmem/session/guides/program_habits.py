"""What a program does with feature maps beside what its graph tells."""

from __future__ import annotations

from collections.abc import Iterable

from chainer_hybridmem.records.profile import Slot


class ProgramHabits:
    """What iterations of one signature have been seen to do with their maps.

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
        self._has_waited = False

    def outlive(self, slots: Iterable[Slot]) -> None:
        """A later iteration has asked for maps with these slots."""
        self.outliving.update(slots)

    def write(self, slots: Iterable[Slot]) -> None:
        """The program has written into maps with these slots."""
        self.written |= set(slots)

    def stop_recomputing(self) -> None:
        """A later backward comes over the graph after an update."""
        self.recomputes = False

    def wait_for_states(self) -> bool:
        """States come after the first iteration; whether to wait for the next one.

        ChainerMN's first update only hands out parameters. Once is enough: a program
        that makes more in every iteration is planned all the same.
        """
        waits, self._has_waited = not self._has_waited, True
        return waits
