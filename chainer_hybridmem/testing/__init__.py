"""Suites for pytest that planners and devices of other packages pass.

A test module derives a class from :class:`PlannerConformance` or
:class:`DeviceConformance` and gives it one fixture: what is to be tested. Every test of
the suite then runs in the derived class.
"""

import pytest

# What a failing check compares is shown as in test modules.
pytest.register_assert_rewrite(f'{__name__}.devices', f'{__name__}.planners')

from chainer_hybridmem.testing.devices import DeviceConformance  # noqa: E402
from chainer_hybridmem.testing.planners import PlannerConformance  # noqa: E402

__all__ = ['DeviceConformance', 'PlannerConformance']
