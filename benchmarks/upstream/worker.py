"""Chainer's own tests, each without us and then under every regime; see run.py."""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import os
import random
import re
import sys
import time
import unittest.mock
import zlib
from typing import Any

import chainer_hybridmem  # noqa: F401  before chainer

# isort: split
import numpy as np
import pytest
from _pytest.runner import runtestprotocol

from benchmarks.upstream import regimes
from chainer_hybridmem.training.recompute import drawing

sys.modules.setdefault('mock', unittest.mock)  # the package of that name, by today's
UNWANTED = ('ideep', 'chainerx', 'slow', 'theano')
GPU = ('gpu', 'cudnn', 'multi_gpu')
PLAIN = 'plain'
LONGEST_REASON = 300  # characters
PARAMETERS = re.compile(r'(_param_\d+_\{|_use_chainerx_|_attrs\d+|\[).*')
ADDRESS = re.compile(r'\bat 0x[0-9a-f]+')


def name_of(item: Any) -> str:
    """Id of a test, the same in every process."""
    return ADDRESS.sub('at 0x', item.nodeid)


def method_of(test: str) -> tuple[str, ...]:
    """File, class and method of a test, without the parameters."""
    return tuple(PARAMETERS.sub('', part) for part in test.split('::'))


def number_of(test: str) -> int:
    """Drawn from a test's name."""
    return zlib.crc32(test.encode())


def reason_of(text: str) -> str:
    """First sentence of the first error, and where it was raised."""
    lines = text.strip().splitlines() or ['']
    errors = [line[1:].strip() for line in lines if re.match(r'E +\S', line)]
    if '(caused by)' in errors:  # below Chainer's message about parameters
        errors = errors[errors.index('(caused by)') + 1 :]
    error = next(iter(errors), lines[-1])
    return f'{error} ({os.path.basename(lines[-1].strip())})'[:LONGEST_REASON]


