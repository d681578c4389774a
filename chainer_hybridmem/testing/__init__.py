"""A suite for pytest that planners of other packages pass.

A test module derives a class from :class:`PlannerConformance` and gives it one fixture:
what is to be tested. Every test of the suite then runs in the derived class.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chainer_hybridmem.testing.planners import PlannerConformance

__all__ = ['PlannerConformance']


def __getattr__(name: str) -> Any:
    """Imports the suite when it is asked for: the small profiles need no pytest."""
    if name not in __all__:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    home = f'{__name__}.planners'
    # What a failing check compares is shown as in test modules.
    importlib.import_module('pytest').register_assert_rewrite(home)
    return getattr(importlib.import_module(home), name)
