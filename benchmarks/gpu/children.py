"""Runs cases in another process, and in a new one after each that ends it.

CUDA cannot fork, and an access to a wrong address ends a process or makes all of its
later calls fail. The other process runs :func:`serve`, this one :func:`run`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_MARK = '@case '  # begins a line that this process reads
_BROKEN = 3  # status of a process whose GPU answers no more


def run(
    command: Sequence[str],
    names: Sequence[str],
    keep: Callable[[Row], None],
    silence_seconds: float,
) -> None:
    """Has the cases run, in order.

    Args:
        command: Of the process; the names of its cases follow.
        names: Of the cases.
        keep: Called with each row of a case as it comes; a case that fails or ends its
            process has one with ``why``.
        silence_seconds: After so many without a line the process is ended.
    """
    left = list(names)
    while left:
        process = subprocess.Popen(
            [*command, *left], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        begun, count = None, len(left)
        try:
            for line in _lines(process, silence_seconds):
                if not line.startswith(_MARK):
                    print(line, end='', flush=True)
                    continue
                told = json.loads(line.removeprefix(_MARK))
                if 'row' in told:
                    keep(told['row'])
                else:
                    begun = told.get('begun')
                    if begun is not None:
                        left.remove(begun)
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        if begun is not None:
            keep({'case': begun, 'why': _ending(code)})
        elif len(left) == count:  # nor would the next process begin one
            for name in left:
                keep({'case': name, 'why': f'not begun: {_ending(code)}'})
            return


def _lines(process: subprocess.Popen[str], silence_seconds: float) -> Iterator[str]:
    """What it says, until it ends; it is ended if it is silent for too long."""
    heard, ended = time.monotonic(), threading.Event()

    def watch() -> None:
        while not ended.wait(min(1.0, silence_seconds / 4)):
            if time.monotonic() - heard > silence_seconds:
                process.kill()
                return

    threading.Thread(target=watch, daemon=True).start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            heard = time.monotonic()
            yield line
    finally:
        ended.set()


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return 'its process said nothing for too long, or was killed'
    if code < 0:
        return f'its process ended by {signal.Signals(-code).name}'
    return f'its process ended with status {code}'


def serve(
    cases: Mapping[str, Callable[[], Iterable[Row]]],
    names: Sequence[str],
    is_alive: Callable[[], bool],
) -> int:
    """Runs cases and tells their rows; returns the status of this process.

    Args:
        cases: Each gives rows.
        names: Of those to run, in order.
        is_alive: Whether the GPU still answers, asked after a failure.
    """
    faulthandler.enable()
    for name in names:
        _tell(begun=name)
        began = time.perf_counter()
        try:
            for row in cases[name]():
                _tell(row={'case': name, **row})
        except Exception as error:
            traceback.print_exc()
            _tell(row={'case': name, 'why': describe(error)})
            if not is_alive():
                _tell(ended=name)
                sys.stdout.flush()
                os._exit(_BROKEN)  # CuPy's own end would wait for that GPU
        print(f'{name}: {time.perf_counter() - began:.1f} s', flush=True)
        _tell(ended=name)
    return 0


def describe(error: Exception) -> str:
    """An error in one line."""
    return f'{type(error).__name__}: {" ".join(str(error).split())}'


def _tell(**told: Any) -> None:
    print(_MARK + json.dumps(told, default=str), flush=True)
