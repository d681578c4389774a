"""Measures the path to host memory while the device computes.

All devices are measured the same way: copies are started, pieces of dense compute
are issued beside them, and the clock of the device says how long each took.

Note: [late copies]
    Processes that share a link start their copies at the same moment, but on a busy
    machine one can be late, and the others have the link for themselves meanwhile. So
    each tells the others when its copies ran. At a moment at which k of n processes
    copy, a copy has n / k of what it has while all copy; what it would take then is
    the integral of n / k over the time that it took.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from chainer_hybridmem import timing
from chainer_hybridmem.errors import OutOfMemoryError, SwapStoreError
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.training.devices.protocol import (
    Array,
    Device,
    Mark,
    Transfer,
    View,
)

_LEAST_BYTES = 1 << 12
LEAST_ROOM_BYTES = 3 * _LEAST_BYTES  # of a tier that can be measured
_ENOUGH_SECONDS = 0.03  # a longer copy is not needed to know a bandwidth
_RESOLUTION_SECONDS = 5e-7  # of a pair of events
_SIDE = 256  # of the matrices that are multiplied
_MOST_PIECES = 4096
_REPEATS = 4  # the first touches new memory and is not counted
_SPAN_SECONDS = 0.01  # of copies beside compute: shorter ones tell little
_MOST_COPIES = 64
_LEAST_SHARE = 0.5  # what looks slower than this is another user of the machine
_LONGEST_SECONDS = 0.2
_NOTICEABLE = 0.03  # a smaller loss of speed is noise, even where all runs agree


def measure_link(
    device: Device,
    nbytes: int = 2**24,
    tier: Tier = Tier.RAM,
    users: LinkUsers | None = None,
) -> Link | None:
    """Latency, bandwidths, and what copies and compute cost each other.

    Bandwidths are medians. What is lost to others is told by the best of several
    runs: other users of the machine only make things slower. A loss that is not clearly
    above what runs differ by anyway counts as none.

    Args:
        device: Open, installed or not.
        nbytes: Of the largest copy; less where the link is slow or memory short.
        tier: Where the copies go.
        users: The processes that measure it together, if there are several: rates are
            what one of them has while all copy.

    Returns:
        Link: None if there is no room for two small copies in this tier.
    """
    buffers: list[_Buffer] = []
    room_bytes = device.copies.host_room(tier)
    if room_bytes < LEAST_ROOM_BYTES:
        return None
    nbytes = min(nbytes, (room_bytes - _LEAST_BYTES) // 2)
    nbytes -= nbytes % device.offsets.alignment_bytes  # or allocations would be larger
    with device.memory.without_reclaim():
        try:
            return _measure(device, nbytes, tier, buffers, users or LinkUsers())
        finally:
            device.clock.synchronize()
            for buffer in buffers:
                buffer.close()


def _measure(
    device: Device,
    nbytes: int,
    tier: Tier,
    buffers: list[_Buffer],
    users: LinkUsers,
) -> Link:
    bench = _Bench(device)
    small = _Buffer(device, _LEAST_BYTES, tier)
    buffers.append(small)
    latency = math.inf
    for _ in range(_REPEATS):
        for start in (small.out, small.back):
            latency = min(latency, bench.run(start).copies[0])
    large = _sized(bench, small, nbytes, buffers)
    once = bench.run(large.out).copies[0]
    repeats = min(math.ceil(_SPAN_SECONDS / once), _MOST_COPIES)
    repeats = math.ceil(users.agree(repeats * large.nbytes) / large.nbytes)
    bench.last_for(once * repeats)
    second = _another(device, large.nbytes, tier, buffers)
    if second is not None:
        bench.run(second.out)
    alone, outward, inward, both = [], [], [], []
    for _ in range(_REPEATS):
        alone.append(bench.run())
        users.gather()
        outward.append(bench.run(*[large.out] * repeats))
        users.gather()
        inward.append(bench.run(*[large.back] * repeats))
        users.gather()  # also without a second buffer: others may have one
        if second is not None:
            both.append(bench.run(*[large.out, second.back] * repeats))
    runs = [
        [run.copied for run in outward],
        [run.copied for run in inward],
        [run.copied[::2] for run in both],
        [run.copied[1::2] for run in both],
    ]
    out, back, *beside = seconds_among(runs, users.exchange(runs))
    out_seconds = statistics.median(out[1:]) / repeats
    in_seconds = statistics.median(back[1:]) / repeats
    # A tiny copy can take longer than its share of a large one.
    latency = min(latency, out_seconds / 2, in_seconds / 2)
    pieces = [run.piece_seconds for run in alone]
    piece = min(pieces)
    noise = _NOTICEABLE + 2 * (statistics.median(pieces) / piece - 1)
    return Link(
        latency_seconds=latency,
        d2h_bytes_per_second=large.nbytes / (out_seconds - latency),
        h2d_bytes_per_second=large.nbytes / (in_seconds - latency),
        duplex_share=_noticed(_duplex_share([out, back], beside), noise),
        d2h_compute_share=_noticed(_compute_share(piece, outward), noise),
        h2d_compute_share=_noticed(_compute_share(piece, inward), noise),
        issue_seconds=small.issue_seconds if device.clock.asynchronous else 0.0,
    )


def _compute_share(piece_seconds: float, runs: list[_BenchRun]) -> float:
    """Share of its speed that compute has kept while copies were under way.

    What takes s seconds alone and t beside copies, both under way for o seconds, has
    kept 1 - (t - s) / o meanwhile.
    """
    shares = []
    for run in runs:
        alone = piece_seconds * run.pieces
        overlap = min(run.seconds, sum(run.copies))
        shares.append(1.0 - (run.seconds - alone) / overlap)
    return max(shares)


def _duplex_share(alone: list[list[float]], beside: list[list[float]]) -> float:
    """Share of its speed that a direction keeps beside the other one.

    The shorter copy tells.
    """
    pairs = [(min(a), min(b)) for a, b in zip(alone, beside, strict=True) if b]
    if not pairs:
        return 1.0
    solo, shared = min(pairs, key=lambda pair: pair[1])
    return solo / shared


def _sized(
    bench: _Bench, small: _Buffer, nbytes: int, buffers: list[_Buffer]
) -> _Buffer:
    """The smallest buffer whose copy takes long enough, or the largest that fits."""
    size, best = small.nbytes, small
    while size < nbytes:
        size = min(4 * size, nbytes)
        if best is not small:
            buffers.remove(best)
            best.close()
        larger = _another(bench.device, size, small.tier, buffers)
        if larger is None:
            fallback = _another(bench.device, size // 4, small.tier, buffers)
            return small if fallback is None else fallback
        best = larger
        bench.run(best.out)  # new memory
        if bench.run(best.out).copies[0] >= _ENOUGH_SECONDS:
            break
    return best


def _another(
    device: Device, nbytes: int, tier: Tier, buffers: list[_Buffer]
) -> _Buffer | None:
    try:
        buffer = _Buffer(device, nbytes, tier)
    except (OutOfMemoryError, SwapStoreError):
        return None
    buffers.append(buffer)
    return buffer


def _noticed(share: float, noise: float) -> float:
    """A share of a speed, one if no more was lost than runs differ by."""
    return max(share, _LEAST_SHARE) if share < 1 - noise else 1.0


class _Buffer:
    """An allocation that is copied to and fro."""

    def __init__(self, device: Device, nbytes: int, tier: Tier) -> None:
        self.device, self.tier = device, tier
        self.root = device.memory.allocate(nbytes)
        self.nbytes = device.arrays.root_bytes(self.root)
        self.copy = device.copies.host_copy(self.nbytes, tier)
        self.issue_seconds = math.inf

    def out(self) -> Transfer:
        began = timing.now()
        _, transfer = self.device.copies.swap_out(self.root, self.copy)
        self.issue_seconds = min(self.issue_seconds, timing.now() - began)
        return transfer

    def back(self) -> Transfer:
        return self.device.copies.swap_in(self.copy, self.root)

    def close(self) -> None:
        self.root = None
        self.copy.close()


class _BenchRun(NamedTuple):
    """Compute and the copies beside it."""

    pieces: int
    seconds: float
    copied: list[Copied]

    @property
    def copies(self) -> list[float]:
        """Seconds that each copy took."""
        return [copy.taken_seconds for copy in self.copied]

    @property
    def piece_seconds(self) -> float:
        return self.seconds / self.pieces


class _Bench:
    """Dense compute, with copies beside it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pieces = 1
        self.left, self.right, self.product = self._matrices()
        self.run()
        self.piece_seconds = self.run().seconds

    def _matrices(self) -> list[Array]:
        """Three square matrices, large if memory allows."""
        device, side = self.device, _SIDE
        while True:
            nbytes = 4 * side * side
            try:
                roots = [device.memory.allocate(nbytes) for _ in range(3)]
                break
            except OutOfMemoryError:
                if side == 1:
                    raise
                side //= 2
        view = View(0, (side, side), (4 * side, 4), '<f4')
        matrices = [device.arrays.restore(root, view) for root in roots]
        for matrix in matrices:
            matrix[...] = 1.0
        return matrices

    def last_for(self, seconds: float) -> None:
        """Makes compute take about so long."""
        pieces = math.ceil(seconds / self.piece_seconds)
        self.pieces = min(max(pieces, 1), _MOST_PIECES)

    def run(self, *starts: Callable[[], Transfer]) -> _BenchRun:
        """Starts copies, computes beside them, and waits for everything."""
        device = self.device
        transfers = [start() for start in starts]
        issued = timing.now()
        began = device.clock.mark()
        done = 0
        while done < self.pieces:
            self.left.dot(self.right, self.product)
            done += 1
            if timing.now() - issued > _LONGEST_SECONDS:
                break  # on a busy machine threads of one multiplication wait in turns
        ended = device.clock.mark()
        for transfer in transfers:
            device.copies.wait(transfer)
        device.clock.synchronize()
        seconds = max(device.clock.elapsed(began, ended), _RESOLUTION_SECONDS)
        return _BenchRun(done, seconds, [_copied(t, began, issued) for t in transfers])


