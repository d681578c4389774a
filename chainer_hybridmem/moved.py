"""Modules that others import by an older name: the same module has both."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PREFIX = 'chainer_hybridmem.'
HOMES = {
    'chainer_access': 'training.chainer_access',
    'devices': 'training.devices',
    'execution': 'training.execution',
    'planners': 'planning.planners',
    'planners.largest_batch': 'forecasting.batches',
    'pools': 'planning.layouts',
    'recording': 'training.recording',
    'recording.memory_series': 'extras.memory_series',
    'records': 'planning.records',
    'search': 'planning.search',
    'session': 'training.session',
    'session.batch_estimate': 'forecasting.batch_estimate',
    'session.inference_session': 'extras.inference_session',
    'simulation': 'planning.simulation',
    # Named by entry points and the .pth of an environment from before the moves.
    'memory_tests': 'extras.memory_tests',
    'session.starting': 'running.starting',
}
"""New names by old ones, which hold for what is below them, too."""


def find_home(name: str) -> str | None:
    """The name of a module now, both without the package; None where it is as ever."""
    known, rest = name, ''
    while known not in HOMES:
        known, _, last = known.rpartition('.')
        rest = f'.{last}{rest}'
        if not known:
            return None
    return HOMES[known] + rest


class Finder:
    """A finder and loader of old names."""

    def __init__(self, home: str = '') -> None:
        self._home = home
        self._spec: ModuleSpec | None = None

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module that has moved; comes before what finds files."""
        if not fullname.startswith(PREFIX):
            return None
        home = find_home(fullname.removeprefix(PREFIX))
        loader: Any = cls(PREFIX + home) if home else None
        return ModuleSpec(fullname, loader) if home else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # it has been given that of the old name


def install() -> None:
    """Has old names found from now on."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
