"""A module seen through a few replaced attributes."""

from __future__ import annotations

import types
from typing import Any


class Overlay(types.ModuleType):
    """What one module gets for its global ``numpy``, say.

    The module itself, which all others share, stays as it is. Not for modules that test
    ``xp is numpy``.
    """

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
