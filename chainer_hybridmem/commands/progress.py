"""How far a long run is, on standard error."""

from __future__ import annotations

import time
from typing import TextIO

from chainer_hybridmem.terminal import printable

EVERY_SECONDS = 5.0


class Progress:
    """Prints a line now and then; a run of a few seconds prints none.

    Args:
        total (int): How many steps there are.
        stream (TextIO): Where to print.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._done = 0
        self._printed_at = time.monotonic()

    def step(self, what: str) -> None:
        """A step begins.

        Args:
            what: The step, in a few words.
        """
        self._done += 1
        now = time.monotonic()
        if now - self._printed_at >= EVERY_SECONDS:
            self._printed_at = now
            line = f'hybridmem: {self._done} of {self._total}: {what}'
            print(printable(line), file=self._stream, flush=True)
