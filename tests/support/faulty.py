"""Iterations in which something fails, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import chainer_hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from chainer_hybridmem.training.chainer_access.owners import model_arrays
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.session.session import Session, active_session

EVERY = 'HYBRIDMEM_EVERY_FAULT'  # set in the environment: no fault is left out
ITERATIONS = 12
LIMIT = 680_000  # bytes; Small needs 795 kB in-core
# Iterations that are in each stage, with the options that bring it about.
STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    'warm-up': (0, {}),
    'profiling with replays': (1, {}),
    'profiling': (2, {}),
    'guided': (4, {'arena': False}),
    'guided with an arena': (7, {}),
}
PLAN = {'planner': 'superneurons'}
SWAP_ALL = {'planner': 'swap-all'}
CROSSING = {'planner': 'swap-all', 'cross_iteration': 'all'}

Inject = Callable[[Session], contextlib.AbstractContextManager[Any]]


class Small(chainer.Chain):
    """Convolutions, statistics, masks, a residual and dense layers."""

    drop = 0.3

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.a = L.Convolution2D(3, 8, 1)
            self.n = L.BatchNormalization(8)
            self.b = L.Convolution2D(8, 8, 1)
            self.c = L.Convolution2D(8, 4, 3)
            self.d = L.Linear(144, 64)
            self.e = L.Linear(64, 4)

    def forward(self, x: Any, t: Any) -> Any:
        h = F.relu(self.n(self.a(x)))
        h = F.sigmoid(self.b(h)) + h
        h = F.dropout(F.max_pooling_2d(h, 2), self.drop)
        h = F.tanh(self.d(F.relu(self.c(h))))
        return F.softmax_cross_entropy(self.e(h), t)


class Run:
    """A model that is trained step by step, always with the same data."""

    def __init__(self) -> None:
        np.random.seed(0)
        self.model = Small()
        self.model.cleargrads()
        self.optimizer = chainer.optimizers.MomentumSGD(0.01).setup(self.model)
        self.updating = False  # whether an update has begun that has not ended
        rng = np.random.RandomState(1)
        shape = (ITERATIONS, 8, 3, 16, 16)
        self.pictures = rng.rand(*shape).astype(np.float32)
        self.labels = rng.randint(0, 4, shape[:2]).astype(np.int32)

    def iterate(self, i: int) -> None:
        loss = self.model(self.pictures[i], self.labels[i])
        self.model.cleargrads()
        loss.backward()
        del loss
        self.updating = True
        self.optimizer.update()
        self.updating = False

    def learnt(self) -> dict[str, Any]:
        """What an update changes."""
        result = {}
        for name, parameter in self.model.namedparams():
            result[name] = parameter.array
            for key, state in (parameter.update_rule.state or {}).items():
                result[f'{name}:{key}'] = state
        return result

    def arrays(self) -> dict[str, Any]:
        """What an iteration changes."""
        statistics = {
            name: getattr(self.model.n, name) for name in ('avg_mean', 'avg_var')
        }
        return {**self.learnt(), **statistics}

    def snapshot(self) -> Snapshot:
        arrays = {name: array.copy() for name, array in self.arrays().items()}
        return Snapshot(arrays, np.random.get_state(), int(self.model.n.N))

    def restore(self, snapshot: Snapshot) -> None:
        for parameter in self.model.params():
            if not parameter.update_rule.state:  # Chainer was about to make it
                parameter.update_rule._state = None
        for name, array in self.arrays().items():
            array[...] = snapshot.arrays.get(name, 0)  # states begin as zeros
        np.random.set_state(snapshot.random)
        self.model.n.N = snapshot.batches
        self.updating = False


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything that the next iterations depend on."""

    arrays: dict[str, Any]
    random: Any
    batches: int

    def assert_same(self, other: Snapshot) -> None:
        for name, array in self.arrays.items():
            assert array.tobytes() == other.arrays[name].tobytes(), name
        assert self.random[2] == other.random[2]
        assert (self.random[1] == other.random[1]).all()


@functools.cache
def in_core() -> list[Snapshot]:
    """What plain Chainer has before each iteration, and after the last one."""
    run = Run()
    snapshots = [run.snapshot()]
    for i in range(ITERATIONS):
        run.iterate(i)
        snapshots.append(run.snapshot())
    return snapshots


@dataclasses.dataclass
class Case:
    """One fault in one iteration of a session.

    Attributes:
        error (BaseException or None): What came out of the session.
        inside (BaseException or None): What the iteration itself raised.
        run (Run): What was trained.
        session (Session): What it was trained in.
    """

    error: BaseException | None
    inside: BaseException | None
    run: Run
    session: Session


