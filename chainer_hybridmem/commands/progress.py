"""How far a long run is, on standard error: a bar on a terminal, else plain lines."""

from __future__ import annotations

import threading
from typing import Any, TextIO

from chainer_hybridmem import timing
from chainer_hybridmem.interrupts import Worker, start_whole
from chainer_hybridmem.terminal import printable

EVERY_SECONDS = 5.0  # between two lines about short steps
LATE_SECONDS = 3.0  # a step that takes longer has a line
TICK_SECONDS = 1.0
_FORMAT = '{n_fmt} of {total_fmt} |{bar:20}| {elapsed}<{remaining} {desc}'


class Progress:
    """Shows how far a run is, while it is entered.

    On a terminal, if tqdm is installed, it is a bar that goes away at the end. Else it
    is a line for each step that takes long; a run of a few seconds prints none.

    Args:
        total (int): How many steps there are.
        stream (TextIO): Where to print.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._done = 0
        self._what = ''
        self._began_at = self._printed_at = timing.now()
        self._is_told = True
        self._bar = _make_bar(total, stream)
        self._over = threading.Event()
        self._ticker = Worker(self._tick)

    def __enter__(self) -> Progress:
        _entered.append(self)
        start_whole(self._ticker, self._over.set)
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        if self._ticker.runs:
            self._ticker.join()
        if self._bar is not None:
            self._bar.close()
        _entered.remove(self)

    def step(self, what: str, at_once: bool = False) -> None:
        """Tells that a step begins.

        Args:
            what: The step, in a few words. A plain line is printed once for steps that
                follow each other and have the same words.
            at_once: Whether it surely takes long, so that it has a line.
        """
        self._done += 1
        if self._bar is not None:
            self._bar.set_description_str(printable(what), refresh=False)
            self._bar.update(self._done > 1)  # the step before is finished
            self._bar.refresh()
            return
        if what == self._what:
            return
        self._what = what
        now = self._began_at = timing.now()
        self._is_told = False
        if at_once or now - self._printed_at >= EVERY_SECONDS:
            self._tell()

    def detail(self, text: str) -> None:
        """What the step is at; only the bar shows it.

        Args:
            text: A few words.
        """
        if self._bar is not None:
            self._bar.set_description_str(printable(text))

    def print_line(self, line: str) -> None:
        """Prints a line; a bar goes on below it."""
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.write(line, file=self._stream)

    def _tick(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            if self._bar is not None:
                self._bar.refresh()  # the time that has passed
            elif timing.now() - self._began_at >= LATE_SECONDS:
                self._tell()

    def _tell(self) -> None:
        if self._is_told:
            return
        self._is_told = True
        self._printed_at = self._began_at
        line = f'hybridmem: {self._done} of {self._total}: {self._what}'
        print(printable(line), file=self._stream, flush=True)


_entered: list[Progress] = []  # the last one has the terminal


def leave_all() -> None:
    """Leaves what is entered still: Ctrl-C may come where ``with`` does not see it."""
    while _entered:
        _entered[-1].__exit__()


def print_line(line: str, stream: TextIO) -> None:
    """Prints a line to standard error, above the bar if there is one."""
    if _entered:
        _entered[-1].print_line(line)
    else:
        print(line, file=stream, flush=True)


def _make_bar(total: int, stream: TextIO) -> Any:
    """A bar of tqdm; None where there is no terminal or no tqdm."""
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, file=stream, leave=False, bar_format=_FORMAT)
