"""Graphs of Kusumoto et al., as their repository ``pfnet-research/recompute`` has them.

Source: Kusumoto et al. 2019, *A Graph Theoretic Framework of Recomputation Algorithms
for Memory-Efficient Backpropagation*. A file has the variables of a Chainer network
with their bytes, and its functions, forward and backward, each with what it reads and
gives. What is counted:

- Parameters and inputs are there all the time; gradients of parameters stay, those of
  inputs are not made.
- The first function that gives a gradient makes it, further ones add to it in place.
- Every function can run again, as in the paper; nothing is known of workspaces.
- There are no times: each function takes its bytes over 1 TB/s, which says something
  about memory only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.lab.importing.graphs import (
    BYTES_PER_SECOND,
    MOST_NODES,
    Buffer,
    GraphNode,
    build_profile,
)
from chainer_hybridmem.planning.records.profile import Link, Profile

_INTERMEDIATE = '_'
_GRADIENT = 'gradient'


class _Function(NamedTuple):
    """One function: what it reads, with the role of each, and what it gives."""

    backward: bool
    reads: list[tuple[int, str]]
    gives: list[int]
    name: str
    rank: int


def read_graph(data: bytes, link: Link) -> Profile:
    """The network in a file.

    Args:
        data: The file.
        link: The path to host memory, of which it says nothing.

    Raises:
        FormatError: If it is no such graph.
    """
    with files.reading('graph'):
        lines = iter(data.decode().splitlines())
        n_variables, n_functions = _numbers(next(lines, ''), 2)
        if not 0 < max(n_variables, n_functions) <= MOST_NODES:
            raise FormatError(f'The graph has {n_functions} functions.')
        variables = [next(lines, '').split(maxsplit=2) for _ in range(n_variables)]
        sizes = {int(number): int(nbytes) for number, nbytes, _ in variables}
        names = {int(number): name for number, _, name in variables}
        functions = [_function(lines) for _ in range(n_functions)]
        return _profile(sizes, names, functions, link)


def _numbers(line: str, count: int) -> list[int]:
    numbers = [int(part) for part in line.split()]
    if len(numbers) != count:
        raise ValueError(f'{count} numbers are expected, found {line[:40]!r}')
    return numbers


def _function(lines: Iterator[str]) -> _Function:
    kind = next(lines, '')
    if kind not in ('forward', 'backward'):
        raise ValueError(f'a function is expected, found {kind[:40]!r}')
    n_reads, n_gives = _numbers(next(lines, ''), 2)
    reads = [next(lines, '').split() for _ in range(min(n_reads, MOST_NODES))]
    gives = [int(next(lines, '')) for _ in range(min(n_gives, MOST_NODES))]
    name, attributes = next(lines, ''), json.loads(next(lines, ''))
    return _Function(
        backward=kind == 'backward',
        reads=[(int(number), role) for number, role in reads],
        gives=gives,
        name=name.replace('/', '.'),
        rank=int(attributes['rank']),
    )


def _profile(
    sizes: dict[int, int],
    names: dict[int, str],
    functions: list[_Function],
    link: Link,
) -> Profile:
    """Variables are buffers in their order; behind them, their gradients."""
    place = {number: b for b, number in enumerate(sizes)}
    kept = {n for n, name in names.items() if name != _INTERMEDIATE}
    inputs = {n for n in kept if names[n].isdecimal()}
    buffers = [Buffer(nbytes) for nbytes in sizes.values()]
    buffers += [Buffer(nbytes, stays=n in kept) for n, nbytes in sizes.items()]
    # What Chainer's engine does: functions by rank, backward the other way round.
    ordered = sorted(
        functions, key=lambda f: (f.backward, -f.rank if f.backward else f.rank)
    )
    made: set[int] = set()
    nodes = []
    for number, function in enumerate(ordered):
        reads: dict[int, None] = {}
        for variable, role in function.reads:
            shift = len(sizes) if role == _GRADIENT else 0
            reads[place[variable] + shift] = None
        shift = len(sizes) if function.backward else 0
        gives = [
            place[v] + shift
            for v in dict.fromkeys(function.gives)
            if not (function.backward and v in inputs)
        ]
        reads.update(dict.fromkeys(b for b in gives if b in made))  # adds to them
        makes = [b for b in gives if b not in made]
        made.update(makes)
        touched = sum(buffers[b].nbytes for b in {*reads, *gives})
        nodes.append(
            GraphNode(
                label=f'/{number}/{function.name}',
                backward=function.backward,
                seconds=touched / BYTES_PER_SECOND,
                reads=tuple(reads),
                makes=tuple(makes),
            )
        )
    return build_profile(nodes, buffers, link, _device())


def _device() -> dict[str, Any]:
    return {
        'kind': 'import',
        'name': 'as dumped by Kusumoto et al.',
        'times': 'bytes touched',
    }