def leave_session(at: int, inject: Inject, **options: Any) -> Case:
    """A fault in iteration ``at`` that ends the session, if it raises anything.

    Without an error the iteration and the one after it are compared with plain
    Chainer's. With one, nothing is left of the session, what was learnt is that of
    the last full update, and plain Chainer goes on from there.
    """
    snapshots, run = in_core(), Run()
    session = chainer_hybridmem.optimize(
        run.model, **{'memory_limit': LIMIT, **options}
    )
    error = None
    done = 0
    try:
        with session:
            for i in range(at):
                run.iterate(i)
                done = i + 1
            with inject(session):
                for i in (at, at + 1):
                    run.iterate(i)
                    done = i + 1
    except BaseException as caught:
        error = without_frames(caught)
    case = Case(error, None, run, session)
    if error is None:
        run.snapshot().assert_same(snapshots[done])
        assert_nothing_left(case)
        return case
    assert_nothing_left(case)
    check_learnt(run, done)
    run.restore(snapshots[done])
    run.iterate(done)
    run.snapshot().assert_same(snapshots[done + 1])
    return case


def stay_in_session(at: int, inject: Inject, more: int = 3, **options: Any) -> Case:
    """A fault in iteration ``at`` that the program catches inside of the session.

    The iteration is then repeated, others follow, and everything is compared with
    plain Chainer's.
    """
    snapshots, run = in_core(), Run()
    inside = None
    session = chainer_hybridmem.optimize(
        run.model, **{'memory_limit': LIMIT, **options}
    )
    with session:
        for i in range(at):
            run.iterate(i)
        with inject(session):
            try:
                run.iterate(at)
            except BaseException as caught:
                inside = without_frames(caught)
        if inside is not None:
            check_learnt(run, at)
            run.restore(snapshots[at])
            run.iterate(at)
        for i in range(at + 1, at + 1 + more):
            run.iterate(i)
    case = Case(None, inside, run, session)
    run.snapshot().assert_same(snapshots[at + 1 + more])
    assert_nothing_left(case)
    return case


def without_frames(error: BaseException) -> BaseException:
    """The error and its causes, without the frames and what these hold."""
    chain: BaseException | None = error
    while chain is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__
    return error


def check_learnt(run: Run, done: int) -> None:
    """Parameters and states are whole, and those of the last full update."""
    expected = in_core()[done].arrays
    for name, array in run.learnt().items():
        assert array is not None, f'{name} is away'
        if name in expected and not run.updating:
            assert array.tobytes() == expected[name].tobytes(), name


def assert_nothing_left(case: Case) -> None:
    """No handler, hook, class, thread, memory or setting of a session remains."""
    assert not numpy_memory.installed()
    assert active_session() is None
    assert not chainer.get_function_hooks()
    assert not chainer._get_link_hooks()
    assert not chainer.config.in_recomputing and chainer.config.enable_backprop
    for _, parameter in case.run.model.namedparams():
        assert type(parameter) is chainer.Parameter
        assert '_hybridmem_away' not in vars(parameter)
        assert '_hybridmem_away' not in vars(parameter.update_rule)
    device = case.session.device
    case.run.model.cleargrads()
    kept_bytes = sum(array.nbytes for array in model_arrays(case.run.model))
    if device.memory.used_bytes > kept_bytes:
        gc.collect()  # what the frames of an error hold
    assert device.memory.used_bytes <= kept_bytes  # less if some came home afterwards
    assert device.copies.host_bytes == 0
    assert not copy_threads()


def copy_threads() -> list[str]:
    """Names of threads of ours that live."""
    return [t.name for t in threading.enumerate() if t.name.startswith('hybridmem')]


def open_files() -> set[str]:
    """What this process has open."""
    found = set()
    for fd in os.listdir('/proc/self/fd'):
        with contextlib.suppress(OSError):
            found.add(f'{fd} {os.readlink(f"/proc/self/fd/{fd}")}')
    # The module multiprocessing keeps shared memory for the next time, and a native
    # library a file without a name. Files of ours have names.
    return {file for file in found if '/pym-' not in file and '/#' not in file}


def chosen(count: int, at_most: int, offset: int = 0) -> range:
    """Numbers below ``count``: at most so many, or all if :data:`EVERY` is set."""
    if EVERY in os.environ or count <= at_most:
        return range(count)
    step = -(-count // at_most)
    return range(offset % step, count, step)
