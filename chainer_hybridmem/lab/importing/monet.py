"""Instances of MONeT, as its schedule zoo publishes them, counted as MONeT counts.

Source: Shah et al. 2021, *Memory Optimization for Deep Networks*, and its code, whose
solver has the formulas. Files and graph are those of :mod:`.checkmate`; what differs:

- Every operation has a workspace, and times of its own for the first run, for further
  ones, and for those in place. Sizes are rounded up to whole KiB, times to whole units.
- Gradients of parameters take memory from the operation on that makes them.
- An operation whose workspace is negative writes over what it reads.
- Some forward operations *may* write over what they read. A profile says nothing of
  that: its plans never do, and what it wins is won when the schedule is judged
  (``lab/contest/monet_rules.py``).

Of MONeT's modes these are the ones without a choice of kernels: ``inplace_normal``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.lab.importing.checkmate import (
    KIB,
    UNIT_SECONDS,
    UNITS_PER_MILLISECOND,
    labels_of,
    read_parts,
    reads_of,
)
from chainer_hybridmem.lab.importing.graphs import Buffer, GraphNode, build_profile
from chainer_hybridmem.planning.records.profile import Link, Profile

FIRST, AGAIN, IN_PLACE = range(3)
MOST_MORE = 1.25  # times what any operation needs, that a stage may begin with
_KINDS = ('workspace_', 'recompute_workspace_', 'inplace_workspace_')


@dataclasses.dataclass(frozen=True)
class MonetGraph:
    """What MONeT's formulation is about; T operations, numbered as they run.

    Attributes:
        kib (tuple of int): (T,) size of what each operation makes.
        fixed_kib (tuple of int): (T,) what is there all the time once each has run.
        reads (tuple of tuple of int): (T,) operations whose products each one reads.
        held (tuple of frozenset): (T,) operations whose products are there while each
            one runs for the first time, because it or a later one reads them; in
            backward gradients only.
        held_kib (tuple of int): (T,) their size.
        units (tuple): Times in units of 10 µs: (3, T), of a first run, of another one,
            and of one in place.
        workspace_kib (tuple): (3, T), what each run needs besides.
        over (dict of int): By operation that may write in place, whose product it
            writes over.
        labels (tuple of str): (T,) names.
        forward (tuple of int): (T,) forward operation of each one of backward, else -1.
        loss (int): The last operation of forward.
    """

    kib: tuple[int, ...]
    fixed_kib: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    held: tuple[frozenset[int], ...]
    held_kib: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]
    workspace_kib: tuple[tuple[int, ...], ...]
    over: Mapping[int, int]
    labels: tuple[str, ...]
    forward: tuple[int, ...]
    loss: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What runs, and what is there: MONeT's R, S and IP.

    Stage 0 is the forward pass; stage t > 0 runs operations of forward again, and then
    operation ``loss + t`` of backward.

    Attributes:
        runs (list of bytes): (stages, loss + 1) whether operation i runs in stage t.
        kept (list of bytes): (stages + 1, loss + 1) whether its product is there when
            stage t begins.
        in_place (list of bytes): (stages, loss + 1) whether it writes over what it
            reads.
    """

    runs: list[bytes]
    kept: list[bytes]
    in_place: list[bytes]


def read_graph(data: bytes) -> MonetGraph:
    """The graph in a solution file.

    Raises:
        FormatError: If it is no such file, or of a mode with a choice of kernels.
    """
    parts = read_parts(data)
    with files.reading('solution'):
        info = parts[0].state
        nodes = [info['nodes'][i].state for i in range(len(info['nodes']))]
        if any(len(node['args']) != 1 for node in nodes) or info['select_conv_algo']:
            raise FormatError(
                f'The solution is of mode {info["data_path"]}, in which kernels are '
                'chosen; those of inplace_normal can be read.'
            )
        graph = MonetGraph(
            kib=_rounded(node['mem'] / KIB for node in nodes),
            fixed_kib=_rounded(node['fixed_mem'] / KIB for node in nodes),
            reads=reads_of(info['edge_list'], len(nodes)),
            held=tuple(frozenset(node['local_tensors']) for node in nodes),
            held_kib=_rounded(node['local_memory'] / KIB for node in nodes),
            units=tuple(
                _rounded(
                    UNITS_PER_MILLISECOND * node[f'{kind}compute'][0] for node in nodes
                )
                for kind in _KINDS
            ),
            workspace_kib=tuple(
                _rounded(KIB * node[f'{kind}mem'][0] for node in nodes)
                for kind in _KINDS
            ),
            over={int(v): int(u) for v, u in info['inplace_list'].items()},
            labels=labels_of(nodes),
            forward=tuple(int(node.get('fwd_id', -1)) for node in nodes),
            loss=int(info['loss']),
        )
        _check(graph)
        return graph