def _copied(transfer: Transfer, origin: Mark, origin_seconds: float) -> Copied:
    """When a copy ran; of a mark it is known when that was."""
    start, end = transfer.carried(origin)
    taken_seconds = max(transfer.seconds(), _RESOLUTION_SECONDS)
    return Copied(origin_seconds + start, origin_seconds + end, taken_seconds)


class Copied(NamedTuple):
    """When a link carried a copy, on a clock that all processes of a machine share.

    Attributes:
        began_seconds (float): When that began.
        ended_seconds (float): When it ended.
        taken_seconds (float): What the copy took in its process.
    """

    began_seconds: float
    ended_seconds: float
    taken_seconds: float


# By kind of measurement and run of it, the copies of one process.
Runs = list[list[list[Copied]]]


# -- several processes --------------------------------------------------------
class LinkUsers:
    """The processes that measure one link; here, only this one."""

    def gather(self) -> None:
        """Waits until all are there; called before copies are timed."""

    def agree(self, nbytes: int) -> int:
        """What all copy in a run: else one would have the link for itself at the end.

        Args:
            nbytes: What this process would copy.
        """
        return nbytes

    def exchange(self, runs: Runs) -> list[Runs]:
        """When the copies of the other processes ran, for each of them.

        Args:
            runs: When those of this one ran.
        """
        return []


