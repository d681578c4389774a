"""Starts copies, waits for them, counts them and tells listeners."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chainer_hybridmem import timing
from chainer_hybridmem.devices.protocol import Span
from chainer_hybridmem.execution.live_map import LiveMap, State
from chainer_hybridmem.execution.live_maps import PlannedMaps

if TYPE_CHECKING:
    from chainer_hybridmem.execution.verifier import Verifier


class Observer:
    """Listens to the executor; what it does not override goes by."""

    def copy(self, kind: str, storage: int, span: Span) -> None:
        """A copy has been started; its kind is ``'swap-out'`` or ``'swap-in'``."""

    def released(self) -> None:
        """What leaves before an operation has left."""

    def wait(self, kind: str, storage: int, action: Callable[[], None]) -> None:
        """Does something that may wait for a copy."""
        action()

    def use(self, storage: int) -> None:
        """The next operation uses what has been swapped in."""

    def replay(self, operation: int, action: Callable[[], None]) -> None:
        """Runs one replay."""
        action()


Look = Callable[[LiveMap], None]


class Counters:
    """What one iteration has moved.

    Attributes:
        swapped_out_bytes (int): Copied to the host.
        swapped_in_bytes (int): Copied to the device.
        recomputed_bytes (int): Made again by replays.
        replays (int): Forward operations run again.
        replay_seconds (float): That these took, checks included; on a GPU to issue.
        expected_seconds (float): That they take by what their recipes say.
        evictions (int): Maps evicted because memory was short.
        planned_evictions (int): Of these, maps that a plan had a place for.
        restores (int): Maps brought back without a plan.
        lost_seconds (float): The program has waited for evictions and restores.
    """

    def __init__(self) -> None:
        self.swapped_out_bytes = 0
        self.swapped_in_bytes = 0
        self.recomputed_bytes = 0
        self.replays = 0
        self.replay_seconds = self.expected_seconds = 0.0
        self.evictions = self.planned_evictions = 0
        self.restores = 0
        self.lost_seconds = 0.0

    def count_recomputed(self, nbytes: int) -> None:
        """A replay has made a map of this size again."""
        self.recomputed_bytes += nbytes

    def count_replay(self) -> None:
        """A forward operation is run again."""
        self.replays += 1

    def time_replay(self, seconds: float, expected_seconds: float) -> None:
        """A replay, or the check of one, took so long."""
        self.replay_seconds += seconds
        self.expected_seconds += expected_seconds

    def count_eviction(self, planned: bool) -> None:
        """A map has been evicted; whether a plan had a place for it."""
        self.evictions += 1
        self.planned_evictions += planned

    def count_restore(self) -> None:
        """A map is brought back without a plan."""
        self.restores += 1

    def lose(self, act: Callable[[], None]) -> None:
        """Has an eviction or a restore done; one within another counts once."""
        before, start = self.lost_seconds, timing.now()
        try:
            act()
        finally:
            self.lost_seconds = before + timing.now() - start


class Movements:
    """Moves live maps between device and host.

    Args:
        planned (PlannedMaps): Keeps host copies for later iterations.

    Attributes:
        counters (Counters): What this iteration has moved.
        observer (Observer or None): Is told of copies, waits and replays.
    """

    def __init__(self, planned: PlannedMaps) -> None:
        self._planned = planned
        self._verifier: Verifier | None = None
        self.observer: Observer | None = None
        self.counters = Counters()
        self._look: Look | None = None

    def begin_iteration(self) -> None:
        """Counts from zero."""
        self.counters = Counters()

    def observe(self, observer: Observer | None) -> None:
        """Tells an observer from here on; None ends that."""
        self.observer = observer

    def verify_with(self, verifier: Verifier | None) -> None:
        """Tells a verifier what is about to leave; None ends that."""
        self._verifier = verifier

    def watch_leaving(self, look: Look | None) -> None:
        """Shows maps whose memory is about to go, while it is there; None ends that."""
        self._look = look

    # -- to the host ----------------------------------------------------------
    def start_swap_out(self, live: LiveMap) -> None:
        """Starts a copy to the host."""
        if self._verifier is not None:
            self._verifier.leaves(live)
        self._show_leaving(live)
        nbytes = live.start_swap_out()
        self.counters.swapped_out_bytes += nbytes
        self._planned.keep_copy(live)
        if nbytes and self.observer is not None:
            self._tell_copy('swap-out', live, self.observer)

    def release(self, live: LiveMap) -> None:
        """Waits for a copy to the host and frees the device memory."""
        if self.observer is not None and _waits(live):
            self.observer.wait('swap-out', live.storage, live.release)
        else:
            live.release()

    def vacate(self, live: LiveMap) -> None:
        """Moves a map that the host has no room for to other device memory."""
        self._show_leaving(live)
        live.vacate()

    def put_away(self, live: LiveMap) -> None:
        """Frees the device memory of a map that has to come back."""
        self.start_swap_out(live)
        self.release(live)

    def drop(self, live: LiveMap, checked: bool = False) -> None:
        """Frees the device memory of a map that a replay makes again, or nothing.

        Args:
            live: The map.
            checked: Whether a replay must make the same, also if no known backward
                reads it.
        """
        if self._verifier is not None:
            self._verifier.leaves(live)
        live.drop(checked)

    def drop_planned(self, live: LiveMap) -> None:
        """Drops a map as the plan says; what a later backward will ask for is kept."""
        if live.outlives:  # replayer, [later iterations]
            self.put_away(live)
        elif self.observer is not None and _waits(live):
            kind = 'swap-out' if live.state is State.LEAVING else 'swap-in'
            self.observer.wait(kind, live.storage, live.drop)
        else:
            self.drop(live)

    # -- to the device --------------------------------------------------------
    def start_swap_in(self, live: LiveMap) -> None:
        """Takes device memory and starts a copy to it."""
        nbytes = live.start_swap_in()
        self.counters.swapped_in_bytes += nbytes
        if nbytes and self.observer is not None:
            self._tell_copy('swap-in', live, self.observer)

    def finish_swap_in(self, live: LiveMap) -> None:
        """Waits for a copy to the device and puts it into the graph."""
        observer = self.observer
        if observer is not None and live.state is State.COMING:
            if live.storage >= 0:
                observer.use(live.storage)
            if _waits(live):
                observer.wait('swap-in', live.storage, live.finish_swap_in)
                return
        live.finish_swap_in()

    def _show_leaving(self, live: LiveMap) -> None:
        if self._look is not None and live.state is State.RESIDENT:
            self._look(live)

    @staticmethod
    def _tell_copy(kind: str, live: LiveMap, observer: Observer) -> None:
        transfer = live.host.transfer
        if transfer is not None:
            observer.copy(kind, live.storage, transfer.span())


def _waits(live: LiveMap) -> bool:
    """Whether a copy of a map is under way and has not finished."""
    transfer = live.host.transfer
    return transfer is not None and not transfer.done()