class Passes:
    """Pytest plugin: runs each test several times and notes what became of it.

    Args:
        modes: :data:`PLAIN` and regimes, in order.
        share: Every so many-th test is run, chosen by its name; and of each method of
            each class so many more that one is not skipped.
        only: If there are any, the tests to run.
        device: ``'host'`` or ``'cuda'``: where maps are moved.
        progress: File that gets a line per test: seconds, mode, outcome and name.

    Attributes:
        outcomes: Passed, failed or skipped, by mode and test.
        reasons: What went wrong, likewise.
        counts: What the regimes have done, by mode.
        seconds: What the tests took, by mode.
        collected: How many tests there are.
    """

    def __init__(
        self, modes: list[str], share: int, only: set[str], device: str, progress: Any
    ) -> None:
        self.modes = modes
        self.share = share
        self.outcomes: dict[str, dict[str, str]] = {mode: {} for mode in modes}
        self.reasons: dict[str, dict[str, str]] = {mode: {} for mode in modes}
        self.counts: dict[str, collections.Counter[str]] = {
            mode: collections.Counter() for mode in modes
        }
        self.seconds = dict.fromkeys(modes, 0.0)
        self.unreadable: list[str] = []
        self.collected = 0
        self._only = only
        self._progress = progress
        self._spare: set[str] = set()  # run as long as their method was skipped
        self._run: set[tuple[str, ...]] = set()  # methods that were not skipped
        self._mode = PLAIN
        self._device = regimes.open_device(device)

    @pytest.hookimpl(trylast=True)  # of those that no mark excludes
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Chooses tests; what stands in for skipped ones comes after its class."""
        self.collected = len(items)
        gc.freeze()  # a device collects garbage, and tests are many and none
        if self._only:
            items[:] = [item for item in items if name_of(item) in self._only]
            return
        places: dict[tuple[str, ...], int] = {}
        ranks = {}
        for item in items:
            test = name_of(item)
            if number_of(test) % self.share:
                self._spare.add(test)
            place = places.setdefault(method_of(test)[:-1], len(places))
            spare = test in self._spare
            ranks[test] = place, spare, number_of(test) if spare else 0
        items.sort(key=lambda item: ranks[name_of(item)])

    def pytest_collectreport(self, report: Any) -> None:
        """Notes files that cannot be read."""
        if report.failed:
            self.unreadable.append(report.nodeid)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        """Every pass over one test; what is skipped without us is skipped with us."""
        test = name_of(item)
        if test in self._spare and method_of(test) in self._run:
            item.session._setupstate.teardown_exact(nextitem)
            return True
        outcome = ''
        for mode in self.modes:
            last = mode is self.modes[-1]
            if outcome != 'skipped':
                start = time.perf_counter()
                outcome = self._pass(mode, item, nextitem if last else item.parent)
                seconds = time.perf_counter() - start
                self.seconds[mode] += seconds
                print(f'{seconds:.2f}', mode, outcome, test, file=self._progress)
                if outcome != 'skipped':
                    self._run.add(method_of(test))
            elif last:
                item.session._setupstate.teardown_exact(nextitem)
            if outcome != 'skipped' or test not in self._spare:
                self.outcomes[mode][test] = outcome
        return True

    def _pass(self, mode: str, item: Any, nextitem: Any) -> str:
        self._mode = mode
        with contextlib.ExitStack() as stack:
            if mode != PLAIN:
                regimes.install(self._device)
                stack.callback(self._device.memory.uninstall)
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if nextitem is item.parent and hasattr(item, '_initrequest'):
            item._initrequest()  # its fixtures are made anew
        failed = [report for report in reports if report.failed]
        for report in failed:
            self.reasons[mode][name_of(item)] = reason_of(str(report.longrepr))
        skipped = any(report.skipped for report in reports)
        return 'failed' if failed else 'skipped' if skipped else 'passed'

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        """The same random numbers in every pass."""
        seed = number_of(name_of(item))
        np.random.seed(seed)
        random.seed(seed)
        if self._device.kind == 'cuda':
            drawing.seed_gpu(seed)
        with contextlib.ExitStack() as stack:
            if self._mode != PLAIN:
                hook = regimes.Regime(self._device, self._mode, name_of(item))
                stack.enter_context(hook)
                stack.callback(lambda: self.counts[self._mode].update(hook.counts))
            return (yield)


def main(device: str, modes: str, share: str, output: str, *what: str) -> int:
    """Runs tests in the present folder, the root of Chainer's source.

    Args:
        device: ``'host'``, or ``'cuda'`` for the tests that need a GPU.
        modes: Joined with commas.
        share: See :class:`Passes`.
        output: File for what was found; the progress goes beside it.
        what: Folders and files, and perhaps ``@`` and a file with ids of tests.
    """
    only: set[str] = set()
    for name in (name[1:] for name in what if name.startswith('@')):
        with open(name, encoding='utf-8') as file:
            only.update(json.load(file))
    settings = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'chainer.ini')
    options = ['-c', settings, '--rootdir', os.getcwd(), '-p', 'no:cacheprovider']
    options += ['--continue-on-collection-errors', '-p', 'no:terminal']
    unwanted = ' or '.join(UNWANTED if device == 'cuda' else (*UNWANTED, *GPU))
    wanted = f'({" or ".join(GPU)}) and ' if device == 'cuda' else ''
    options += ['-m', f'{wanted}not ({unwanted})']
    folders = [name for name in what if not name.startswith('@')]
    with (
        open(f'{output}.progress', 'w', buffering=1, encoding='utf-8') as progress,
        regimes.poisoned_blocks(),
    ):
        plugin = Passes(modes.split(','), int(share), only, device, progress)
        pytest.main([*options, *folders], plugins=[plugin])
    body = {
        'collected': plugin.collected,
        'outcomes': plugin.outcomes,
        'reasons': plugin.reasons,
        'counts': plugin.counts,
        'seconds': plugin.seconds,
        'unreadable': plugin.unreadable,
    }
    with open(output, 'w', encoding='utf-8') as file:
        json.dump(body, file)
    return 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
