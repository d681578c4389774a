"""A machine that a seed describes: its time, what computing takes, and its copies.

Nothing sleeps and no thread runs; one of the program has a time of its own, which
moves nothing. Time goes on by a tick whenever somebody looks, by what a function takes,
and to the end of a copy that somebody waits for. A copy takes what its link and chance
say; its bytes move at a drawn moment between its beginning and its end, so one that is
used too early is noticed. Everything is the same in every run of a seed.

Note: [what always holds]
    The machine looks, for every copy, and lists in ``faults`` what it finds: nothing
    is freed while it is copied, nothing is written into it while it comes in, and no
    other copy is under way to or from the same memory then; what comes in is what has
    left last. ``under_way`` are the copies that have begun and not ended: none, when
    no session is open.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import heapq
import itertools
import math
import random
import threading
import weakref
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import chainer_hybridmem  # noqa: F401  (before chainer, which it makes importable)

# isort: split
import chainer
import numpy as np

from chainer_hybridmem import timing
from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.devices.copies import CopyEngine
from chainer_hybridmem.training.devices.host import device as host_device
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.devices.host.array_data import address_of
from chainer_hybridmem.training.devices.link import LEAST_ROOM_BYTES
from chainer_hybridmem.training.devices.swap_store.space import Space
from chainer_hybridmem.training.devices.values import Completion, Mark, Root, Transfer
from chainer_hybridmem.training.session.setting import link_measurement

_replay = graph.replay
POISON = 0xFF  # in memory that a copy is going to fill: NaN for floating point


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a machine is like.

    Attributes:
        seed: Of everything that chance decides.
        tick_seconds: What a look at the clock takes.
        computing: Bytes of outputs that the mean function makes in a second.
        link: Bytes per second and direction.
        latency_seconds: What every copy takes on top.
        lateness: The largest factor by which a copy takes longer.
        noise: Deviation of the logarithm of what a function takes.
        failing: How probable each copy is to fail.
        pausing: How probable each function is to be interrupted by other work.
        pause_seconds: What such an interruption takes.
    """

    seed: int = 0
    tick_seconds: float = 1e-6
    computing: float = 1e9
    link: float = 1e9
    latency_seconds: float = 1e-5
    lateness: float = 1.0
    noise: float = 0.0
    failing: float = 0.0
    pausing: float = 0.0
    pause_seconds: float = 0.01


def draw(seed: int) -> Conditions:
    """Conditions as different as those of real machines."""
    chance = random.Random(seed)
    return Conditions(
        seed=seed,
        tick_seconds=chance.choice([1e-7, 1e-6, 1e-5]),
        link=10 ** chance.uniform(6, 10),
        latency_seconds=chance.choice([0.0, 1e-5, 1e-3]),
        lateness=chance.choice([1.0, 1.0, 3.0, 30.0]),
        noise=chance.choice([0.0, 0.1, 1.0]),
        pausing=chance.choice([0.0, 0.0, 0.05]),
    )