def _check(graph: MonetGraph) -> None:
    size = len(graph.kib)
    most_kib = files.LARGEST_SIZE // KIB
    sizes = (*graph.kib, *graph.held_kib, *graph.fixed_kib, *graph.workspace_kib[FIRST])
    if not all(abs(kib) < most_kib for kib in sizes) or min(graph.kib) < 0:
        raise FormatError('The solution has a size that no memory has.')
    if graph.fixed_kib[0] < 0 or list(graph.fixed_kib) != sorted(graph.fixed_kib):
        raise FormatError('In the solution gradients of parameters become fewer.')
    if min(map(min, graph.units)) < 0:
        raise FormatError('The solution has a time below 0.')
    before = all(0 <= u < i for i in range(size) for u in graph.reads[i])
    if not before or any(not 0 <= u < v < size for v, u in graph.over.items()):
        raise FormatError('In the solution an operation reads what does not precede.')
    if not 0 <= graph.loss < size:
        raise FormatError(
            f'The solution has {size} operations, and {graph.loss} is the loss.'
        )


def _rounded(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(math.ceil(float(value)) for value in values)


def list_begins(graph: MonetGraph) -> list[tuple[int, ...]]:
    """Per operation of backward, what of forward is there when its stage begins.

    That is what the operation before it has read, unless made for it, and what it
    reads itself: in MONeT's form nothing is given up between the two, and runs of
    forward come after it. Empty where that says nothing, and where it asks for so much
    more than operations do (:data:`MOST_MORE`) that the former had better be made for
    its reader. Plans may then break MONeT's constraints, which the judge sees.
    """
    loss = graph.loss
    own = [[u for u in sources if u <= loss] for sources in graph.reads]
    result: list[tuple[int, ...]] = [()] * len(graph.kib)
    most = max(
        (_need(graph, i, own[i]) for i in range(loss + 1, len(graph.kib))), default=0
    )
    for i in range(loss + 2, len(graph.kib)):
        there = tuple(dict.fromkeys((*own[i - 1], *own[i])))
        if own[i - 1] and _need(graph, i, there) <= MOST_MORE * most:
            result[i] = there
    return result


def _need(graph: MonetGraph, i: int, there: Sequence[int]) -> int:
    """KiB at the highest moment of a stage, with products of forward that are there.

    That is while its operation runs, or before, while the last thing that it reads is
    made again.
    """
    kib, last = graph.kib, i - 1
    held = graph.held_kib[i] + sum(kib[u] for u in there)
    again = max(
        (
            sum(kib[u] for u in graph.reads[v])
            for v in graph.reads[i]
            if v <= graph.loss
        ),
        default=0,
    )
    runs = graph.fixed_kib[i] + kib[i] + graph.workspace_kib[FIRST][i]
    return held + max(runs, graph.fixed_kib[last] + again)


def operations_of(graph: MonetGraph) -> list[int]:
    """Which operation of the profile each one of the graph is."""
    added = itertools.accumulate(map(bool, list_begins(graph)))
    return [i + more for i, more in enumerate(added)]


def graph_profile(graph: MonetGraph, link: Link) -> Profile:
    """An iteration of a graph, accounted as MONeT does.

    Where a stage begins with something that only the one before has read, an operation
    without a time reads it.

    Args:
        graph: As read.
        link: The path to host memory, for those who want to know what it would give.
    """
    size = len(graph.kib)
    grown = [0] + [b - a for a, b in itertools.pairwise(graph.fixed_kib)]
    gradients = {i: kib for i, kib in enumerate(grown) if kib}
    numbers = {i: size + place for place, i in enumerate(gradients)}
    nodes = []
    for i, (label, there) in enumerate(
        zip(graph.labels, list_begins(graph), strict=True)
    ):
        if there:
            nodes.append(GraphNode(f'{label}/begin', True, 0.0, there, ()))
        spaces = [graph.workspace_kib[way][i] for way in (FIRST, AGAIN)]
        if i == graph.loss:  # MONeT counts twice what it reads
            spaces[FIRST] += graph.held_kib[i]
        nodes.append(
            GraphNode(
                label=label,
                backward=i > graph.loss,
                seconds=graph.units[FIRST][i] * UNIT_SECONDS,
                reads=graph.reads[i],
                makes=(i, numbers[i]) if i in numbers else (i,),
                forward=graph.forward[i],
                workspace_bytes=max(*spaces, 0) * KIB,
                again_seconds=graph.units[AGAIN][i] * UNIT_SECONDS,
                in_place=spaces[FIRST] < 0,
            )
        )
    buffers = [Buffer(kib * KIB) for kib in graph.kib]
    buffers += [Buffer(kib * KIB, stays=True) for kib in gradients.values()]
    device = {
        'kind': 'import',
        'name': "P100 16 GB (MONeT's schedule zoo)",
        'unit_seconds': UNIT_SECONDS,
    }
    return build_profile(nodes, buffers, link, device, graph.fixed_kib[0] * KIB)
