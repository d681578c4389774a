"""Children, other threads, and who looks at the model while a session runs."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import io
import mmap
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import faulty, networks

import chainer_hybridmem

# isort: split
import chainer

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.recording.peak_meter import PeakMeter
from chainer_hybridmem.training.session.session import Session, active_session

PLANS = {'swap and recompute': faulty.PLAN, 'crossing': faulty.CROSSING}


NEARLY_ALL = int(0.9 * os.sysconf('SC_PHYS_PAGES') * mmap.PAGESIZE)  # of the machine


def in_child(function: Callable[[], Any]) -> int:
    """Runs a function in a forked child, which must end within some minutes."""
    return end_of(start_child(function))


def start_child(function: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(300)
            function()
            code = 0
        finally:
            os._exit(code)
    return pid


def end_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.matrix
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('where', ['ram', 'file'])
def test_a_child_trains_without_the_session(
    plan: str, where: str, tmp_path: Any
) -> None:
    options = {**PLANS[plan], 'swap_dir': str(tmp_path) if where == 'file' else None}
    snapshots, run = faulty.in_core(), faulty.Run()
    with chainer_hybridmem.optimize(run.model, faulty.LIMIT, **options) as session:
        for i in range(8):

            def child(i: int = i) -> None:
                assert active_session() is None and not chainer.get_function_hooks()
                run.iterate(i)
                run.snapshot().assert_same(snapshots[i + 1])

            assert in_child(child) == 0
            run.iterate(i)
        assert session.statistics()['deviations'] == 0
    run.snapshot().assert_same(snapshots[8])
    faulty.assert_nothing_left(faulty.Case(None, None, run, session))


@pytest.mark.parametrize('where', ['ram', 'file'])
def test_a_child_that_leaves_in_mid_iteration_takes_nothing_along(
    where: str, tmp_path: Any
) -> None:
    swap_dir = str(tmp_path) if where == 'file' else None
    snapshots, run = faulty.in_core(), faulty.Run()
    session = chainer_hybridmem.optimize(
        run.model, faulty.LIMIT, swap_dir=swap_dir, **faulty.SWAP_ALL
    )
    with session:
        for i in range(6):
            run.iterate(i)
        loss = run.model(run.pictures[6], run.labels[6])

        def child() -> None:
            session.__exit__(SystemExit, SystemExit(), None)
            session._runtime.executor.abandon()
            session.device.close()

        assert in_child(child) == 0
        run.model.cleargrads()
        loss.backward()
        del loss
        run.optimizer.update()
    run.snapshot().assert_same(snapshots[7])


@pytest.mark.parametrize(
    'begin',
    [
        lambda model: chainer_hybridmem.optimize(model, '64MiB'),
        lambda model: chainer_hybridmem.optimize_inference(model, '64MiB'),
        chainer_hybridmem.profile_memory,
        lambda model: PeakMeter(),
    ],
)
def test_a_child_leaves_what_its_parent_has_begun(begin: Callable[..., Any]) -> None:
    model, x = chainer.links.Linear(8, 8), np.ones((4, 8), np.float32)
    with chainer.no_backprop_mode(), contextlib.ExitStack() as stack:
        stack.enter_context(begin(model))
        model(x)

        def child() -> None:
            for _ in range(4):
                model(x)
            stack.close()
            assert not chainer.get_function_hooks()
            with chainer_hybridmem.optimize(model, '64MiB'):
                model(x)

        assert in_child(child) == 0
        for _ in range(4):
            model(x)
        assert numpy_memory.installed()
    assert not numpy_memory.installed()


class Pictures(chainer.dataset.DatasetMixin):
    def __init__(self, run: faulty.Run) -> None:
        self.pictures, self.labels = run.pictures, run.labels

    def __len__(self) -> int:
        return int(self.labels.size)

    def get_example(self, i: int) -> Any:
        return self.pictures[i // 8, i % 8], self.labels[i // 8, i % 8]


def train_with_workers(run: faulty.Run) -> None:
    """Two iterations without workers, then six with theirs."""
    for i in range(2):
        run.iterate(i)
    iterator = chainer.iterators.MultiprocessIterator(
        Pictures(run), 8, shuffle=False, n_processes=2, n_prefetch=1
    )
    try:
        for i in range(8):
            batch = chainer.dataset.concat_examples(next(iterator))
            if i >= 2:
                run.pictures[i], run.labels[i] = batch
                run.iterate(i)
    finally:
        iterator.finalize()


@pytest.mark.parametrize(
    'limit',
    [faulty.LIMIT, NEARLY_ALL, 2 * NEARLY_ALL],
    ids=['small', 'nearly all of the machine', 'more than the machine'],
)
def test_workers_of_an_iterator_come_and_go(limit: int) -> None:
    snapshots, run = faulty.in_core(), faulty.Run()
    with chainer_hybridmem.optimize(run.model, limit, **faulty.PLAN) as session:
        train_with_workers(run)
        assert active_session() is session
    run.snapshot().assert_same(snapshots[8])


def test_workers_of_an_iterator_while_memory_is_profiled() -> None:
    snapshots, run = faulty.in_core(), faulty.Run()
    with chainer_hybridmem.profile_memory(run.model) as profiler:
        train_with_workers(run)
    run.snapshot().assert_same(snapshots[8])
    assert profiler.summary()['peak_bytes'] > 0


def test_children_keep_what_the_session_has_allocated() -> None:
    """In an arena and beside it, whatever the parent writes there meanwhile."""
    run = faulty.Run()
    with chainer_hybridmem.optimize(
        run.model, NEARLY_ALL, planner='swap-all', link_bandwidth=1e9
    ) as session:
        data = np.arange(1 << 17)  # larger than what the C library serves
        for i in range(7):
            run.iterate(i)
        assert session.statistics()['arena_bytes']
        loss = run.model(run.pictures[7], run.labels[7])  # some is in the arena
        expected = run.snapshot()
        values = data.copy()
        reading, writing = os.pipe()

        def child() -> None:
            os.read(reading, 1)
            assert (data == values).all()
            run.snapshot().assert_same(expected)

        pid = start_child(child)
        data += 1
        values += 1
        run.model.cleargrads()
        loss.backward()
        del loss
        run.optimizer.update()
        run.iterate(8)
        os.write(writing, b'.')
        assert end_of(pid) == 0
        os.close(reading), os.close(writing)


def test_a_child_keeps_no_free_memory() -> None:
    """Else the parent would have it twice once it writes there."""
    with chainer_hybridmem.profile_memory():
        kept, freed = np.ones(1 << 22), np.ones(1 << 22)
        kept_too = np.ones(1 << 22)
        del freed
        held_bytes = resident_bytes()

        def child() -> None:
            assert resident_bytes() < held_bytes - (24 << 20)
            assert (kept + kept_too == 2).all()

        assert in_child(child) == 0
        assert resident_bytes() > held_bytes - (8 << 20)


def resident_bytes() -> int:
    with open('/proc/self/statm', encoding='ascii') as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


LOOKS = {
    'deepcopy': lambda model: copy.deepcopy(model),
    'pickle': lambda model: pickle.loads(pickle.dumps(model)),
    'snapshot': lambda model: saved(model),
}


def saved(model: chainer.Chain) -> chainer.Chain:
    file = io.BytesIO()
    chainer.serializers.save_npz(file, model)
    file.seek(0)
    other = faulty.Small()
    chainer.serializers.load_npz(file, other)
    return other


@pytest.mark.matrix
@pytest.mark.parametrize('look', LOOKS)
@pytest.mark.parametrize('plan', PLANS)
def test_who_copies_the_model_gets_all_of_it(plan: str, look: str) -> None:
    """Between iterations, and between forward and backward."""
    snapshots, run = faulty.in_core(), faulty.Run()
    limit = faulty.LIMIT + 200_000  # for the copies
    session = chainer_hybridmem.optimize(run.model, limit, **PLANS[plan])
    with session:
        for i in range(8):
            for away in (False, True):
                if away:
                    loss = run.model(run.pictures[i], run.labels[i])
                random = np.random.get_state()
                other = LOOKS[look](run.model)
                np.random.set_state(random)
                for path, parameter in other.namedparams():
                    expected = snapshots[i].arrays[path]
                    assert parameter.array.tobytes() == expected.tobytes(), path
                    assert type(parameter) is chainer.Parameter
                del other, parameter, random
            run.model.cleargrads()
            loss.backward()
            del loss
            run.optimizer.update()
    run.snapshot().assert_same(snapshots[8])
    faulty.assert_nothing_left(faulty.Case(None, None, run, session))


def test_two_sessions_in_two_threads() -> None:
    """Each with its own model, limit, handler, hooks and copy threads."""
    runs = [faulty.Run() for _ in range(3)]
    for run in runs:
        run.model.drop = 0.0  # threads share the generator
    for i in range(10):
        runs[2].iterate(i)
    limits = [faulty.LIMIT, 2 * faulty.LIMIT]
    sessions: list[Session] = []
    errors: list[BaseException] = []

    def train(run: faulty.Run, limit: int, plan: str) -> None:
        try:
            with chainer_hybridmem.optimize(run.model, limit, **PLANS[plan]) as session:
                sessions.append(session)
                for i in range(10):
                    assert active_session() is session
                    run.iterate(i)
                assert session.state == 'guided'
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=train, args=arguments)
        for arguments in zip(runs, limits, PLANS, strict=False)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for run in runs[:2]:
        for name, array in run.arrays().items():
            assert array.tobytes() == runs[2].arrays()[name].tobytes(), name
    assert all(s.statistics()['peak_bytes'] <= s.limit_bytes for s in sessions)
    for run, session in zip(
        runs, sorted(sessions, key=lambda s: s.limit_bytes), strict=False
    ):
        faulty.assert_nothing_left(faulty.Case(None, None, run, session))


def in_thread(function: Callable[[], Any]) -> BaseException | None:
    """Runs a function in another thread; returns what it has raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(faulty.without_frames(error))

    thread = threading.Thread(target=run, name='another')
    thread.start()
    thread.join()
    return errors[0] if errors else None


