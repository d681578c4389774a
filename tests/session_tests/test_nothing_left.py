"""Who keeps an out-of-memory error does not keep the graph of its iteration."""

from __future__ import annotations

import code
import gc
import sys
import weakref

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import training
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem import errors
from chainer_hybridmem.training.chainer_access.owners import model_arrays
from chainer_hybridmem.training.devices.host.memory import HostMemory

LIMIT = 4_600_000  # bytes; Everything needs 5.2 MB in-core
BATCH = networks.batches(1)[0]
LARGE = networks.batches(1, size=64)[0]


@pytest.fixture(autouse=True)
def no_collections():
    """What is freed later by chance is not free."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Program:
    """Fails in forward of iteration 2, or in backward or update of the first."""

    def __init__(self, place='forward'):
        np.random.seed(0)
        self.place = place
        self.model = networks.Everything()
        self.optimizer = chainer.optimizers.MomentumSGD(0.01).setup(self.model)
        stuck = {} if place == 'forward' else {'limit': 5_400_000, 'host': '20KB'}
        self.session = hybridmem.optimize(
            self.model,
            stuck.get('limit', LIMIT),
            splitting=False,
            host_limit=stuck.get('host'),  # or all of the graph has left
        )
        self.steps = 0

    def iterate(self, batch=BATCH):
        self.steps += 1
        fails = self.steps == (2 if self.place == 'forward' else 1)
        if fails and self.place == 'forward':
            batch = LARGE
        if fails and self.place == 'update':
            rule = self.model.last.W.update_rule
            rule.add_hook(lambda rule, param: np.zeros(2 * LIMIT, np.int8), 'greedy')
        loss = self.model(*batch)
        if fails and self.place == 'backward':
            loss = Greedy().apply((loss,))[0]
        self.model.cleargrads()
        loss.backward()
        held = loss, F.identity(loss)
        self.optimizer.update()
        return held

    def train(self):
        while True:
            self.iterate()

    def left_bytes(self):
        """What the session counts beside the model."""
        device = self.session.device
        return device.memory.used_bytes - device.arrays.distinct_bytes(
            model_arrays(self.model)
        )


class Greedy(chainer.FunctionNode):
    """Its backward wants more than there is."""

    def forward(self, inputs):
        return (np.asarray(inputs[0] + 0),)

    def backward(self, indexes, grads):
        return (grads[0] + np.zeros(2 * LIMIT, np.int8).sum(),)


def inside(program):
    """The session in a frame of its own."""
    with program.session:
        program.train()


def around(program):
    """The frame with the session has the loop and its variables."""
    with program.session:
        while True:
            program.steps += 1
            batch = LARGE if program.steps == 2 else BATCH
            loss = program.model(*(batch if program.place == 'forward' else BATCH))
            if program.place == 'backward':
                loss = Greedy().apply((loss,))[0]
            program.model.cleargrads()
            loss.backward()
            program.optimizer.update()


@pytest.fixture
def no_room(monkeypatch):
    """The machine has not more than the limit: what does not fit is refused at once."""
    monkeypatch.setattr(HostMemory, 'raise_limit', lambda self, nbytes: False)


@pytest.mark.parametrize('place', ['forward', 'backward', 'update'])
def test_an_error_after_going_beyond_the_limit_keeps_nothing_else(place):
    program = Program(place)
    try:
        inside(program)
    except MemoryError as error:
        kept = error
    assert program.left_bytes() < 8192
    assert kept.__traceback__ is not None
    assert isinstance(kept, hybridmem.OutOfMemoryError)


@pytest.mark.parametrize('place', ['forward', 'backward', 'update'])
def test_an_error_that_is_kept_keeps_nothing_else(place, no_room):
    program = Program(place)
    try:
        inside(program)
    except MemoryError as error:
        kept = error
    assert program.left_bytes() < 8192  # small arrays of no map
    assert kept.__traceback__ is not None and isinstance(kept.__cause__, MemoryError)


@pytest.mark.parametrize('beyond', [False, True])
@pytest.mark.parametrize('place', ['forward', 'backward'])
def test_neither_does_the_frame_that_had_the_session(place, beyond, request):
    if not beyond:
        request.getfixturevalue('no_room')
    program = Program(place)
    try:
        around(program)
    except MemoryError as error:
        kept = error
    assert program.left_bytes() < 8192
    assert kept.__traceback__ is not None


def test_an_array_that_the_program_holds_stays_as_it_is(no_room):
    program, held = Program('backward'), []
    program.model.block1.add_hook(Keeping(held))
    with pytest.raises(MemoryError), program.session:
        program.train()
    assert all(isinstance(variable.array, np.ndarray) for variable in held)


class Keeping(chainer.LinkHook):
    """Holds what a link returns."""

    name = 'keeping'

    def __init__(self, held):
        self.held = held

    def forward_postprocess(self, args):
        self.held.append(args.out)


def test_an_interpreter_that_keeps_the_last_error_keeps_nothing_else(monkeypatch):
    """As in a notebook: ``sys.last_value`` has the error with its traceback."""
    program = Program()
    console = code.InteractiveConsole({'program': program})
    monkeypatch.setattr(console, 'write', lambda text: None)
    console.push('with program.session: program.train()\n')
    console.push('')
    try:
        assert isinstance(sys.last_value, hybridmem.OutOfMemoryError)
        assert sys.last_value.__traceback__ is not None
        assert program.left_bytes() < 8192
    finally:
        del sys.last_value, sys.last_traceback, sys.last_type


def test_a_trainer_s_error_keeps_nothing_else(tmp_path):
    np.random.seed(0)
    model = networks.Everything()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    rows = [row for batch in networks.batches(4) for row in zip(*batch, strict=True)]
    iterator = chainer.iterators.SerialIterator(rows, 8)
    updater = training.StandardUpdater(iterator, optimizer)
    trainer = training.Trainer(updater, (4, 'iteration'), out=str(tmp_path))
    extension = hybridmem.HybridMemory(1_200_000, splitting=False)
    trainer.extend(extension)
    try:
        trainer.run(show_loop_exception_msg=False)
    except MemoryError as error:
        kept = error
    device = extension.session.device
    others = device.memory.used_bytes - device.arrays.distinct_bytes(
        model_arrays(model)
    )
    assert others < 8192
    assert isinstance(kept, hybridmem.OutOfMemoryError)


def test_a_smaller_batch_while_the_error_is_handled_finds_the_memory_free(no_room):
    """The traceback of the error under way holds what forward has made."""
    program = Program()
    used = []

    def note(*args):
        used.append(program.left_bytes())

    with program.session:
        program.iterate()
        program.session.finish_iteration()
        try:
            program.iterate()
        except MemoryError:
            program.model.block1.c1.add_hook(Noting(note))
            program.iterate(tuple(array[:1] for array in BATCH))
        one_map = BATCH[0].nbytes // 3 * 8
        assert used[0] < one_map  # of the small batch alone
        program.iterate()


class Noting(chainer.LinkHook):
    """Calls a function before a link runs."""

    name = 'noting'

    def __init__(self, note):
        self.note = note

    def forward_preprocess(self, args):
        self.note()


def test_frames_of_causes_are_cleared_and_generators_go_on():
    def generate():
        try:
            fail()
        except MemoryError as error:
            yield error
        yield 'more'

    def fail():
        array = np.zeros(3)
        seen.append(weakref.ref(array))
        try:
            raise ValueError
        except ValueError:
            raise MemoryError from None

    seen = []
    generator = generate()
    error = next(generator)
    assert seen[0]() is not None
    errors.clear_frames(error)
    assert seen[0]() is None
    assert next(generator) == 'more'
