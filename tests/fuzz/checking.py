"""Runs cases, compares them with plain Chainer, and makes failing ones smaller."""

from __future__ import annotations

import copy
import dataclasses
import gc
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator

from chainer_hybridmem import InfeasibleError

# isort: split
import chainer
from support import faulty

from chainer_hybridmem.errors import HostFullError, OptionError, SessionError

from .cases import Case
from .places import place
from .training import (
    READS,
    Observation,
    Run,
    ask,
    in_core_bytes,
    open_session,
    surroundings,
)

MEASURED_STEPS = 2
LARGEST_SHARE = 1.1  # of what plain Chainer needs beside what stays
TRIES = 2  # with less than that
REFUSALS = 'cannot obey the rules', 'leave nothing to do', 'cannot hold'  # of rules
PASSED = ('same', 'refused', 'declined', 'invalid')


@dataclasses.dataclass
class Result:
    """What came out of a case.

    Attributes:
        outcome: ``'same'``, ``'refused'`` (every limit was too small),
            ``'declined'`` (a graph was used again for the first time, maps were written
            into for the first time, or a chain is static), ``'invalid'``
            (plain Chainer cannot train it), or what went wrong.
        detail: Why.
        refusals: Limits that were too small, before one that was not.
        guided: Iterations that followed a plan.
        deviations: Iterations that left their plan.
        moved: Maps that the last plan swaps and recomputes.
        sources: What the last plan lets stay for replays alone.
    """

    outcome: str
    detail: str = ''
    refusals: int = 0
    guided: int = 0
    deviations: int = 0
    moved: tuple[int, int] = (0, 0)
    sources: int = 0

    @property
    def failed(self) -> bool:
        """Whether the package has done something wrong."""
        return self.outcome not in PASSED


class _Wrong(Exception):
    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


@dataclasses.dataclass
class _Expected:
    """Plain Chainer's run: what was seen, and the parameters after each update."""

    observations: list[Observation]
    updates: list[Observation]


def _plain(case: Case) -> _Expected:
    run = Run(case)
    expected = _Expected([], [run.parameters()])
    with run.configured():
        for number in range(len(case.steps)):
            run.step(number)
            expected.observations.append(run.observe())
            if run.updates == len(expected.updates):
                expected.updates.append(run.parameters())
    return expected


def check(case: Case) -> Result:
    """Trains a case twice and compares everything after each iteration."""
    gc.disable()  # so that memory is freed at the same moments in every run
    gc.freeze()  # a collection looks at what the case has made, not at all modules
    try:
        return _check(case)
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()


def _check(case: Case) -> Result:
    case = place().adapted(case)
    try:
        expected = _plain(case)
        base, peak = in_core_bytes(case, MEASURED_STEPS)
    except Exception as error:
        return Result('invalid', f'{type(error).__name__}: {error}')
    share, refusals = case.session['share'], 0
    while True:
        limit = base + int((peak - base) * share)
        result = _check_at(case, expected, limit)
        refusals += result.outcome == 'refused'
        result.refusals = refusals
        if result.outcome != 'refused' or share >= LARGEST_SHARE:
            return result
        share = (share + LARGEST_SHARE) / 2 if refusals < TRIES else LARGEST_SHARE


def _check_at(case: Case, expected: _Expected, limit: int) -> Result:
    result = Result('same')
    try:
        with tempfile.TemporaryDirectory() as folder, surroundings(case):
            run = Run(case)
            with run.configured():
                _train(case, run, expected, limit, folder, result)
                _after(case, run, expected)
    except _Wrong as error:
        result.outcome, result.detail = error.outcome, str(error)
    except Exception:
        result.outcome, result.detail = 'error', traceback.format_exc(limit=-8)
    return result


def _train(
    case: Case, run: Run, expected: _Expected, limit: int, folder: str, result: Result
) -> None:
    opened = open_session(run, limit, folder)
    different = None
    told: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as told, opened:
            place().take_figures()
            for number in range(len(case.steps) - 1):
                ask(opened, case.steps[number].event, case)
                run.step(number)
                try:
                    _compare(number, expected.observations[number], run.observe())
                except _Wrong as wrong:
                    if not (place().tells_late and _writes_late(case)):
                        raise
                    different = wrong
                    break
            taken, races = place().take_figures()
        if different is not None:  # and nothing has been told
            raise different
    except (MemoryError, InfeasibleError) as error:
        for late in told:
            if _is_documented(str(late.message), case):
                raise _Wrong('declined', str(late.message)) from error
        _whole_after_refusal(run, expected)
        raise _Wrong('refused', f'{type(error).__name__} {error}') from error
    except HostFullError as error:
        if case.session.get('host_share') is None:
            raise
        raise _Wrong('refused', str(error)) from error
    except SessionError as error:
        if not _is_documented(str(error), case):
            raise
        raise _Wrong('declined', str(error)) from error
    except OptionError as error:
        ruled = case.session.get('rules') and any(w in str(error) for w in REFUSALS)
        if 'lower sets' not in str(error) and not ruled:
            raise
        raise _Wrong('refused', str(error)) from error
    finally:
        figures = opened.statistics()
        result.guided = figures['guided_iterations']
        result.deviations = figures['deviations']
        result.moved = figures['swap'] or 0, figures['recompute'] or 0
        result.sources = 0 if opened.plan is None else len(opened.plan.sources)
    for nbytes in (figures['peak_bytes'], taken):
        if nbytes > limit:
            raise _Wrong('limit', f'{nbytes} bytes of {limit} were used')
    if races:
        raise _Wrong('races', f'{races} of them')