@pytest.mark.matrix
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', faulty.STAGES)
def test_a_backward_in_another_thread_is_refused(plan: str, stage: str) -> None:
    """It is an iteration that was broken off; the next ones go on."""
    at, options = faulty.STAGES[stage]

    @contextlib.contextmanager
    def inject(session: Session) -> Iterator[None]:
        backward = chainer.Variable.backward

        def elsewhere(variable: Any, *args: Any) -> None:
            chainer.Variable.backward = backward
            error = in_thread(lambda: backward(variable, *args))
            assert type(error) is SessionError
            assert "in thread 'MainThread'" in str(error)
            assert "in thread 'another'" in str(error)
            raise error

        chainer.Variable.backward = elsewhere
        try:
            yield
        finally:
            chainer.Variable.backward = backward

    case = faulty.stay_in_session(at, inject, **{**options, **PLANS[plan]})
    assert type(case.inside) is SessionError


def test_a_graph_that_outlives_its_session_belongs_to_no_thread() -> None:
    run = faulty.Run()
    with chainer_hybridmem.optimize(run.model, 2 * faulty.LIMIT):
        loss = run.model(run.pictures[0], run.labels[0])
    run.model.cleargrads()
    assert in_thread(loss.backward) is None
    loss = None
    run.optimizer.update()
    before = faulty.in_core()[1].arrays
    for name, array in run.learnt().items():
        assert array.tobytes() == before[name].tobytes(), name


