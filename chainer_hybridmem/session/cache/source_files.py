"""The source files of a program: kept plans count as long as they are the same."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

from chainer_hybridmem import files

MAIN = '__main__'


class SourceFiles:
    """Hashes of the files that a model and its functions come from.

    Attributes:
        stamps (dict): By module, as it was when first met; None if it has no file
            that can be read.
    """

    def __init__(self) -> None:
        self._met: set[type] = set()
        self.stamps: dict[str, str | None] = {}
        if (stamp := _stamp(MAIN)) is not None:
            self.stamps[MAIN] = stamp

    def meet(self, kind: type) -> None:
        """Notes the source files of a link's or a function's class."""
        if kind in self._met:
            return
        self._met.add(kind)
        for base in kind.__mro__:
            module = base.__module__
            if module not in (*self.stamps, 'builtins'):
                self.stamps[module] = _stamp(module)

    def find_unknown(self) -> str | None:
        """A module without a file that could be compared; None if there is none."""
        return next((m for m, stamp in self.stamps.items() if stamp is None), None)

    def check(self, recorded: Any) -> None:
        """Nothing may have been edited, neither of the plan's nor of the model's."""
        if not isinstance(recorded, dict):
            raise TypeError(f'a dict was expected, got {recorded!r}')
        for module in sorted({*recorded, *self.stamps}):
            now = self.stamps[module] if module in self.stamps else _stamp(module)
            if module not in recorded or now is None or now != recorded[module]:
                raise files.broken('guide', f'the code of module {module!r} is another')


def _stamp(module: str) -> str | None:
    """Hash of a loaded module's file; None if it has none that can be read."""
    loaded = sys.modules.get(module)
    path = None if loaded is None else vars(loaded).get('__file__')
    if not isinstance(path, str):
        return None
    try:
        with open(path, 'rb') as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None