def _is_documented(message: str, case: Case) -> bool:
    """Whether a session may end so, with this case."""
    late = 'after its last planned use', 'have been updated since its forward'
    if any(part in message for part in late):
        # An iteration that is new to the session may ask for what its plan has dropped.
        # A carried state is cut off under what a cycle goes back over.
        kinds = {step.kind for step in case.steps}
        carried = any(options.get('carry') for _, options, _ in case.layers)
        return len(kinds) > 1 or (carried and 'cycle' in kinds)
    written = 'has been changed in place', 'has written into a feature map'
    if any(part in message for part in written):
        return _writes_late(case)
    return 'use_static_graph' in message and any(n == 'static' for n, *_ in case.layers)


def _writes_late(case: Case) -> bool:
    """Whether it writes where no recording can have seen it.

    It begins after the first one, or lets go of what it has written into and backward
    does not read; where the host compares at once, a replay that read it runs again.
    """
    return any(
        o['since'] or (o.get('unread') and o['late'] and place().tells_late)
        for name, o, _ in case.layers
        if name == 'written'
    )


def _after(case: Case, run: Run, expected: _Expected) -> None:
    """Nothing is left behind, and training goes on."""
    _nothing_left(run)
    last = len(case.steps) - 1
    run.step(last)
    _compare(last, expected.observations[last], run.observe())


def _compare(number: int, expected: Observation, actual: Observation) -> None:
    names = [
        name
        for name in {**expected, **actual}
        if name != READS and expected.get(name) != actual.get(name)
    ]
    if expected[READS] - actual[READS]:  # a trial may read something else, too
        names.append(READS)
    if names:
        raise _Wrong('different', f'after iteration {number}: {", ".join(names)}')


def _whole_after_refusal(run: Run, expected: _Expected) -> None:
    _nothing_left(run)
    others = [p for p in run.model.params() if type(p) is not chainer.Parameter]
    if others and run.case.training.get('replaced'):
        return  # the error came while the program had put others there
    for parameter in others:
        raise _Wrong('not whole', f'{parameter.name} is a {type(parameter)}')
    if run.updating:
        return  # the refusal came in the middle of an update
    if run.updates == 0 and not run.case.training['initialised']:
        return  # or of making parameters
    before, now = expected.updates[run.updates], run.parameters()
    for name, value in before.items():
        # Parameters made lazily have come since; states come with the first update.
        if value is not None and now.get(name) != value:
            raise _Wrong('not whole', f'{name} has changed since the last update')


def _nothing_left(run: Run) -> None:
    if place().is_left() or 'hybridmem' in chainer.get_function_hooks():
        raise _Wrong('left', 'the session is over, its allocator or hook is not')
    copies = run.active.device.copies if run.active is not None else None
    if copies is not None and copies.host_bytes + copies.disk_bytes:
        raise _Wrong('left', 'the session is over, its host copies are not')
    if faulty.copy_threads():
        raise _Wrong('left', 'the session is over, its threads are not')


# -- shrinking -----------------------------------------------------------------
def shrunk(case: Case, outcome: str, seconds: float) -> Case:
    """A smaller case with the same outcome."""
    end = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for other in _smaller(case):
            if time.monotonic() > end:
                return case
            if check(other).outcome == outcome:
                case, smaller = other, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for i in reversed(range(len(case.layers))):
        yield _without(case, 'layers', i)
    for i in reversed(range(len(case.steps))):
        if len(case.steps) > 1:
            yield _without(case, 'steps', i)
    for i in range(len(case.steps)):
        for key, value in (('event', ''), ('evaluate', ''), ('keep', False),
                           ('kind', 'plain'), ('batch', 2), ('hoard', 0)):  # fmt: skip
            if getattr(case.steps[i], key) != value:
                other = copy.deepcopy(case)
                setattr(other.steps[i], key, value)
                yield other
    simple = {'planner': 'swap-all', 'options': {}}
    for changes in (
        {'arena': False}, {'cross_iteration': False},
        {'file': False}, {'link_bandwidth': None}, {'copies': 1.0}, simple,
        {'share': LARGEST_SHARE}, {'host_share': None},
        {'rules': {}},
    ):  # fmt: skip
        if any(case.session.get(key) != value for key, value in changes.items()):
            other = copy.deepcopy(case)
            other.session.update(changes)
            yield other
    for key in ('late', 'sources'):
        if case.session['options'].get(key):
            other = copy.deepcopy(case)
            other.session['options'][key] = 0.0
            yield other
    for changes in ({'decay': False}, {'clip': False}, {'frozen': False},
                    {'optimizer': 'SGD'}, {'initialised': True},
                    {'inside': False}):  # fmt: skip
        if any(case.training[key] != value for key, value in changes.items()):
            other = copy.deepcopy(case)
            other.training.update(changes)
            yield other
    if case.dtype != 'float32':
        yield dataclasses.replace(case, dtype='float32')


def _without(case: Case, field: str, index: int) -> Case:
    other = copy.deepcopy(case)
    del getattr(other, field)[index]
    return other
