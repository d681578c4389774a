"""Suites for pytest that planners and devices of other packages pass.

A test module derives a class from :class:`PlannerConformance` or
:class:`DeviceConformance` and gives it one fixture: what is to be tested. Every test of
the suite then runs in the derived class.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chainer_hybridmem.testing.devices import DeviceConformance
    from chainer_hybridmem.testing.planners import PlannerConformance

__all__ = ['DeviceConformance', 'PlannerConformance']
_HOMES = {'DeviceConformance': 'devices', 'PlannerConformance': 'planners'}


def __getattr__(name: str) -> Any:
    """Imports a suite when it is asked for: the small profiles need no pytest."""
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    home = f'{__name__}.{_HOMES[name]}'
    # What a failing check compares is shown as in test modules.
    importlib.import_module('pytest').register_assert_rewrite(home)
    return getattr(importlib.import_module(home), name)