class Machine:
    """The time of everything, and what makes the copies of host devices.

    Args:
        conditions: What it is like.

    Attributes:
        faults (list of str): What must never happen, and has; see [what always holds].
        copies (Counter): Copies begun, ended, failed, and written into.
    """

    def __init__(self, conditions: Conditions = Conditions()) -> None:
        self.conditions = conditions
        self.chance = random.Random(conditions.seed)
        self.faults: list[str] = []
        self.copies: collections.Counter[str] = collections.Counter()
        self._now = 1000.0
        self._thread = threading.current_thread()
        self._others = threading.local()  # times of other threads
        self._due: list[tuple[float, int, _Copy]] = []
        self._numbers = itertools.count()
        self._stored: dict[tuple[Any, int, int], int] = {}
        self._rates: dict[str, float] = {}

    def change(self, **conditions: Any) -> None:
        """It has other conditions from here on."""
        self.conditions = dataclasses.replace(self.conditions, **conditions)

    # -- time -------------------------------------------------------------------
    def now(self) -> float:
        """Seconds since some moment."""
        tick = self.conditions.tick_seconds
        if threading.current_thread() is self._thread:
            self.pass_to(self._now + tick)
            return self._now
        self._others.now = max(getattr(self._others, 'now', 0.0), self._now) + tick
        return float(self._others.now)

    def sleep(self, seconds: float) -> None:
        """Lets time pass at once."""
        if threading.current_thread() is not self._thread:
            self._others.now = self.now() + seconds
            return
        self.pass_to(self._now + seconds)

    def pass_to(self, moment: float) -> None:
        """Goes on to a moment, unless it is over; bytes move that are due by then."""
        while self._due and self._due[0][0] <= moment:
            at, _, copy = heapq.heappop(self._due)
            self._now = max(self._now, at)
            copy.move()
        self._now = max(self._now, moment)

    def is_over(self, moment: float) -> bool:
        """Whether a moment is no longer to come."""
        return moment <= self._now

    def run(self, function: Any, nbytes: int) -> None:
        """A function has made so many bytes."""
        seconds = nbytes / self._rate(function)
        if self.conditions.noise:
            seconds *= self.chance.lognormvariate(0, self.conditions.noise)
        if self.chance.random() < self.conditions.pausing:
            seconds += self.conditions.pause_seconds
        self.pass_to(self._now + seconds)

    def _rate(self, function: Any) -> float:
        """Bytes per second, for a class of functions; the same in every process."""
        name = type(function).__name__
        if name not in self._rates:
            own = random.Random(zlib.crc32(name.encode()) ^ self.conditions.seed)
            self._rates[name] = self.conditions.computing * 10 ** own.uniform(-1, 0.5)
        return self._rates[name]

    def _replay(
        self, before: Any, live: Any, attributes: Any, inputs: Any, device: Any
    ) -> Any:
        result = _replay(before, live, attributes, inputs, device)
        self.run(live, _bytes_of(inputs))
        return result

    def _measure_link(
        self, device: Any, tier: Tier = Tier.RAM, **options: Any
    ) -> Link | None:
        if device.copies.host_room(tier) < LEAST_ROOM_BYTES:
            return None
        conditions = self.conditions
        rate = min(conditions.link, device.describe()['link_bandwidth'] or math.inf)
        late = 1 + (conditions.lateness - 1) / 2
        return Link(
            latency_seconds=conditions.latency_seconds * late,
            d2h_bytes_per_second=rate / late,
            h2d_bytes_per_second=rate / late,
        )

    # -- copies -----------------------------------------------------------------
    def plan(self, copy: _Copy, after: float, bandwidth: float | None) -> None:
        """When a copy begins and ends, and when its bytes move in between.

        Args:
            copy: The copy.
            after: It begins no earlier.
            bandwidth: Of a throttle, in bytes per second.
        """
        conditions = self.conditions
        rate = min(conditions.link, bandwidth or conditions.link)
        seconds = conditions.latency_seconds + copy.nbytes / rate
        copy.began = max(after, self._now)
        copy.ended = copy.began + seconds * self.chance.uniform(1, conditions.lateness)
        copy.fails = self.chance.random() < conditions.failing
        moment = self.chance.uniform(copy.began, copy.ended)
        for _, _, other in self._due:
            if copy.shares_memory(other) and not (copy.outward and other.outward):
                self.faults.append(f'{copy.nbytes} bytes are copied by two at once')
        heapq.heappush(self._due, (moment, next(self._numbers), copy))
        self.copies['begun'] += 1

    def check(self) -> None:
        """Raises an error unless everything has held; see [what always holds].

        Raises:
            AssertionError: With the first fault.
        """
        if self.under_way and not numpy_memory.installed():
            self.faults.append(f'{self.under_way} copies outlive their session')
        assert not self.faults, self.faults[0]

    def take_faults(self) -> list[str]:
        """What it has found, which is known now."""
        faults, self.faults = self.faults, []
        return faults

    @property
    def under_way(self) -> int:
        """Copies that have begun and not ended."""
        return self.copies['begun'] - self.copies['ended'] - self.copies['failed']

    def store(self, place: tuple[Any, int, int], contents: int) -> None:
        """A place in a store has these contents from here on."""
        self._stored[place] = contents

    def find_stored(self, place: tuple[Any, int, int]) -> int | None:
        """What a place in a store must have; None where nothing was put there."""
        return self._stored.get(place)

    @contextlib.contextmanager
    def running(self) -> Iterator[Machine]:
        """Sessions are on this machine, and know no other time.

        A machine that it is started on stands still until then. Looks at the end
        whether everything has held.
        """

        def make(bandwidth: float | None, disk: Any, shared: Any) -> VirtualCopies:
            return VirtualCopies(self, bandwidth, shared)

        with contextlib.ExitStack() as stack:
            for module, name, other in (
                (timing, 'now', self.now),
                (timing, 'delayed', lambda: 0.0),
                (timing, 'sleep', self.sleep),
                (host_device, 'HostCopyEngine', make),
                (link_measurement, 'measure_link', self._measure_link),
                (graph, 'replay', self._replay),
            ):
                stack.enter_context(mock.patch.object(module, name, other))
            stack.enter_context(_standing_still())
            stack.enter_context(_Computing(self))
            yield self
            self.check()


