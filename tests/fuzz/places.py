"""Where cases run: with NumPy or, where ``FUZZ_DEVICE=cuda`` says so, with CuPy.

Cases are drawn for NumPy. On a GPU the same ones run, without what only the host has:
``adapted`` leaves it out, and a case without it stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
from support.hostile import late_copies, poisoned_blocks, poisoned_memory
from support.native_faults import NativeFaults
from support.virtual import Machine

from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.recompute import drawing

from .cases import Case

THREAD_DELAYS = (0, 0, 0, 0.0005, 0.002)  # seconds
HOST_SESSION = {'file': False, 'link_bandwidth': None}
HOST_LIMITED = 0.25  # of the cases on a GPU
MEAN_SECONDS = 1e-5  # between two events of a GPU that are asked for
GPU_BYTES = 1 << 32  # more than any case needs


class Host:
    """NumPy, with copies and memory as odd as they may be."""

    name = '@numpy'
    tells_late = False
    _faults: Sequence[NativeFaults] = ()

    def adapted(self, case: Case) -> Case:
        """The case as it runs here."""
        return case

    def begin(self, case: Case) -> None:
        """Before a run: generators begin anew."""
        np.random.seed(case.seed % (1 << 32))

    def random_state(self) -> Any:
        """Of the generators of arrays."""
        _, keys, position, has_gauss, cached = np.random.get_state()
        return keys.tobytes(), position, has_gauss, cached

    def surround(
        self,
        enter: Callable[[Any], Any],
        case: Case,
        machine: Machine,
    ) -> None:
        """Makes memory and copies of a session odd, and its times drawn ones."""
        options = case.session
        self._faults = enter(poisoned_memory())
        if options['copies'] == 'threads':
            enter(late_copies(options['clock'], THREAD_DELAYS))
        else:
            enter(machine.running())

    def reading(self, watch: Any, reads: Any) -> Any:
        """Has what backward reads watched, where that does not wait for a device."""
        return watch(reads)

    def open_unlimited(self) -> Any:
        """A device that counts what plain Chainer needs."""
        return HostDevice(1 << 50)

    def is_left(self) -> bool:
        """Whether a session that is over still counts allocations."""
        return numpy_memory.installed()

    def take_figures(self) -> tuple[int, int]:
        """Most memory taken since this was last called or a session began, and races.

        It is not the package that counts. Nought where it is not known.
        """
        return max((fault.most_bytes for fault in self._faults), default=0), 0


class Cuda(Host):
    """CuPy, on a GPU or on the emulator, where the case says when work runs."""

    name = '@cupy:0'
    tells_late = True
    _races = 0

    def adapted(self, case: Case) -> Case:
        chance = random.Random(case.seed ^ 0xC0DA)
        share = chance.uniform(0, 1) if chance.random() < HOST_LIMITED else None
        session = {'host_share': share, **case.session, **HOST_SESSION}
        return dataclasses.replace(case, session=session)

    def begin(self, case: Case) -> None:
        import cupy

        super().begin(case)
        gc.collect()  # what is left of other runs would count
        cupy.get_default_memory_pool().free_all_blocks()
        drawing.seed_gpu(case.seed % (1 << 32))
        self._schedule(case)

    def _schedule(self, case: Case) -> None:
        control = _emulator()
        if control is not None:
            copies = case.session['copies']
            mode = {0.0: 'lazy', 1.0: 'eager'}.get(copies, 'random')
            control.schedule(mode, case.session['clock'] % (1 << 31))

    def random_state(self) -> Any:
        import cupy

        return *super().random_state(), cupy.random.random_sample(4).tobytes()

    def surround(
        self,
        enter: Callable[[Any], Any],
        case: Case,
        machine: Machine,
    ) -> None:
        from chainer_hybridmem.training.devices.cuda.gpu import CudaClock

        enter(poisoned_blocks())
        elapsed = CudaClock.elapsed

        def drawn(self: Any, start: Any, end: Any) -> float:
            elapsed(self, start, end)  # both have happened
            first = _moment(start, machine)
            return max(_moment(end, machine) - first, 1e-9)

        enter(mock.patch.object(CudaClock, 'elapsed', drawn))

    def reading(self, watch: Any, reads: Any) -> Any:
        return contextlib.nullcontext()

    def open_unlimited(self) -> Any:
        from chainer_hybridmem.training.devices.cuda.device import CudaDevice

        return CudaDevice(GPU_BYTES)

    def is_left(self) -> bool:
        import cupy

        from chainer_hybridmem.training.devices.cuda.allocator import Allocator

        allocator = cupy.cuda.get_allocator()
        return isinstance(getattr(allocator, '__self__', None), Allocator)

    def take_figures(self) -> tuple[int, int]:
        control = _emulator()
        if control is None:
            return 0, 0
        known, self._races = self._races, control.counters()['race']
        return control.take_device_peak(), self._races - known


def _emulator() -> Any:
    """Its controls, if this process runs on it."""
    if 'EMU_LIBRARY' not in os.environ:
        return None
    from cuda_emulator import control

    return control


def _moment(event: Any, machine: Machine) -> float:
    """When an event has happened: drawn when it is first asked for."""
    if not hasattr(event, 'moment'):
        machine.sleep(machine.chance.expovariate(1 / MEAN_SECONDS))
        event.moment = machine.now()
    return float(event.moment)


_PLACES: dict[str, Host] = {'host': Host(), 'cuda': Cuda()}


def place() -> Host:
    """The one that ``FUZZ_DEVICE`` names, or the host.

    Raises:
        KeyError: If there is no such place.
    """
    return _PLACES[os.environ.get('FUZZ_DEVICE') or 'host']
