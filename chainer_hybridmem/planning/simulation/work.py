"""Where one evaluation leaves its results, and its scratch space.

Notation as in :mod:`.simulation.arrays`; ``-1`` is "never". Kernels
write into these arrays, so that a search allocates nothing per candidate.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, NamedTuple

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.jit_table import Bools, Floats, Floats2, Ints, Ints2, Table
from chainer_hybridmem.planning.simulation.arrays import ProblemArrays

# LATE is RECOMPUTE without staying when a replay for something else passes it; PASSED
# is LATE for the first replay that passes it, PASSED + n for the n after it as well,
# and stays when another one does.
KEEP, SWAP, RECOMPUTE, LATE, PASSED = 0, 1, 2, 3, 4
# Kinds of entries in a replay program.
RUN, STAY, FREE = 0, 1, 2
# Lists of maps per position.
OUT, LEAVE, IN, NEED = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True, eq=False)
class Work(Table):
    """The results of one evaluation, and its scratch space.

    Shapes: n operations, M maps, T other items, P entries of a program. Copies
    have two rows: outward, then back.
    """

    # Where everything happens.
    swap_out: Annotated[Ints, 'M']
    release: Annotated[Ints, 'M']
    swap_in: Annotated[Ints, 'M']
    needed: Annotated[Ints, 'M']
    drop: Annotated[Ints, 'M']
    on_disk: Annotated[Bools, 'M']  # host copies that have no room in RAM
    program: Annotated[Ints2, 'P', 3]  # position, RUN/STAY/FREE, operation or item
    replay_seconds: Annotated[Floats, 'n']
    replay_host_seconds: Annotated[Floats, 'n']  # to issue the replays
    # When it happens, in seconds.
    start: Annotated[Floats, 'n']  # compute start, replays included
    stop: Annotated[Floats, 'n']  # compute end
    host_stall: Annotated[Floats, 'n']  # compute waited for the host
    began: Annotated[Floats2, 2, 'M']  # each copy's start
    ended: Annotated[Floats2, 2, 'M']  # each copy's end
    stalls: Annotated[Floats2, 2, 'M']  # compute waited for this copy
    # Copies that are under way or wait for their lane.
    alone: Annotated[Floats2, 2, 'M']  # seconds on an idle link
    copies: Annotated[Ints2, 2, 'M']  # in order of submission
    head: Annotated[Ints, 2]  # the copy under way
    tail: Annotated[Ints, 2]  # the end of the queue
    ends_at: Annotated[Floats, 2]  # of the copy under way; infinite: idle
    out_seconds: Annotated[Floats, 'M']  # of each map's copy in its tier
    in_seconds: Annotated[Floats, 'M']
    # Lists of maps per position: OUT, LEAVE, IN and NEED.
    heads: Annotated[Ints2, 4, 'n+1']  # first map per position
    tails: Annotated[Ints, 'n+1']  # last map per position
    following: Annotated[Ints2, 4, 'M']  # next map of the same position
    # Bytes per position.
    load: Annotated[Ints, 'n+1']
    extra: Annotated[Ints, 'n+1']  # replays above what is loaded
    record: Annotated[Ints, 'n']  # positions whose load stands out
    rise: Annotated[Ints, 'n']  # by how much
    # Replays of the position that is laid out.
    mark: Annotated[Ints, 'n']  # position for which an operation is in the chain
    chain: Annotated[Ints, 'n']  # operations in order
    stack: Annotated[Ints, '2n+2']
    uses: Annotated[Ints, 'M+T']  # readers left in a chain
    stays: Annotated[Bools, 'M+T']
    made: Annotated[Bools, 'M']
    passed: Annotated[Ints, 'M']  # replays that have made it by now

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


@compiled(inline=True, counted=False)
def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """``target[:] = source``, of which most takes numba's error about their lengths."""
    for i in range(len(target)):
        target[i] = source[i]


def make_work(arrays: ProblemArrays, program: int = 0) -> Work:
    """Space for evaluations of one problem.

    Args:
        arrays: The problem's arrays.
        program: Entries of the replay program to store.
    """
    n, n_maps, n_items = len(arrays.seconds), len(arrays.first_use), len(arrays.size)
    return Work.zeros(
        {
            **{'n': n, 'n+1': n + 1, '2n+2': 2 * n + 2},
            **{'M': n_maps, 'M+T': n_items, 'P': program},
        }
    )
