"""Measures the highest load of a run, the same byte each time, and what is in it.

Note: [the same byte]
    The load follows from the mallocs and frees of the thread that is measured, in
    their order; time has no say in it. What remains is Python's garbage collector,
    which frees cycles of objects when it has counted enough of them. It is off
    meanwhile and runs where an iteration begins: at the first forward function after a
    backward one. What lived before is left out of these collections.

Note: [arrays made before]
    An array that was made before counts from the first function that reads it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.interrupts import begin_whole, held_back
from chainer_hybridmem.planning.records.peak import (
    IN_SESSION,
    OUTSIDE,
    Load,
    Part,
    Peak,
)
from chainer_hybridmem.planning.records.profile import Category
from chainer_hybridmem.training.chainer_access import graph, owners
from chainer_hybridmem.training.devices.host import memory, numpy_memory
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.devices.ports import Memory

_NO_LIMIT_BYTES = 1 << 60
_KINDS = {
    Category.PARAMETER: 'parameters',
    Category.GRADIENT: 'gradients',
    Category.OPTIMIZER_STATE: 'optimizer states',
}


class PeakMeter:
    """Measures while it is entered; NumPy's arrays of the thread that enters it.

    A function that reads an array of a GPU raises :class:`SessionError`.

    Attributes:
        guest (Memory or None): Of a session in which training runs now; its own
            figures count then.
    """

    def __init__(self) -> None:
        self.guest: Memory | None = None
        self._device = HostDevice(_NO_LIMIT_BYTES)
        self._load = Load()
        self._links = _LinkPaths(self._name_persistents)
        self._functions = _Functions(self)
        self._garbage = _Garbage()
        self._layers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._part: Part = (OUTSIDE, 'own code')
        self._in_backward = False  # since a backward function, until a forward pass
        self._begun = contextlib.ExitStack()

    # -- life -----------------------------------------------------------------
    def __enter__(self) -> PeakMeter:
        if numpy_memory.installed():
            raise SessionError(
                'The memory of this thread is measured or limited already; measure '
                'before optimize() and profile_memory(), and once.'
            )
        return begin_whole(self, self._begin)

    def _begin(self) -> PeakMeter:
        with contextlib.ExitStack() as begun:
            begun.callback(self._device.close)
            begun.enter_context(self._device.memory.counting())
            self._device.memory.start_events()
            memory.offer(self)
            begun.callback(memory.offer, None)
            begun.callback(self._settle)
            self._garbage.hold()
            begun.callback(self._garbage.release)
            begun.enter_context(self._links)
            begun.enter_context(self._functions)
            self._begun = begun.pop_all()
        return self

    @held_back
    def __exit__(self, *error: Any) -> None:
        self._begun.close()

    def lend(self, guest: Memory) -> None:
        """A session begins to count; see :class:`.memory.Lender`."""
        self._settle()
        self.guest = guest

    def take_back(self) -> None:
        """It has ended."""
        self._ask_guest()
        self.guest = None

    def peak(self) -> Peak:
        """The peak so far."""
        self._settle()
        return self._load.peak

    # -- what the hooks tell ----------------------------------------------------
    def start_forward(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """A forward function begins."""
        self._settle()
        _check_on_host(in_data)
        layer = self._links.path or OUTSIDE
        if self._in_backward and self._belongs_to_backward():
            layer = self._part[0]
        elif self._in_backward:
            self._in_backward = False
            self._garbage.collect()
            self._settle()
        self._layers[function] = layer
        for array in in_data:
            self._adopt(array, (layer, 'arrays made before'))
        self._part = (layer, function.label)

    def end_forward(self) -> None:
        """It has computed."""
        self._settle()
        layer = self._part[0] if self._in_backward else self._links.path or OUTSIDE
        self._part = (layer, 'own code')

    def start_backward(self, function: Any) -> None:
        """A backward function begins."""
        self._settle()
        self._in_backward = True
        self._links.clear()
        layer = self._layers.get(function, OUTSIDE)
        self._part = (layer, f'backward of {function.label}')

    def end_backward(self) -> None:
        """It has computed; sums of gradients and the update come next."""
        self._settle()
        self._part = (self._part[0], 'after backward')

    def _belongs_to_backward(self) -> bool:
        """Whether a forward function is part of a backward one, or sums gradients."""
        if self._links.path:
            return False
        return graph.backward_runs() or not chainer.config.enable_backprop

    # -- counting ---------------------------------------------------------------
    def _settle(self) -> None:
        """Counts what has been allocated and freed since the last time."""
        memory = self._device.memory
        events = memory.take_events()
        memory.start_events()
        self._load.add(events, self._part)
        self._ask_guest()

    def _ask_guest(self) -> None:
        if self.guest is not None:
            figures = self.guest.pool_figures()
            self._load.raise_to(figures.peak_bytes, (IN_SESSION, self._part[1]))

    def _adopt(self, array: Any, part: Part) -> None:
        device = self._device
        if self.guest is not None or not device.arrays.owns(array):
            return
        if not device.arrays.allocation_id(array):
            device.memory.adopt([array])
            ident = device.arrays.allocation_id(array)
            if ident:
                nbytes = device.arrays.root_bytes(device.arrays.root(array))
                self._load.add([(ident, nbytes)], part)

    def _name_persistents(self, root: chainer.Link) -> None:
        """What a model keeps from iteration to iteration is named after its layer."""
        if self.guest is not None:
            return
        self._settle()
        arrays = self._device.arrays
        for path, kind, array in owners.arrays_by_link(root):
            if arrays.owns(array):
                part = layer_name(root, path), _KINDS[kind]
                self._load.rename(arrays.allocation_id(array), part)


def _check_on_host(arrays: tuple[Any, ...]) -> None:
    """A peak without what lies elsewhere would say that everything fits.

    Raises:
        SessionError: If an array is not NumPy's.
    """
    for array in arrays:
        if array is not None and not isinstance(array, np.ndarray):
            kind = type(array)
            name = f'{kind.__module__.partition(".")[0]}.{kind.__name__}'
            raise SessionError(
                f'A function reads a {name}, and only the memory of NumPy is measured '
                f'here. Measure with the model on the CPU, or watch a GPU with '
                f'profile_memory().'
            )


class _Functions(chainer.FunctionHook):
    """Tells a meter which function runs."""

    name = 'hybridmem-peak'

    def __init__(self, meter: PeakMeter) -> None:
        self._meter = meter

    def forward_preprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        self._meter.start_forward(function, in_data)

    def forward_postprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        self._meter.end_forward()

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._meter.start_backward(function)

    def backward_postprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._meter.end_backward()


class _LinkPaths(chainer.LinkHook):
    """Knows the path of the link that runs.

    A link that raises is not told to end: backward ends all of them, and so does what
    runs outside of links.

    Args:
        enter: Called with a link that no other one calls.
    """

    name = 'hybridmem-peak'

    def __init__(self, enter: Callable[[chainer.Link], None]) -> None:
        self._enter = enter
        self._stack: list[tuple[chainer.Link, str]] = []
        self._known: dict[int, str] = {}

    @property
    def path(self) -> str:
        """Of the innermost link that runs; empty if none does."""
        if self._stack and not _is_in_link(sys._getframe(1)):
            self.clear()
        return self._stack[-1][1] if self._stack else ''

    def clear(self) -> None:
        """No link runs."""
        self._stack.clear()

    def forward_preprocess(self, args: Any) -> None:
        link = args.link
        if not _is_in_link(sys._getframe(2)):
            self.clear()
            self._known = {
                id(child): layer_name(link, path) for path, child in link.namedlinks()
            }
            self._enter(link)
        path = self._known.get(id(link))
        if path is None:
            path = f'{self.path}/{link.name or type(link).__name__}'
        self._stack.append((link, path))

    def forward_postprocess(self, args: Any) -> None:
        if any(link is args.link for link, _ in self._stack):
            while self._stack.pop()[0] is not args.link:
                pass


def _is_in_link(frame: types.FrameType | None) -> bool:
    return graph.frame_of(chainer.Link.__call__, frame) is not None


def layer_name(root: chainer.Link, path: str) -> str:
    """What a link is called that lies below another one.

    Args:
        root: Called by the program; perhaps part of a chain that is not called itself.
        path: Of the link, as of :meth:`chainer.Link.namedlinks`.
    """
    name = f'{root.name or ""}/{path.strip("/")}'.strip('/')
    return name or type(root).__name__


class _Garbage:
    """Python's garbage collector in our hands; see Note: [the same byte]."""

    def __init__(self) -> None:
        self._enabled = self._frozen = False

    def hold(self) -> None:
        """From now on garbage is collected when asked for."""
        gc.collect()
        self._enabled = gc.isenabled()
        gc.disable()
        if not gc.get_freeze_count():
            gc.freeze()
            self._frozen = True

    def collect(self) -> None:
        """Collects what has become garbage since."""
        gc.collect()

    def release(self) -> None:
        """As it was before."""
        if self._frozen:
            gc.unfreeze()
        if self._enabled:
            gc.enable()
