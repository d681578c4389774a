"""Watches the generators that cuDNN draws dropout masks from.

Note: [states of dropout]
    Chainer has one ``DropoutStates`` for each thread and GPU: states in GPU memory, and
    a descriptor with the ratio that was set last. cuDNN does not tell where a generator
    is. So who asks Chainer for the states gets an object of a derived class, which
    shares memory and descriptor and tells of what draws.

Note: [ratios]
    A recurrent function takes the ratio from the descriptor, where Chainer has put it
    before the function is made. A replay comes later, when another function has put its
    own there. So each object remembers the ratio that was set by it, and a replay finds
    that one; behind a replay the descriptor is as it was.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from chainer_hybridmem.training.devices.cuda_bits import import_cupy


class Generator:
    """The states that Chainer has for one thread and GPU.

    Args:
        states: Chainer's ``DropoutStates``.

    Attributes:
        ratio (float): The one in the descriptor; NaN before the first is seen.
    """

    def __init__(self, states: Any) -> None:
        self.states = states
        self.ratio = math.nan

    def put(self, ratio: float) -> None:
        """Puts a ratio into the descriptor."""
        if ratio != self.ratio and not math.isnan(ratio):
            self.states.set_dropout_ratio(ratio)
            self.ratio = ratio

    def seed(self, seed: int) -> None:
        """Makes the states those of a new generator."""
        library = import_cupy().cuda.cudnn
        handle = import_cupy().cudnn.get_handle()
        library.setDropoutDescriptor(
            self.states._desc.value,
            handle,
            0.0,
            self.states._states.ptr,
            library.dropoutGetStatesSize(handle),
            seed,
        )
        self.ratio = 0.0

    def copy(self) -> Any:
        """The states as they are now."""
        memory = self.states._states
        copy = import_cupy().cuda.alloc(memory.mem.size)
        copy.copy_from_device_async(memory, memory.mem.size)
        return copy

    def set_to(self, copy: Any) -> None:
        """Makes the states those of a copy."""
        self.states._states.copy_from_device_async(copy, copy.mem.size)


class _Watch(threading.local):
    """What has been seen in this thread.

    Attributes:
        draws (int): How often masks have been drawn.
        generators (dict): From the identity of Chainer's states, which live for ever.
        guards (list of dict): Of the callers of :func:`set_back`: copies of generators.
    """

    def __init__(self) -> None:
        self.draws = 0
        self.generators: dict[int, Generator] = {}
        self.guards: list[dict[Generator, Any]] = []

    def find(self, states: Any) -> Generator:
        """The generator of some states."""
        if id(states) not in self.generators:
            self.generators[id(states)] = Generator(states)
        return self.generators[id(states)]

    def note_draw(self, generator: Generator) -> None:
        """Numbers are about to be drawn."""
        self.draws += 1
        for copies in self.guards:
            if generator not in copies:
                copies[generator] = generator.copy()


_watch = _Watch()


def count_draws() -> int:
    """How often this thread has drawn since :func:`watch`."""
    return _watch.draws


@contextlib.contextmanager
def set_back() -> Iterator[Callable[[], bool]]:
    """Leaves the generators of this thread as they were.

    Yields:
        Whether one has been drawn from.
    """
    ratios = [(generator, generator.ratio) for generator in _watch.generators.values()]
    copies: dict[Generator, Any] = {}
    _watch.guards.append(copies)
    try:
        yield lambda: bool(copies)
    finally:
        _watch.guards.remove(copies)
        for generator, copy in copies.items():
            generator.set_to(copy)
        for generator, ratio in ratios:
            generator.put(ratio)


def seed(number: int) -> None:
    """Makes this thread's generator on the current GPU that of a new process.

    CuPy's own seed does not reach it, and Chainer reads ``CHAINER_SEED`` once.
    """
    if watch():
        _chainer_cuda().get_cudnn_dropout_states().generator.seed(number)


@functools.cache
def watch() -> bool:
    """Sees what cuDNN draws from now on; whether Chainer uses cuDNN."""
    cuda = _chainer_cuda()
    if not cuda.cudnn_enabled:
        return False
    find, train = cuda.get_cudnn_dropout_states, cuda.cudnn.rnn_forward_training
    kind = _watched_class()

    @functools.wraps(find)
    def find_watched() -> Any:
        states = find()
        result = kind.__new__(kind)  # without states of its own
        result._states, result._desc = states._states, states._desc
        result.generator = _watch.find(states)
        return result

    @functools.wraps(train)
    def train_watched(states: Any, *args: Any) -> Any:
        if isinstance(states, kind):
            states.prepare()
        return train(states, *args)

    cuda.get_cudnn_dropout_states = find_watched
    cuda.cudnn.rnn_forward_training = train_watched
    return True


def _chainer_cuda() -> Any:
    from chainer.backends import cuda

    return cuda


def _watched_class() -> Any:
    base = import_cupy().cudnn.DropoutStates

    class WatchedStates(base):  # type: ignore[misc,valid-type]
        """Chainer's states, as one caller has got them."""

        generator: Generator
        ratio = math.nan

        def set_dropout_ratio(self, dropout_ratio: float) -> None:
            super().set_dropout_ratio(dropout_ratio)
            self.ratio = self.generator.ratio = dropout_ratio

        def forward(self, handle: Any, x: Any, dropout_ratio: float) -> Any:
            _watch.note_draw(self.generator)
            self.generator.ratio = dropout_ratio
            return super().forward(handle, x, dropout_ratio)

        def backward(
            self, handle: Any, dy: Any, dropout_ratio: float, reserve_space: Any
        ) -> Any:
            if reserve_space is None:
                raise TypeError('there is no mask')  # CuPy would end the process
            self.generator.ratio = dropout_ratio
            return super().backward(handle, dy, dropout_ratio, reserve_space)

        def prepare(self) -> None:
            """A recurrent function is about to run; see [ratios]."""
            if self.ratio != 0:
                _watch.note_draw(self.generator)
            self.generator.put(self.ratio)

    return WatchedStates