def seconds_among(own: Runs, others: Sequence[Runs]) -> list[list[float]]:
    """What each run's copies would take if all processes copied all the time.

    Args:
        own: When the copies of this process ran.
        others: Likewise, for each of the others; a run that is missing has no copies.

    Returns:
        list of list of float: Seconds, by kind of measurement and run; see
        Note: [late copies].
    """
    return [
        [
            _seconds_among(copies, [_of_run(other[kind], i) for other in others])
            for i, copies in enumerate(runs)
        ]
        for kind, runs in enumerate(own)
    ]


def _of_run(runs: list[list[Copied]], i: int) -> list[Copied]:
    return runs[i] if i < len(runs) else []


def _seconds_among(own: list[Copied], others: Sequence[list[Copied]]) -> float:
    if not others:
        return sum(copy.taken_seconds for copy in own)
    copies = list(itertools.chain(own, *others))
    moments = sorted({moment for copy in copies for moment in copy[:2]})
    seconds = 0.0
    for began, ended in itertools.pairwise(moments):
        if _is_busy(own, began, ended):
            count = 1 + sum(_is_busy(other, began, ended) for other in others)
            seconds += (ended - began) * (1 + len(others)) / count
    return seconds


def _is_busy(copies: list[Copied], began: float, ended: float) -> bool:
    """Whether a copy runs between two moments at which none begins or ends."""
    return any(c.began_seconds <= began and ended <= c.ended_seconds for c in copies)
