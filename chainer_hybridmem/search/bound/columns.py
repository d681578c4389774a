"""Where the variables of the linear program stand, and their ranges."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chainer_hybridmem.search.bound.chains import Chains
from chainer_hybridmem.simulation.problem import Problem
from chainer_hybridmem.simulation.work import SWAP


class Columns(NamedTuple):
    """First column of each group of variables; n operations, M maps.

    Attributes:
        swap (int): M fractions swapped.
        recompute (int): M fractions recomputed.
        replay (int): One for each forward operation: whether it is replayed.
        waited (int): n + 1 waits before each operation, added up.
        away (int): n bytes of swapped maps that are away.
        remade (int): n bytes of recomputed maps that are not there.
        eligible (int): n bytes of swapped maps that may be away.
        late (int): 2 M fractions swapped and recomputed that are released after the
            first backward operation.
        back (int): One for each break of each map: whether it is back by then.
        back_of (tuple of int): Of these, the first one of each map.
        made (int): One for each pair of :attr:`.Chains.made`.
        single (int): M for each of n operations, or none: whether the map is swapped
            and away.
        end (int): Columns in all.
    """

    swap: int
    recompute: int
    replay: int
    waited: int
    away: int
    remade: int
    eligible: int
    late: int
    back: int
    back_of: tuple[int, ...]
    made: int
    single: int
    end: int


def lay_out_columns(problem: Problem, chains: Chains, singles: bool) -> Columns:
    """The columns, one group after the other.

    Args:
        problem: What is planned.
        chains: What replays lead to.
        singles: Whether there are columns for single maps at single operations.
    """
    n, n_maps = len(problem.arrays.seconds), len(problem.maps)
    replay = 2 * n_maps
    waited = replay + problem.arrays.first_backward
    away = waited + n + 1
    late = away + 3 * n
    back = late + 2 * n_maps
    counts = [len(positions) for positions in chains.breaks]
    starts = back + np.concatenate([[0], np.cumsum(counts)])
    made = back + sum(counts)
    return Columns(
        swap=0,
        recompute=n_maps,
        replay=replay,
        waited=waited,
        away=away,
        remade=away + n,
        eligible=away + 2 * n,
        late=late,
        back=back,
        back_of=tuple(starts.astype(int).tolist()),
        made=made,
        single=made + len(chains.made),
        end=made + len(chains.made) + (n * n_maps if singles else 0),
    )


class Variables(NamedTuple):
    """What is known of each column by itself.

    Attributes:
        lower (ndarray): Its least value.
        upper (ndarray): Its largest value.
        cost (ndarray): What one of it adds to the time.
        same_as (ndarray): The column that it always equals, perhaps itself.
    """

    lower: np.ndarray
    upper: np.ndarray
    cost: np.ndarray
    same_as: np.ndarray


def make_variables(
    problem: Problem, columns: Columns, longest: float, total: float
) -> Variables:
    """Ranges and costs of all columns.

    Args:
        problem: What is planned.
        columns: Where they are.
        longest: The longest wait in seconds.
        total: Bytes of all maps, over the limit.
    """
    a, n = problem.arrays, len(problem.arrays.seconds)
    upper = np.concatenate(
        [
            a.allowed[:, SWAP].astype(float),
            problem.recomputable.astype(float),
            np.ones(a.first_backward),
            np.full(n + 1, longest),
            np.full(3 * n, total),
            np.tile(a.first_use > a.first_backward, 2).astype(float),
            np.ones(columns.end - columns.back),
        ]
    )
    upper[columns.waited] = 0
    cost = np.zeros(columns.end)
    cost[columns.waited + n] = 1
    lower = np.zeros(columns.end)
    return Variables(lower, upper, cost, np.arange(columns.end))
