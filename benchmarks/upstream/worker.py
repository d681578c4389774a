"""One pass over Chainer's own tests, under a regime or without; see run.py."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import sys
import unittest.mock
import zlib
from typing import Any

import chainer_hybridmem  # noqa: F401  before chainer

# isort: split
import numpy as np
import pytest
import regimes

sys.modules.setdefault('mock', unittest.mock)  # the package of that name, by today's
UNWANTED = 'gpu cudnn ideep chainerx slow multi_gpu theano'.split()


class Outcomes:
    """Pytest plugin: runs each test under a regime and notes its outcome.

    Args:
        regime: Name of the regime; None for Chainer alone.

    Attributes:
        outcomes: Passed, failed or skipped, by test.
        reasons: Last line of what went wrong, by test.
        counts: What the regime has done, summed over the tests.
    """

    def __init__(self, regime: str | None) -> None:
        self.regime = regime
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self._device = regimes.open_device() if regime else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        """The same random numbers in every pass."""
        seed = zlib.crc32(item.nodeid.encode())
        np.random.seed(seed)
        random.seed(seed)
        with contextlib.ExitStack() as stack:
            if self._device is not None:
                hook = regimes.Regime(self._device, self.regime, item.nodeid)
                stack.enter_context(hook)
                stack.callback(lambda: self.counts.update(hook.counts))
            return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes the worst outcome of a test's phases."""
        if report.when == 'call' or report.outcome != 'passed':
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            lines = str(report.longrepr).strip().splitlines() or ['']
            self.reasons[report.nodeid] = lines[-1]

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be read counts as a failure."""
        if report.failed:
            self.outcomes[report.nodeid] = 'failed'


def main(regime: str, output: str, *what: str) -> int:
    """Runs tests in the present folder, the root of Chainer's source."""
    plugin = Outcomes(None if regime == 'plain' else regime)
    settings = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'chainer.ini')
    options = ['-c', settings, '--rootdir', os.getcwd(), '-p', 'no:cacheprovider']
    options += ['-q', '--tb=short', '-m', ' and '.join(f'not {m}' for m in UNWANTED)]
    pytest.main([*options, *what], plugins=[plugin])
    body = {
        'outcomes': plugin.outcomes,
        'reasons': plugin.reasons,
        'counts': dict(plugin.counts),
    }
    with open(output, 'w', encoding='utf-8') as file:
        json.dump(body, file)
    return 0 if plugin.outcomes else 1


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
