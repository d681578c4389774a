"""The plugin of pytest: fixtures, markers, and the base lines that a run writes.

pytest imports it at every start, so it imports nothing that takes long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.extras.memory_tests.measured_peak import (
    MeasuredPeak,
    describe_bytes,
)
from chainer_hybridmem.units import format_count

if TYPE_CHECKING:
    from chainer_hybridmem.extras.memory_tests.baselines import Baseline
    from chainer_hybridmem.extras.memory_tests.fits import Fits
    from chainer_hybridmem.planning.records.peak import Peak

UPDATE = '--hybridmem-update'
FILE = 'hybridmem_baselines'  # setting of pytest, and the file's name by default
FITS, BASELINE = 'fits', 'memory_baseline'
_MARKERS = (
    f'{FITS}(memory_limit, gpu=None, batchsize=None, planner=None): the test fails if '
    f'its peak, or with batchsize that of an estimate, exceeds the limit',
    f'{BASELINE}(tolerance=0): the test fails if its peak has grown',
)
_peak_key = pytest.StashKey[MeasuredPeak]()
_result_key = pytest.StashKey[dict[str, Any]]()
_estimated_key = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds a flag and a setting."""
    parser.getgroup('hybridmem', 'memory tests').addoption(
        UPDATE,
        action='store_true',
        help='write the peaks of tests marked memory_baseline as their base lines',
    )
    parser.addini(
        FILE, 'file of base lines, from the root folder', default=f'{FILE}.json'
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declares the markers."""
    for marker in _MARKERS:
        config.addinivalue_line('markers', marker)
    config.pluginmanager.register(_Results(config), 'hybridmem-results')


# -- fixtures ---------------------------------------------------------------------
@pytest.fixture(autouse=True)
def _hybridmem_meter(request: pytest.FixtureRequest) -> Iterator[MeasuredPeak | None]:
    """Measures a test that asks for it, with those of its fixtures made for it."""
    if not _is_measured(request):
        yield None
        return
    _check_tolerance(request.node)
    from chainer_hybridmem.training.chainer_access import compat

    compat.import_chainer()
    from chainer_hybridmem.training.recording.peak_meter import PeakMeter

    with PeakMeter() as meter:
        measured = request.node.stash[_peak_key] = MeasuredPeak(meter)
        yield measured


@pytest.fixture
def hybridmem_peak(_hybridmem_meter: MeasuredPeak) -> MeasuredPeak:
    """The highest load of this test so far: ``assert hybridmem_peak < '600MiB'``."""
    return _hybridmem_meter


@pytest.fixture
def hybridmem_step(
    request: pytest.FixtureRequest,
) -> Callable[[Callable[[int], Any], Any], None]:
    """Takes a step and its model: estimates what the marker ``fits`` asks about."""

    def check(step: Callable[[int], Any], model: Any) -> None:
        fits = _fits_of(request.node)
        if fits is None or not fits.estimated:
            pytest.fail(
                "hybridmem_step needs a marker with a batchsize, such as fits('16GiB', "
                "gpu='v100-16gb-pcie3', batchsize=64).",
                pytrace=False,
            )
        _check_training(step, model)
        _fail_if(fits.check_estimate(fits.estimate(step, model)))
        request.node.stash[_estimated_key] = True

    return check


def _check_training(step: Any, model: Any) -> None:
    """Refuses what cannot be recorded, before anything is."""
    if not callable(step):
        pytest.fail(
            f'hybridmem_step takes a step and its model, and the step is {step!r}; a '
            f'function of the number of examples is needed, such as '
            f'lambda size: optimizer.update(model, x[:size], t[:size]).',
            pytrace=False,
        )
    from chainer_hybridmem.training.chainer_access import compat

    compat.import_chainer()
    from chainer_hybridmem.training.chainer_access.models import one_model

    try:
        one_model(model)
        return
    except HybridMemoryError as error:
        why = f'hybridmem_step takes a step and its model: {error}'
    pytest.fail(why, pytrace=False)


def _is_measured(request: pytest.FixtureRequest) -> bool:
    if 'hybridmem_peak' in request.fixturenames:
        return True
    if request.node.get_closest_marker(BASELINE) is not None:
        return True
    fits = _fits_of(request.node)
    return fits is not None and not fits.estimated


def _fits_of(item: pytest.Item) -> Fits | None:
    marker = item.get_closest_marker(FITS)
    if marker is None:
        return None
    from chainer_hybridmem.extras.memory_tests.fits import Fits

    try:
        return Fits(*marker.args, **marker.kwargs)
    except (TypeError, HybridMemoryError) as error:
        why = f'The marker {FITS} cannot be used: {error}'
    pytest.fail(why, pytrace=False)


# -- one test ---------------------------------------------------------------------
@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Checks what the markers say once the test has passed."""
    result = yield
    measured = item.stash.get(_peak_key, None)
    peak = None if measured is None else measured.peak()
    if peak is not None:
        item.user_properties.append(('hybridmem_peak_bytes', peak.nbytes))
    try:
        _check_fits(item, peak)
        if peak is not None:
            item.stash[_result_key] = _check_baseline(item, peak)
    except HybridMemoryError as error:
        why = str(error)
    else:
        return result
    pytest.fail(why, pytrace=False)


def _check_fits(item: pytest.Item, peak: Peak | None) -> None:
    fits = _fits_of(item)
    if fits is None:
        return
    if not fits.estimated:
        assert peak is not None
        _fail_if(fits.check(peak))
    elif not item.stash.get(_estimated_key, False):
        pytest.fail(
            'fits with a batchsize needs the training: take the fixture hybridmem_step '
            'and call hybridmem_step(step, model), where step(batchsize) trains one '
            'iteration.',
            pytrace=False,
        )


def _check_baseline(item: pytest.Item, peak: Peak) -> dict[str, Any]:
    """Compares a test with its base line; what the run has to know of it."""
    marker = item.get_closest_marker(BASELINE)
    result: dict[str, Any] = {'peak_bytes': peak.nbytes}
    if marker is None:
        return result
    from chainer_hybridmem.extras.memory_tests import baselines

    tolerance = _tolerance_of(marker)
    result['functions'] = peak.functions()
    if item.config.getoption(UPDATE):
        return result
    path = item.config.getini(FILE)
    before = baselines.load(_path_of(item.config)).get(item.nodeid)
    if before is None:
        pytest.fail(
            f'{path} has no base line of this test; its peak is '
            f'{describe_bytes(peak.nbytes)}. Keep it with: pytest {UPDATE}',
            pytrace=False,
        )
    _fail_if(baselines.describe_growth(peak, before, tolerance, path))
    result['saved_bytes'] = before.peak_bytes - peak.nbytes
    return result


def _check_tolerance(item: pytest.Item) -> None:
    """Refuses a tolerance that cannot be used, before the test runs."""
    marker = item.get_closest_marker(BASELINE)
    if marker is None:
        return
    from chainer_hybridmem.extras.memory_tests import baselines

    try:
        baselines.allowed_growth(_tolerance_of(marker), 1)
        return
    except HybridMemoryError as error:
        why = f'The marker {BASELINE} cannot be used: {error}'
    pytest.fail(why, pytrace=False)


def _tolerance_of(marker: pytest.Mark) -> str | float:
    def read(tolerance: str | float = 0) -> str | float:
        return tolerance

    try:
        return read(*marker.args, **marker.kwargs)
    except TypeError:
        why = f'The marker {BASELINE} takes one argument, tolerance.'
    pytest.fail(why, pytrace=False)


def _fail_if(why: str | None) -> None:
    if why is not None:
        pytest.fail(why, pytrace=False)


def _path_of(config: pytest.Config) -> str:
    return os.path.join(config.rootpath, config.getini(FILE))


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """What a peak is made of, where a comparison with it fails."""
    for side in (left, right):
        if isinstance(side, MeasuredPeak):
            return [f'{left!r} {op} {right!r}', *side.peak().describe()]
    return None


# -- the run ----------------------------------------------------------------------
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Hands a test's figures to the process that reports."""
    report = yield
    if call.when == 'call' and _result_key in item.stash:
        vars(report)['hybridmem'] = item.stash[_result_key] if report.passed else None
    return report


class _Results:
    """Collects the figures of all tests, also of those that ran in other processes.

    Args:
        config: Of the run.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._peaks: dict[str, dict[str, Any]] = {}
        self._not_written: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = getattr(report, 'hybridmem', None)
        if result is not None:
            self._peaks[report.nodeid] = result

    @property
    def _writes(self) -> bool:
        """Whether this process writes base lines."""
        update = bool(self._config.getoption(UPDATE))
        return update and not hasattr(self._config, 'workerinput')

    def pytest_sessionstart(self) -> None:
        if not self._writes:
            return
        from chainer_hybridmem.extras.memory_tests import baselines

        try:
            baselines.load(_path_of(self._config))  # or the run would be for nothing
        except HybridMemoryError as error:
            raise pytest.UsageError(str(error)) from error

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._writes:
            return
        from chainer_hybridmem.extras.memory_tests import baselines

        try:
            baselines.save(_path_of(self._config), self._baselines())
        except HybridMemoryError as error:
            self._not_written = str(error)
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        path = self._config.getini(FILE)
        if self._not_written is not None:
            terminalreporter.write_sep('=', 'base lines not written', red=True)
            write(f'ERROR: {self._not_written}')
        elif self._config.getoption(UPDATE):
            lines = format_count(len(self._baselines()), 'base line')
            write(f'hybridmem: {lines} written to {path}')
        for test, result in sorted(self._peaks.items()):
            if result.get('saved_bytes', 0) > 0:
                write(
                    f'hybridmem: {test} needs {describe_bytes(result["saved_bytes"])} '
                    f'less than in {path}; keep that with: pytest {UPDATE}'
                )

    def _baselines(self) -> dict[str, Baseline]:
        from chainer_hybridmem.extras.memory_tests.baselines import Baseline

        return {
            test: Baseline(result['peak_bytes'], result['functions'])
            for test, result in self._peaks.items()
            if 'functions' in result
        }