class _Computing(chainer.FunctionHook):
    """Time goes on by what functions take."""

    name = 'virtual computing'

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def forward_postprocess(self, function: Any, in_data: Any) -> None:
        self._machine.run(function, _bytes_of(in_data))

    def backward_postprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._machine.run(function, 2 * _bytes_of(in_data))


@contextlib.contextmanager
def _standing_still() -> Iterator[None]:
    """The time of an outer machine does not go on by what functions take."""
    hooks = chainer.get_function_hooks()
    outer = hooks.pop(_Computing.name, None)
    try:
        yield
    finally:
        if outer is not None:
            hooks[_Computing.name] = outer


def _bytes_of(arrays: Any) -> int:
    return sum(array.nbytes for array in arrays if array is not None)


class VirtualCompletion(Completion):
    """When a copy has finished; ``error`` says why it has failed."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.began = self.ended = float('inf')
        self.error: str | None = None

    def done(self) -> bool:
        return self._machine.is_over(self.ended)

    def wait(self) -> None:
        self._machine.pass_to(self.ended)

    def after(self, origin: Mark) -> tuple[float, float]:
        return self.began - origin, self.ended - origin


class _Copy:
    """One copy: what is between its beginning and its end.

    It does not keep its memory alive: whoever has it must do so until the end.
    """

    def __init__(self, machine: Machine, root: Root, space: Space, outward: bool):
        self._machine = machine
        self._root = weakref.ref(root)
        self.nbytes, self.outward = space.nbytes, outward
        self._address = address_of(root)
        self._block, self._offset = space.block, space.offset
        self._place = _place_of(space)
        self.began = self.ended = 0.0
        self.fails = False
        self.completion = VirtualCompletion(machine)
        self._bytes = _memory(self._address, self.nbytes)
        if not outward:
            self._bytes.fill(POISON)
        self._before = zlib.crc32(self._bytes)

    def shares_memory(self, other: _Copy) -> bool:
        """Whether another copy is to or from the same memory."""
        first, last = sorted((self, other), key=lambda copy: copy._address)
        return last._address < first._address + first.nbytes

    def move(self) -> None:
        """Its bytes move, all at once."""
        if self.fails:
            self.completion.error = f'copying {self.nbytes} bytes failed: drawn'
            self._machine.copies['failed'] += 1
            self._machine.store(self._place, -1)
        elif self._root() is None:
            self._machine.faults.append(f'{self.nbytes} bytes were freed in their copy')
            self._machine.copies['failed'] += 1
            self._spoil()
        else:
            self._look()
            self._move()
            self._machine.copies['ended'] += 1
        del self._bytes

    def _move(self) -> None:
        copy = self._block.write if self.outward else self._block.read
        copy(self._offset, self._address, self.nbytes)
        contents = zlib.crc32(self._bytes)
        if self.outward:
            self._machine.store(self._place, contents)
        elif self._machine.find_stored(self._place) != contents:
            self._machine.faults.append(
                f'{self.nbytes} bytes came in that had not left so'
            )

    def _spoil(self) -> None:
        """Whoever has the memory now may have written anything."""
        if self.outward:
            spoilt = (ctypes.c_uint8 * self.nbytes)()
            ctypes.memset(spoilt, POISON, self.nbytes)
            self._block.write(self._offset, ctypes.addressof(spoilt), self.nbytes)
            self._machine.store(self._place, zlib.crc32(spoilt))

    def _look(self) -> None:
        """Nobody has what comes in; into what leaves, the program may write."""
        if zlib.crc32(self._bytes) == self._before:
            return
        self._machine.copies['written'] += 1
        if not self.outward:
            self._machine.faults.append(
                f'{self.nbytes} bytes were written while they were copied in'
            )


def _place_of(space: Space) -> tuple[Any, int, int]:
    return space.block, space.offset, space.nbytes


def _memory(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class VirtualTransfer(Transfer):
    """A copy of a :class:`VirtualCopies`; keeps its root alive."""

    def __init__(self, copy: _Copy, root: Root) -> None:
        self.nbytes = copy.nbytes
        self.root = root
        self.completion = copy.completion
        self.began, self.ended = copy.began, copy.ended

    def seconds(self) -> float:
        return self.ended - self.began


class VirtualCopies(CopyEngine):
    """One lane for each direction, on a machine's own time.

    Args:
        machine: The machine.
        bandwidth: Bytes per second that no copy exceeds; None for no limit.
        shared_link: The link that has a name; nobody else is on it.
    """

    def __init__(
        self, machine: Machine, bandwidth: float | None, shared_link: Any = None
    ) -> None:
        self._machine = machine
        self.shared_link = shared_link
        self.bandwidth = bandwidth
        self._free_from = {True: 0.0, False: 0.0}
        self._stall_seconds = 0.0
        self._closed = False

    def throttle(self, bandwidth: float | None) -> None:
        """From the next copy on another bandwidth; None for no limit."""
        self.bandwidth = bandwidth

    def start(self, root: Root, space: Space, outward: bool) -> VirtualTransfer:
        if self._closed:
            raise SwapStoreError('the copies have ended with their session')
        copy = _Copy(self._machine, root, space, outward)
        before = space.last
        after = self._free_from[outward]
        if isinstance(before, VirtualCompletion):
            after = max(after, before.ended)
        self._machine.plan(copy, after, self.bandwidth)
        if isinstance(before, VirtualCompletion) and before.error and not outward:
            copy.fails = True
        copy.completion.began = copy.began
        copy.completion.ended = self._free_from[outward] = copy.ended
        space.last = copy.completion
        return VirtualTransfer(copy, root)

    def wait(self, transfer: Transfer) -> None:
        assert isinstance(transfer, VirtualTransfer)
        began = self._machine.now()
        transfer.completion.wait()
        self._stall_seconds += max(transfer.ended - began, 0.0)
        if transfer.completion.error is not None:
            raise SwapStoreError(transfer.completion.error)

    def fill(self, space: Space, root: Root) -> None:
        space.fill(address_of(root))
        contents = zlib.crc32(_memory(address_of(root), space.nbytes))
        self._machine.store(_place_of(space), contents)

    def has(self, space: Space, root: Root) -> bool:
        return space.has(address_of(root))

    def take_stall_seconds(self) -> float:
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    def finish(self) -> None:
        self._machine.pass_to(max(self._free_from.values()))

    def close(self) -> None:
        self.finish()
        self._closed = True
        if self.shared_link is not None:
            self.shared_link.close()
