"""Lines of progress, where they are asked for."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from chainer_hybridmem.compiling import told
from chainer_hybridmem.errors import in_flags
from chainer_hybridmem.terminal import printable


class ProgressLines:
    """Tells what a session does.

    Args:
        progress: The option of that name: True for standard error, a file, or neither.
    """

    def __init__(self, progress: Any) -> None:
        self._file = (sys.stderr if progress is True else progress) or None
        self._compiling = contextlib.ExitStack()

    def open(self) -> None:
        """Tells when functions compile, too."""
        if self._file is not None:
            self._compiling.enter_context(told(self.tell))

    def close(self) -> None:
        """Tells no more of functions that compile."""
        self._compiling.close()

    def tell(self, message: str) -> None:
        """Writes a line, if the option asks for lines."""
        if self._file is not None:
            line = printable(f'hybridmem: {in_flags(message)}')
            print(line, file=self._file, flush=True)
