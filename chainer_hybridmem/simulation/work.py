"""Where one evaluation leaves its results, and its scratch space.

Notation as in :mod:`chainer_hybridmem.simulation.arrays`; ``-1`` is "never". Kernels
write into these arrays, so that a search allocates nothing per candidate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chainer_hybridmem.simulation.arrays import Arrays

# LATE is RECOMPUTE without staying when a replay for something else passes it; PASSED
# is LATE for the first replay that passes it, and stays when another one does.
KEEP, SWAP, RECOMPUTE, LATE, PASSED = 0, 1, 2, 3, 4
# Kinds of entries in a replay program.
RUN, STAY, FREE = 0, 1, 2
# Lists of maps per position.
OUT, LEAVE, IN, NEED = 0, 1, 2, 3


class Work(NamedTuple):
    """The results of one evaluation, and its scratch space.

    A table of arrays. It is flat because every call of a kernel from Python takes it
    apart: nested tuples make an evaluation a tenth slower.

    Shapes: n operations, M maps, T other items, P entries of a program. Copies
    have two rows: outward, then back.
    """

    # Where everything happens.
    swap_out: np.ndarray  # (M,) int64
    release: np.ndarray  # (M,) int64
    swap_in: np.ndarray  # (M,) int64
    needed: np.ndarray  # (M,) int64
    drop: np.ndarray  # (M,) int64
    on_disk: np.ndarray  # (M,) bool, host copies that have no room in RAM
    program: np.ndarray  # (P, 3): position, RUN/STAY/FREE, operation or item
    replay_seconds: np.ndarray  # (n,)
    replay_host_seconds: np.ndarray  # (n,) to issue the replays
    # When it happens, in seconds.
    start: np.ndarray  # (n,) compute start, replays included
    stop: np.ndarray  # (n,) compute end
    host_stall: np.ndarray  # (n,) compute waited for the host
    began: np.ndarray  # (2, M) each copy's start
    ended: np.ndarray  # (2, M) each copy's end
    stalls: np.ndarray  # (2, M) compute waited for this copy
    # Copies that are under way or wait for their lane.
    alone: np.ndarray  # (2, M) float64, seconds on an idle link
    copies: np.ndarray  # (2, M) int64, in order of submission
    head: np.ndarray  # (2,) int64, the copy under way
    tail: np.ndarray  # (2,) int64, the end of the queue
    ends_at: np.ndarray  # (2,) float64, of the copy under way; infinite: idle
    out_seconds: np.ndarray  # (M,) float64, of each map's copy in its tier
    in_seconds: np.ndarray  # (M,) float64
    # Lists of maps per position: OUT, LEAVE, IN and NEED.
    heads: np.ndarray  # (4, n+1) int64, first map per position
    tails: np.ndarray  # (n+1,) int64, last map per position
    following: np.ndarray  # (4, M) int64, next map of the same position
    # Bytes per position.
    load: np.ndarray  # (n+1,) int64
    extra: np.ndarray  # (n+1,) int64, replays above what is loaded
    record: np.ndarray  # (n,) int64, positions whose load stands out
    rise: np.ndarray  # (n,) int64, by how much
    # Replays of the position that is laid out.
    mark: np.ndarray  # (n,) int64, position for which an operation is in the chain
    chain: np.ndarray  # (n,) int64, operations in order
    stack: np.ndarray  # (2n+2,) int64
    uses: np.ndarray  # (M+T,) int64, readers left in a chain
    stays: np.ndarray  # (M+T,) bool
    made: np.ndarray  # (M,) bool
    passed: np.ndarray  # (M,) bool, whether a replay has made it by now

    @property
    def out_start(self) -> np.ndarray:
        """(M,) start of each swap-out."""
        return self.began[0, :]

    @property
    def out_end(self) -> np.ndarray:
        """(M,) end of each swap-out."""
        return self.ended[0, :]

    @property
    def in_start(self) -> np.ndarray:
        """(M,) start of each swap-in."""
        return self.began[1, :]

    @property
    def in_end(self) -> np.ndarray:
        """(M,) end of each swap-in."""
        return self.ended[1, :]

    @property
    def release_stall(self) -> np.ndarray:
        """(M,) what compute waited for each swap-out."""
        return self.stalls[0, :]

    @property
    def need_stall(self) -> np.ndarray:
        """(M,) what compute waited for each swap-in."""
        return self.stalls[1, :]


# What compiled code returns of an :class:`Outcome`; see :func:`.jit.compiled`.
Result = tuple[float, int, int, int, bool]


class Outcome(NamedTuple):
    """What an evaluation says about one assignment of actions."""

    seconds: float  # of the iteration; infinite if it does not fit
    peak_bytes: int
    worst: int  # operation with the highest load
    entries: int  # of the replay program
    collective: bool  # whether replays keep what they pass


def make_work(arrays: Arrays, program: int = 0) -> Work:
    """Space for evaluations of one problem.

    Args:
        arrays: The problem's arrays.
        program: Entries of the replay program to store.
    """
    n, n_maps, n_items = len(arrays.seconds), len(arrays.first_use), len(arrays.size)
    return Work(
        swap_out=np.zeros(n_maps, np.int64),
        release=np.zeros(n_maps, np.int64),
        swap_in=np.zeros(n_maps, np.int64),
        needed=np.zeros(n_maps, np.int64),
        drop=np.zeros(n_maps, np.int64),
        on_disk=np.zeros(n_maps, bool),
        program=np.zeros((program, 3), np.int64),
        replay_seconds=np.zeros(n),
        replay_host_seconds=np.zeros(n),
        start=np.zeros(n),
        stop=np.zeros(n),
        host_stall=np.zeros(n),
        began=np.zeros((2, n_maps)),
        ended=np.zeros((2, n_maps)),
        stalls=np.zeros((2, n_maps)),
        alone=np.zeros((2, n_maps)),
        copies=np.zeros((2, n_maps), np.int64),
        head=np.zeros(2, np.int64),
        tail=np.zeros(2, np.int64),
        ends_at=np.zeros(2),
        out_seconds=np.zeros(n_maps),
        in_seconds=np.zeros(n_maps),
        heads=np.zeros((4, n + 1), np.int64),
        tails=np.zeros(n + 1, np.int64),
        following=np.zeros((4, n_maps), np.int64),
        load=np.zeros(n + 1, np.int64),
        extra=np.zeros(n + 1, np.int64),
        record=np.zeros(n, np.int64),
        rise=np.zeros(n, np.int64),
        mark=np.zeros(n, np.int64),
        chain=np.zeros(n, np.int64),
        stack=np.zeros(2 * n + 2, np.int64),
        uses=np.zeros(n_items, np.int64),
        stays=np.zeros(n_items, bool),
        made=np.zeros(n_maps, bool),
        passed=np.zeros(n_maps, bool),
    )