def test_a_session_is_left_where_it_was_entered() -> None:
    run = faulty.Run()
    with chainer_hybridmem.optimize(run.model, faulty.LIMIT) as session:
        run.iterate(0)
        for way in (lambda: session.__exit__(None, None, None), session.__enter__):
            error = in_thread(way)
            assert type(error) is SessionError, way
            assert "in thread 'MainThread'" in str(error)
            assert active_session() is session
        run.iterate(1)
        session.finish_iteration()
        assert session.iterations == 2
    faulty.assert_nothing_left(faulty.Case(None, None, run, session))


def test_a_session_follows_its_program_into_other_contexts() -> None:
    """With asyncio each task has its own; the session may end in yet another one."""
    tasks = [contextvars.copy_context() for _ in range(2)]
    expected, run = faulty.in_core()[7], faulty.Run()
    session = chainer_hybridmem.optimize(run.model, faulty.LIMIT, **faulty.SWAP_ALL)
    tasks[0].run(session.__enter__)
    for i in range(7):
        tasks[i % 2].run(run.iterate, i)
    run.snapshot().assert_same(expected)
    peaks = [entry['peak_bytes'] for entry in networks.entries_of(session)]
    assert 0.5 * faulty.LIMIT < min(peaks) <= max(peaks) <= faulty.LIMIT
    assert session.statistics()['swap'] and session.last_iteration()['guided']
    held = tasks[1].run(np.ones, 8 * faulty.LIMIT // 10, 'u1')
    made: list[Any] = []
    error = in_thread(lambda: made.append(tasks[0].run(np.ones, faulty.LIMIT, 'u1')))
    assert error is None  # another thread, in a copy of the session's context
    assert session.device.memory.used_bytes > held.nbytes + made[0].nbytes
    session.__exit__(None, None, None)
    for task in tasks:
        assert task.run(np.ones, 2 * faulty.LIMIT, 'u1').all()
    del held, made[:]
    with chainer_hybridmem.optimize(run.model, faulty.LIMIT) as other:
        tasks[0].run(run.iterate, 7)
    faulty.assert_nothing_left(faulty.Case(None, None, run, other))


def test_a_session_outlives_its_thread_and_is_left_in_another_one() -> None:
    expected, run = faulty.in_core()[6], faulty.Run()
    session = chainer_hybridmem.optimize(run.model, faulty.LIMIT, **faulty.PLAN)

    def train() -> None:
        session.__enter__()
        for i in range(6):
            run.iterate(i)

    assert in_thread(train) is None
    run.snapshot().assert_same(expected)
    other = faulty.Run()
    with chainer_hybridmem.optimize(other.model, faulty.LIMIT) as mine:
        session.__exit__()  # takes nothing from this thread's own
        assert active_session() is mine
        other.iterate(0)
    assert session.statistics()['iterations'] == 6
    faulty.assert_nothing_left(faulty.Case(None, None, other, mine))


def test_a_session_is_left_at_exit_whoever_leaves_it() -> None:
    """What has been registered before the package was imported runs after it."""
    code = f"""
        import atexit, sys
        sessions = []
        atexit.register(lambda: print(sessions[0].__exit__(None, None, None)))
        sys.path.insert(0, {os.path.dirname(os.path.dirname(faulty.__file__))!r})
        from support import faulty
        import chainer_hybridmem
        run = faulty.Run()
        session = chainer_hybridmem.optimize(run.model, faulty.LIMIT, **faulty.SWAP_ALL)
        sessions.append(session.__enter__())
        for i in range(4):
            run.iterate(i)
        loss = run.model(run.pictures[4], run.labels[4])
    """
    found = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)], capture_output=True, check=True
    )
    assert (found.stdout, found.stderr) == (b'None\n', b'')


def test_training_in_another_thread_is_told() -> None:
    run, told = faulty.Run(), io.StringIO()
    with pytest.warns(UserWarning, match='no iteration was seen') as warned:
        with chainer_hybridmem.optimize(run.model, faulty.LIMIT, progress=told):
            assert in_thread(lambda: run.iterate(0)) is None
    assert "'MainThread', which entered it" in told.getvalue()
    assert warned[0].filename == __file__


def test_the_swap_file_is_nobody_elses(tmp_path: Any) -> None:
    run = faulty.Run()
    with chainer_hybridmem.optimize(
        run.model, faulty.LIMIT, swap_dir=str(tmp_path), **faulty.SWAP_ALL
    ) as session:
        for i in range(5):
            run.iterate(i)
        file = session.device.copies._disk._file  # type: ignore[attr-defined]
        status = os.fstat(file._fd)
        assert status.st_size > 0 and status.st_nlink == 0
        assert status.st_mode & 0o777 == 0o600
        assert not list(tmp_path.iterdir())
