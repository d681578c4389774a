"""Finds out whether a function has drawn random numbers.

Note: [generators of CuPy]
    cuRAND does not tell where a generator is. So CuPy's global generator gets a class
    derived from its own, which counts how often the attributes are read that every draw
    needs. While a function is tried, a spare one takes its place; cuRAND makes that
    only if it is drawn from.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np

from chainer_hybridmem.training.devices.cuda_bits import import_cupy
from chainer_hybridmem.training.recompute import dropout_states

WORDS = 624  # of a Mersenne Twister; its position follows them
_DRAWN_WITH = ('_generator', '_rk_seed')  # of CuPy's RandomState


def position(gpu: bool = False) -> Hashable:
    """Where the global generators are: another value once a number was drawn.

    Args:
        gpu: Whether CuPy's counts, too; see [generators of CuPy]. And cuDNN's.
    """
    if not gpu:
        return _numpy_position()
    return _numpy_position(), _cupy_position(), dropout_states.count_draws()


def _numpy_position() -> int:
    """Takes a microsecond, where the whole state takes fifty.

    A number that the last draw of normal ones has left over is not seen.
    """
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(bits, np.random.MT19937):
        return hash(repr(bits.state))
    if bits is not _words.bits:
        _words.look_at(bits)
    words = _words.words
    return words[0] << 32 | words[WORDS]


class _Words:
    """The state of the generator that was looked at last."""

    def __init__(self) -> None:
        self.bits: Any = None
        self.words: Any = None

    def look_at(self, bits: Any) -> None:
        """Finds the words of another one."""
        kind = ctypes.c_uint32 * (WORDS + 1)
        self.words = kind.from_address(bits.ctypes.state_address)
        self.bits = bits


_words = _Words()


def _cupy_position() -> tuple[int, int]:
    """Of the current GPU: which generator, and how often it was used."""
    cupy = import_cupy()
    device = cupy.cuda.runtime.getDevice()
    state = cupy.random._generator._random_states.get(device)
    if state is None:
        return 0, 0
    if type(state) is cupy.random.RandomState:
        state.__class__ = _watched_class()
    return id(state), getattr(state, 'uses', 0)


@contextlib.contextmanager
def set_aside() -> Iterator[Callable[[], bool]]:
    """Puts a spare in the place of CuPy's global generator of the current GPU.

    What is drawn from cuDNN's is taken back.

    Yields:
        Whether anything has been drawn.
    """
    cupy = import_cupy()
    random, device = cupy.random, cupy.cuda.Device().id
    states = random._generator._random_states
    former, spare = states.get(device), _spare(device)
    before = spare.uses
    random.set_random_state(spare)
    try:
        with dropout_states.set_back() as drawn:
            yield lambda: spare.uses != before or drawn()
    finally:
        if former is None:
            states.pop(device, None)
        else:
            random.set_random_state(former)


def seed_gpu(number: int) -> None:
    """Seeds the generators of the current GPU, CuPy's and cuDNN's."""
    import_cupy().random.seed(number)
    dropout_states.seed(number)


@functools.cache
def _spare(device: int) -> Any:
    del device  # one for each
    kind = _watched_class()
    return kind.__new__(kind)


@functools.cache
def _watched_class() -> Any:
    base = import_cupy().random.RandomState

    class WatchedState(base):  # type: ignore[misc,valid-type]
        """CuPy's generator, made when it is first needed; counts its uses."""

        uses = 0

        def __getattribute__(self, name: str) -> Any:
            if name in _DRAWN_WITH:
                self.uses += 1
            return super().__getattribute__(name)

        def __getattr__(self, name: str) -> Any:
            if 'method' in vars(self):
                raise AttributeError(name)
            self.__init__(0)  # type: ignore[misc]
            return getattr(self, name)

    return WatchedState
