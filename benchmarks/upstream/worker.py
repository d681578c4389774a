"""Chainer's own tests, each without us and then under every regime; see run.py."""

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
from _pytest.runner import runtestprotocol

sys.modules.setdefault('mock', unittest.mock)  # the package of that name, by today's
UNWANTED = ('gpu', 'cudnn', 'ideep', 'chainerx', 'slow', 'multi_gpu', 'theano')
PLAIN = 'plain'
LONGEST_REASON = 300  # characters


class Passes:
    """Pytest plugin: runs each test several times and notes what became of it.

    Args:
        modes: :data:`PLAIN` and regimes, in order.
        share: Every so many-th test is run, chosen by its name.

    Attributes:
        outcomes: Passed, failed or skipped, by mode and test.
        reasons: What went wrong, likewise.
        counts: What the regimes have done, by mode.
    """

    def __init__(self, modes: list[str], share: int) -> None:
        self.modes = modes
        self.share = share
        self.outcomes: dict[str, dict[str, str]] = {mode: {} for mode in modes}
        self.reasons: dict[str, dict[str, str]] = {mode: {} for mode in modes}
        self.counts: dict[str, collections.Counter[str]] = {
            mode: collections.Counter() for mode in modes
        }
        self.unreadable: list[str] = []
        self._mode = PLAIN
        self._device = regimes.open_device()
        self._device.uninstall()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leaves the chosen share."""
        items[:] = [
            item for item in items if zlib.crc32(item.nodeid.encode()) % self.share == 0
        ]

    def pytest_collectreport(self, report: Any) -> None:
        """Notes files that cannot be read."""
        if report.failed:
            self.unreadable.append(report.nodeid)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        """Every pass over one test."""
        for mode in self.modes:
            self._mode = mode
            last = mode is self.modes[-1]
            with contextlib.ExitStack() as stack:
                if mode != PLAIN:
                    regimes.install(self._device)
                    stack.callback(self._device.uninstall)
                reports = runtestprotocol(
                    item, log=False, nextitem=nextitem if last else item
                )
            self._note(mode, item.nodeid, reports)
            if not last and hasattr(item, '_initrequest'):
                item._initrequest()  # its fixtures are made anew
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        """The same random numbers in every pass."""
        seed = zlib.crc32(item.nodeid.encode())
        np.random.seed(seed)
        random.seed(seed)
        with contextlib.ExitStack() as stack:
            if self._mode != PLAIN:
                hook = regimes.Regime(self._device, self._mode, item.nodeid)
                stack.enter_context(hook)
                stack.callback(lambda: self.counts[self._mode].update(hook.counts))
            return (yield)

    def _note(self, mode: str, test: str, reports: list[Any]) -> None:
        failed = [report for report in reports if report.failed]
        skipped = any(report.skipped for report in reports)
        outcome = 'failed' if failed else 'skipped' if skipped else 'passed'
        self.outcomes[mode][test] = outcome
        for report in failed:
            lines = str(report.longrepr).strip().splitlines() or ['']
            self.reasons[mode][test] = lines[-1].strip()[:LONGEST_REASON]


def main(modes: str, share: str, output: str, *what: str) -> int:
    """Runs tests in the present folder, the root of Chainer's source."""
    plugin = Passes(modes.split(','), int(share))
    settings = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'chainer.ini')
    options = ['-c', settings, '--rootdir', os.getcwd(), '-p', 'no:cacheprovider']
    options += ['--continue-on-collection-errors', '-p', 'no:terminal']
    options += ['-m', ' and '.join(f'not {mark}' for mark in UNWANTED)]
    pytest.main([*options, *what], plugins=[plugin])
    body = {
        'outcomes': plugin.outcomes,
        'reasons': plugin.reasons,
        'counts': plugin.counts,
        'unreadable': plugin.unreadable,
    }
    with open(output, 'w', encoding='utf-8') as file:
        json.dump(body, file)
    return 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
