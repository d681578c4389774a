"""How far a long run is, on standard error: a bar on a terminal, else plain lines."""

from __future__ import annotations

import time
from typing import Any, TextIO

from chainer_hybridmem.terminal import printable

EVERY_SECONDS = 5.0
_FORMAT = '{n_fmt} of {total_fmt} |{bar:20}| {elapsed}<{remaining} {desc}'


class Progress:
    """Shows how far a run is, while it is entered.

    On a terminal, if tqdm is installed, it is a bar that goes away at the end. Else it
    is a line now and then; a run of a few seconds prints none.

    Args:
        total (int): How many steps there are.
        stream (TextIO): Where to print.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._done = 0
        self._printed_at = time.monotonic()
        self._bar = _make_bar(total, stream)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, what: str) -> None:
        """A step begins.

        Args:
            what: The step, in a few words.
        """
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._done > 1)  # the step before is finished
            self._bar.set_description_str(printable(what))  # draws the bar
            return
        now = time.monotonic()
        if now - self._printed_at >= EVERY_SECONDS:
            self._printed_at = now
            line = f'hybridmem: {self._done} of {self._total}: {what}'
            print(printable(line), file=self._stream, flush=True)


def _make_bar(total: int, stream: TextIO) -> Any:
    """A bar of tqdm; None where there is no terminal or no tqdm."""
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, file=stream, leave=False, bar_format=_FORMAT)
