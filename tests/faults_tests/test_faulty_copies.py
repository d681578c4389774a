"""Copies that fail, are late or never answer; swap files that are full or broken."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import faulty

import chainer_hybridmem
from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.training.devices.host import copies, numpy_memory
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.devices.swap_store.space import Space, StoreSlab
from chainer_hybridmem.training.devices.swap_store.swap_file import SwapFile
from chainer_hybridmem.training.session.session import Session

SWAP = {'planner': 'swap-all'}
AT_MOST = 1  # failures per stage and kind
STAGES = ['warm-up', 'profiling with replays', 'profiling', 'guided with an arena']
# While memory is made for an allocation, NumPy says that there is none.
IN_RECLAIM = (SwapStoreError, MemoryError)
PLANS = {
    'swap': SWAP,
    'crossing': {**SWAP, 'cross_iteration': 'all'},
}


class FailingCopies:
    """Copies in one direction fail from one of them on.

    Args:
        outward: Whether copies to the store fail, or those from it.
        number: Of the first one that fails.
        count: How many fail.
        error: What they raise.
        late: Whether they have copied half of it before.
    """

    def __init__(
        self,
        outward: bool,
        number: int,
        count: int = 1,
        error: BaseException | None = None,
        late: bool = False,
    ) -> None:
        self.outward, self.number, self.count = outward, number, count
        self.error = error or OSError(5, 'the disk is broken')
        self.late = late
        self.copies = 0

    @contextlib.contextmanager
    def __call__(self, session: Session) -> Iterator[None]:
        execute = copies.CopyThread._execute

        def failing(thread: Any, job: Any) -> None:
            if job.outward is self.outward:
                self.copies += 1
                if 0 <= self.copies - 1 - self.number < self.count:
                    if self.late:
                        execute(thread, job)
                    raise type(self.error)(*self.error.args)  # without a traceback
            execute(thread, job)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copies.CopyThread, '_execute', failing)
            yield


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small copies are made by threads, too."""
    monkeypatch.setattr(copies, 'AT_ONCE_BYTES', 0)


def numbers(stage: str, plan: str, outward: bool) -> range:
    at, options = faulty.STAGES[stage]
    counting = FailingCopies(outward, 0, count=0)
    case = faulty.leave_session(at, counting, **options, **PLANS[plan])
    assert case.error is None
    return faulty.chosen(counting.copies, AT_MOST, offset=len(stage))


@pytest.mark.matrix
@pytest.mark.parametrize('outward', [True, False])
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', STAGES)
def test_a_failed_copy_ends_the_session(stage: str, plan: str, outward: bool) -> None:
    at, options = faulty.STAGES[stage]
    for number in numbers(stage, plan, outward):
        failing = FailingCopies(outward, number, late=bool(number % 2))
        case = faulty.leave_session(at, failing, **options, **PLANS[plan])
        assert failing.copies > number
        check_message(case.error)


def check_message(error: BaseException | None) -> None:
    if error is not None:
        assert isinstance(error, SwapStoreError), repr(error)
        assert 'the disk is broken' in str(error) and 'swap' in str(error)


@pytest.mark.matrix
@pytest.mark.parametrize('outward', [True, False])
@pytest.mark.parametrize('plan', reversed(PLANS))
@pytest.mark.parametrize('stage', STAGES)
def test_a_failed_copy_that_the_program_catches(
    stage: str, plan: str, outward: bool
) -> None:
    at, options = faulty.STAGES[stage]
    for number in numbers(stage, plan, outward):
        failing = FailingCopies(outward, number)
        case = faulty.stay_in_session(at, failing, **options, **PLANS[plan])
        if not isinstance(case.inside, MemoryError):
            check_message(case.inside)


