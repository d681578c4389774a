"""What replays read of each other: the graph that checkpointing cuts.

Nodes are forward operations that make a map which can be recomputed, or a transient on
the way to one. Edges are what their recipes read of each other. What always stays (maps
without an exact recipe, masks, parameters) is no edge: it is never made again.

A transient cannot be kept: forward drops it. So no cut may lie between the operation
that makes it and one that reads it, and these are one node here, together with all that
lies between them.
"""

from __future__ import annotations

import graphlib
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.planning.simulation.problem import Problem


class ReplayGraph(NamedTuple):
    """Shapes: V nodes, in topological order; M maps.

    Attributes:
        reads (ndarray): (V, V) bool; whether node ``v`` reads what ``w`` makes.
        seconds (ndarray): (V,) of one replay of all its operations.
        nbytes (ndarray): (V,) int64, of its maps.
        node (ndarray): (M,) node of each map; -1 if it cannot be recomputed.
    """

    reads: np.ndarray
    seconds: np.ndarray
    nbytes: np.ndarray
    node: np.ndarray


def replay_reads(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What replays read that may have to be made again.

    Returns:
        tuple: (n,) bool, the operations a replay may run; and by pair, the item
        that is read and the operation that reads it.
    """
    arrays, n_maps = problem.arrays, len(problem.maps)
    returning = ~arrays.present
    returning[:n_maps] = problem.recomputable
    transient = returning.copy()
    transient[:n_maps] = False
    replayed = np.zeros(len(arrays.seconds), bool)
    replayed[arrays.producer[:n_maps][problem.recomputable]] = True
    for operation in range(arrays.first_backward - 1, -1, -1):
        if replayed[operation]:
            first, last = arrays.input_ptr[operation : operation + 2]
            read = arrays.inputs[first:last]
            replayed[arrays.producer[read[transient[read]]]] = True
    readers = np.repeat(np.arange(len(replayed)), np.diff(arrays.input_ptr))
    chosen = replayed[readers] & returning[arrays.inputs]
    return replayed, arrays.inputs[chosen], readers[chosen]


def make_replay_graph(problem: Problem) -> ReplayGraph:
    """The graph of a problem's replays."""
    arrays, able = problem.arrays, problem.recomputable
    replayed, items, readers = replay_reads(problem)
    makers = arrays.producer[items]
    component = _components(replayed, makers, readers, items >= len(able))
    count = int(component.max(initial=-1)) + 1
    reads = np.zeros((count, count), bool)
    reads[component[readers], component[makers]] = True
    np.fill_diagonal(reads, False)
    order = _topological(reads)
    place = np.full(count + 1, -1, np.int64)  # the last one is of no node
    place[order] = np.arange(count)
    node = np.where(able, place[component[arrays.producer[: len(able)]]], -1)
    nbytes = np.zeros(count, np.int64)
    np.add.at(nbytes, node[able], arrays.size[: len(able)][able])
    replay_seconds = arrays.recipe_seconds[replayed]
    return ReplayGraph(
        reads=reads[np.ix_(order, order)],
        seconds=np.bincount(place[component[replayed]], replay_seconds, count),
        nbytes=nbytes,
        node=node,
    )


def _components(
    replayed: np.ndarray, makers: np.ndarray, readers: np.ndarray, bound: np.ndarray
) -> np.ndarray:
    """(n,) node of each operation, -1 for none; ``bound`` pairs are in one node."""
    from scipy.sparse import coo_array, csgraph

    n = len(replayed)
    sources = np.concatenate([makers, readers[bound]])
    targets = np.concatenate([readers, makers[bound]])
    ones = np.ones(len(sources), bool)
    edges = coo_array((ones, (sources, targets)), shape=(n, n))
    _, labels = csgraph.connected_components(edges, directed=True, connection='strong')
    result = np.full(n, -1, np.int64)
    result[replayed] = np.unique(labels[replayed], return_inverse=True)[1]
    return result


def _topological(reads: np.ndarray) -> np.ndarray:
    """Nodes, what is read before its readers."""
    sorter = graphlib.TopologicalSorter(
        {v: np.flatnonzero(row).tolist() for v, row in enumerate(reads)}
    )
    return np.array(list(sorter.static_order()), np.int64)
