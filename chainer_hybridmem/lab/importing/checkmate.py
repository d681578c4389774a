"""Instances of Checkmate, as MONeT's schedule zoo publishes them.

Sources: Jain et al. 2020, *Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization*; Shah et al. 2021, *Memory Optimization for Deep Networks* (MONeT),
whose authors profiled five networks on a P100 and gave both solvers up to 24 hours.

A solution file (``checkmate_solution_*.pkl``, ``solution_*.pkl``) has the graph, the
sizes and times; a file of costs (``cost_*.pkl``) has the times of another mode. What
is counted is what Checkmate counts:

- Sizes are whole KiB, times whole units of 10 µs, both rounded.
- Every operation makes one buffer of its own; nothing works in place, and there are no
  workspaces. A gradient is a buffer like any other.
- Parameters, inputs and the gradients of all parameters are there all the time. They
  are the profile's ``initial_bytes``, so that its limit is Checkmate's budget.
- The loss is an operation that takes no time and copies the network's output.

Checkmate has no host memory: plan with ``--rule '*=no swap'`` to compare.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.lab.importing.graphs import Buffer, GraphNode, build_profile
from chainer_hybridmem.lab.importing.pickles import Call, Thing, admit, read_pickle
from chainer_hybridmem.planning.records.profile import Link, Profile

UNIT_SECONDS = 1e-5
KIB = 1024
UNITS_PER_MILLISECOND = 100
_PREFIX = 'aten::'


@dataclasses.dataclass(frozen=True)
class TrainingGraph:
    """What Checkmate's formulation is about; T operations, numbered as they run.

    Attributes:
        kib (tuple of int): (T,) size of what each operation makes.
        units (tuple of int): (T,) time of each, in units of 10 µs.
        reads (tuple of tuple of int): (T,) operations whose products each one reads.
        labels (tuple of str): (T,) names.
        forward (tuple of int): (T,) forward operation that each one of backward
            differentiates; -1 in forward.
        fixed_kib (int): What is there all the time.
    """

    kib: tuple[int, ...]
    units: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    labels: tuple[str, ...]
    forward: tuple[int, ...]
    fixed_kib: int

    @property
    def size(self) -> int:
        """How many operations there are."""
        return len(self.kib)

    @property
    def first_backward(self) -> int:
        """Index of the first operation that differentiates another one."""
        return next((i for i, f in enumerate(self.forward) if f >= 0), self.size)


def read_solution(data: bytes, times: bytes | None = None) -> TrainingGraph:
    """The graph in a solution file.

    Args:
        data: The solution file.
        times: A file of costs whose times count instead of its own.

    Raises:
        FormatError: If one of them is no such file.
    """
    parts = read_parts(data)
    with files.reading('solution'):
        info = parts[0].state
        nodes = [info['nodes'][i] for i in range(len(info['nodes']))]
        costs = _own_times(nodes) if times is None else _read_times(times, len(nodes))
        graph = TrainingGraph(
            kib=tuple(round(int(node.state['mem']) / KIB) for node in nodes),
            units=tuple(round(UNITS_PER_MILLISECOND * cost) for cost in costs),
            reads=reads_of(info['edge_list'], len(nodes)),
            labels=labels_of([node.state for node in nodes]),
            forward=tuple(
                int(node.state['fwd_id']) if 'fwd_id' in node.state else -1
                for node in nodes
            ),
            fixed_kib=round(int(nodes[-1].state['fixed_mem']) / KIB),
        )
    check_graph(graph)
    return graph


def read_parts(data: bytes) -> list[Thing]:
    """What a solution file holds: the graph, and a schedule.

    Raises:
        FormatError: If it is no such file.
    """
    parts = read_pickle(data, _ADMITTED)
    if not (isinstance(parts, list) and parts and isinstance(parts[0], Thing)):
        raise FormatError('The pickle is no solution of Checkmate or MONeT.')
    return parts


def _own_times(nodes: Sequence[Thing]) -> list[float]:
    return [float(node.state['workspace_compute'][0]) for node in nodes]


def _read_times(data: bytes, n_nodes: int) -> list[float]:
    """The second of six tables: milliseconds of each way to run each operation."""
    tables = read_pickle(data, _ADMITTED)
    with files.reading('file of costs'):
        table = tables[1]
        if len(table) != n_nodes:
            raise FormatError(
                f'The file of costs is about {len(table)} operations, the solution '
                f'about {n_nodes}; name the two of one network.'
            )
        return [float(table[i][0]) for i in range(n_nodes)]


def reads_of(edges: Any, n_nodes: int) -> tuple[tuple[int, ...], ...]:
    """Operations that each one reads, by the first of several ways to run it."""
    found: list[dict[int, None]] = [{} for _ in range(n_nodes)]
    for source, reader, way in edges:
        if way == 0:
            found[reader][source] = None
    return tuple(tuple(sources) for sources in found)


def labels_of(nodes: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """``/12/batch_norm``; of backward as the forward operation with what it gives."""
    names = [str(node['op']).removeprefix(_PREFIX).strip('_') for node in nodes]
    places = [int(node.get('fwd_id', i)) for i, node in enumerate(nodes)]
    return tuple(f'/{i}/{name}' for i, name in zip(places, names, strict=True))


def check_graph(graph: TrainingGraph) -> None:
    """Refuses a graph that cannot run in its order.

    Raises:
        FormatError: With the operation.
    """
    for i, sources in enumerate(graph.reads):
        if not all(0 <= source < i for source in sources):
            raise FormatError(
                f'Operation {i} reads {sources}, which do not precede it.'
            )
        if not (0 <= graph.kib[i] < files.LARGEST_SIZE // KIB and graph.units[i] >= 0):
            raise FormatError(
                f'Operation {i} makes {graph.kib[i]} KiB in {graph.units[i]} units.'
            )


def graph_profile(graph: TrainingGraph, link: Link, name: str) -> Profile:
    """An iteration of a graph, accounted as Checkmate does.

    Args:
        graph: As read.
        link: The path to host memory, for those who want to know what it would give.
        name: Of the device, and where the graph comes from.
    """
    nodes = [
        GraphNode(
            label=graph.labels[i],
            backward=graph.forward[i] >= 0,
            seconds=graph.units[i] * UNIT_SECONDS,
            reads=graph.reads[i],
            makes=(i,),
            forward=graph.forward[i],
        )
        for i in range(graph.size)
    ]
    device = {'kind': 'import', 'name': name, 'unit_seconds': UNIT_SECONDS}
    buffers = [Buffer(kib * KIB) for kib in graph.kib]
    return build_profile(nodes, buffers, link, device, graph.fixed_kib * KIB)


# -- what such files name -----------------------------------------------------
class _NumberType(Thing):
    """A type of numbers."""

    __slots__ = ('code',)

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.code = _CODES[arguments[0]]

    def build(self, state: Any) -> None:
        if state[1] not in '<|':
            raise ValueError('its numbers are not little-endian')


class _Array(Thing):
    """An array, of which nothing is read."""

    def build(self, state: Any) -> None:
        del state


_CODES = {'i8': 'q', 'f8': 'd', 'f4': 'f'}


def _scalar(arguments: tuple[Any, ...]) -> float:
    kind, data = arguments
    number: float = struct.unpack('<' + kind.code, data)[0]
    return number


def _inner_class(arguments: tuple[Any, ...]) -> Any:
    outer, name = arguments
    if outer != 'monet.graph ComputeNode' or name not in ('D', 'V'):
        raise ValueError(f'{name!r} of {outer!r} is asked for')
    return admit(name, _thing)


def _thing(arguments: tuple[Any, ...]) -> Thing:
    if arguments:
        raise ValueError('an object is made with arguments')
    return Thing()


def _items(arguments: tuple[Any, ...]) -> list[Any]:
    return list(*arguments)


_ADMITTED: dict[str, Call] = {
    'builtins getattr': _inner_class,
    'builtins list': _items,
    'builtins set': _items,
    'collections defaultdict': lambda _: {},
    'numpy dtype': _NumberType,
    'numpy ndarray': lambda _: None,
    'numpy.core.multiarray _reconstruct': lambda _: _Array(),
    'numpy.core.multiarray scalar': _scalar,
    **dict.fromkeys(
        (
            '__main__ CheckmateSolution',
            '__main__ Solution',
            'checkmate.checkmate_solver CheckmateSolution',
            'monet.cvxpy_solver Solution',
            'monet.graph ComputeNode',
            'monet.graph Param',
            'monet.solver_info BwdNode',
            'monet.solver_info FwdNode',
            'monet.solver_info IntNode',
            'monet.solver_info SolverInfo',
        ),
        _thing,
    ),
}
"""The 18 names that the zoo's files use, and what we make of them."""