@pytest.mark.matrix
@pytest.mark.parametrize('kind', [SystemExit, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize('outward', [True, False])
@pytest.mark.usefixtures('handed_over')
def test_a_copy_thread_survives_what_a_copy_raises(
    outward: bool, kind: type[BaseException]
) -> None:
    failing = FailingCopies(outward, 3, error=kind())
    assert isinstance(faulty.stay_in_session(4, failing, **SWAP).inside, SwapStoreError)
    failing = FailingCopies(outward, 3, error=kind())
    assert isinstance(faulty.leave_session(4, failing, **SWAP).error, SwapStoreError)


@pytest.mark.matrix
@pytest.mark.parametrize('kind', [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize('outward', [True, False])
def test_what_ends_the_program_ends_a_small_copy(
    outward: bool, kind: type[BaseException]
) -> None:
    """The program makes it itself; what it would have copied is not lost."""
    failing = FailingCopies(outward, 3, error=kind())
    assert isinstance(faulty.stay_in_session(4, failing, **SWAP).inside, kind)
    failing = FailingCopies(outward, 3, error=kind())
    assert isinstance(faulty.leave_session(4, failing, **SWAP).error, kind)


@pytest.mark.matrix
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('outward', [True, False])
@pytest.mark.usefixtures('handed_over')
def test_a_copy_thread_that_dies_is_noticed_and_replaced(
    outward: bool, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(nbytes: int, outward: bool, error: BaseException) -> None:
        raise SystemExit

    monkeypatch.setattr(copies, '_failure', die)
    monkeypatch.setattr(threading, 'excepthook', lambda arguments: None)
    monkeypatch.setattr(copies, '_ALIVE_SECONDS', 0.05)
    for number in (0, 2):
        options = PLANS[plan]
        case = faulty.leave_session(4, FailingCopies(outward, number), **options)
        assert isinstance(case.error, SwapStoreError) and 'died' in str(case.error)
        case = faulty.stay_in_session(4, FailingCopies(outward, number), **options)
        assert isinstance(case.inside, SwapStoreError) and 'died' in str(case.inside)


@contextlib.contextmanager
def no_more_threads(session: Session) -> Iterator[None]:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith('hybridmem'):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, 'start', refuse)
        yield


@pytest.mark.parametrize('at', [0, 1])
def test_a_thread_that_cannot_be_started(at: int) -> None:
    case = faulty.leave_session(at, no_more_threads, **SWAP)
    assert at == 1 or isinstance(case.error, SwapStoreError)
    assert at == 1 or "can't start new thread" in str(case.error)
    faulty.stay_in_session(at, no_more_threads, **SWAP)


@contextlib.contextmanager
def late_copies(session: Session) -> Iterator[None]:
    execute = copies.CopyThread._execute

    def late(thread: Any, job: Any) -> None:
        time.sleep(0.004)
        execute(thread, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies.CopyThread, '_execute', late)
        yield


@pytest.mark.matrix
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', STAGES)
def test_a_slow_disk_costs_nothing_but_time(stage: str, plan: str) -> None:
    at, options = faulty.STAGES[stage]
    case = faulty.leave_session(at, late_copies, **options, **PLANS[plan])
    assert case.error is None


@contextlib.contextmanager
def no_host_memory(session: Session) -> Iterator[None]:
    def refuse(nbytes: int) -> Any:
        raise MemoryError(f'the machine has {nbytes - 1} bytes available')

    ram = session.device.copies._ram  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ram, '_make_block', refuse)
        patch.setattr(StoreSlab, 'take', lambda slab, nbytes: None)  # none has room
        yield


@pytest.mark.parametrize('stage', ['warm-up', 'profiling with replays', 'profiling'])
def test_host_memory_that_is_refused(stage: str) -> None:
    at, options = faulty.STAGES[stage]
    case = faulty.leave_session(at, no_host_memory, **options, **SWAP)
    assert isinstance(case.error, SwapStoreError)
    assert 'no host memory' in str(case.error)
    case = faulty.stay_in_session(at, no_host_memory, **options, **SWAP)
    assert at == 2 or isinstance(case.inside, IN_RECLAIM)


@contextlib.contextmanager
def full_disk(session: Session) -> Iterator[None]:
    """Files must not grow beyond 4 KiB."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@pytest.mark.parametrize('stage', STAGES)
def test_a_swap_file_that_must_not_grow(stage: str, tmp_path: Any) -> None:
    at, options = faulty.STAGES[stage]
    options = {**options, **SWAP, 'swap_dir': str(tmp_path)}
    case = faulty.leave_session(at, full_disk, **options)
    assert isinstance(case.error, SwapStoreError) and 'swap_dir' in str(case.error)
    case = faulty.stay_in_session(at, full_disk, **options)
    assert isinstance(case.inside, IN_RECLAIM)
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def truncated_file(session: Session) -> Iterator[None]:
    """The file loses its contents between the first swap-out and swap-in."""
    execute = copies.CopyThread._execute
    file = session.device.copies._disk._file  # type: ignore[attr-defined]

    def truncating(thread: Any, job: Any) -> None:
        if not job.outward:
            os.ftruncate(file._fd, 0)
        execute(thread, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies.CopyThread, '_execute', truncating)
        yield


@pytest.mark.parametrize('stage', STAGES)
def test_a_swap_file_that_is_truncated(stage: str, tmp_path: Any) -> None:
    at, options = faulty.STAGES[stage]
    options = {**options, **SWAP, 'swap_dir': str(tmp_path)}
    case = faulty.leave_session(at, truncated_file, **options)
    assert isinstance(case.error, SwapStoreError)
    assert 'bytes were read' in str(case.error)
    case = faulty.stay_in_session(at, truncated_file, **options)
    # Without a plan, chance decides what leaves; then all numbers are right.
    assert (at == 0 and case.inside is None) or isinstance(case.inside, SwapStoreError)


def test_a_parameter_whose_only_copy_is_broken_is_named(tmp_path: Any) -> None:
    """Its values are nowhere: the one fault that training cannot go on from."""
    run = faulty.Run()
    session = chainer_hybridmem.optimize(
        run.model, faulty.LIMIT, swap_dir=str(tmp_path), **PLANS['crossing']
    )
    with pytest.raises(SwapStoreError, match='values are lost: go on with a new'):
        with session:
            for i in range(4):
                run.iterate(i)
            with truncated_file(session):
                run.iterate(4)
    with pytest.raises(SwapStoreError, match='values are lost'):
        run.snapshot()  # nobody reads anything else instead
    with pytest.raises(SwapStoreError, match='values are lost'):
        with chainer_hybridmem.optimize(run.model, faulty.LIMIT):
            pass
    assert not numpy_memory.installed()


def test_a_parameter_is_read_once_more() -> None:
    """What fails once costs nothing, where there is no other copy."""
    options = PLANS['crossing']
    counting = FailingCopies(False, 0, count=0)
    faulty.leave_session(4, counting, **options)
    results = []
    for number in range(counting.copies // 2):
        case = faulty.leave_session(4, FailingCopies(False, number), **options)
        results.append(type(case.error))
    assert set(results) == {type(None), SwapStoreError}


def test_an_interrupted_return_of_space_is_not_used_again() -> None:
    close = Space.close

    @contextlib.contextmanager
    def inject(session: Session) -> Iterator[None]:
        def interrupted(space: Space) -> None:
            patch.undo()
            close(space)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Space, 'close', interrupted)
            yield

    for at in (2, 3):
        case = faulty.stay_in_session(at, inject, **SWAP)
        assert type(case.inside) is KeyboardInterrupt


def test_nothing_is_copied_after_the_end() -> None:
    device = HostDevice(1 << 20)
    device.close()
    with pytest.raises(SwapStoreError, match='has ended with its session'):
        device.copies.swap_out(np.zeros(8), None)
    assert not faulty.copy_threads()


def test_a_closed_file_is_not_mistaken_for_another(tmp_path: Any) -> None:
    file = SwapFile(str(tmp_path))
    file.make_block(8)
    number = file._fd
    file.close()
    target = np.zeros(8, np.uint8)
    with (tmp_path / 'other').open('w+b', buffering=0) as other:
        other.write(b'somebody')
        assert other.fileno() == number
        with pytest.raises(OSError):
            file.read(0, target.__array_interface__['data'][0], 8)
    assert not target.any()


def test_an_old_error_does_not_explain_a_new_one() -> None:
    errors: list[Exception] = [OSError('broken')]
    device = HostDevice(1 << 20)

    def reclaim(nbytes: int) -> None:
        if errors:
            raise errors.pop()

    device.memory.install(reclaim)
    try:
        for expected in (OSError, type(None)):
            with pytest.raises(MemoryError):
                np.empty(1 << 21, np.uint8)
            assert type(device.memory.reclaim_error) is expected
    finally:
        device.memory.uninstall()
        device.close()
