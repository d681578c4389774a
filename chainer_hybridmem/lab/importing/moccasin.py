"""Checkmate's own networks as JSON, from the repository of MOCCASIN.

Source: Bartan et al. 2023, *MOCCASIN: Efficient Tensor Rematerialization for Neural
Networks* (github.com/haoming-codes/moccasin, ``data/*_train_nx.json``). A file has
nodes in the order in which they run, as networkx writes a graph, and the bytes and the
time of each. What is counted is what :mod:`.checkmate` counts, and:

- Nothing is there all the time but what operations have made.
- The loss runs in forward.
- Sizes are rounded up to whole KiB. Nothing says what a unit of time is, and in one
  file these are operations: each is taken as 10 µs, so that shares of a sum count only.
"""

from __future__ import annotations

from chainer_hybridmem import files
from chainer_hybridmem.lab.importing.checkmate import KIB, TrainingGraph, check_graph
from chainer_hybridmem.lab.importing.reading import parse_json


def read_graph(data: bytes) -> TrainingGraph:
    """The graph in a file.

    Raises:
        FormatError: If it is no such file.
    """
    body = parse_json(data)
    with files.reading('graph'):
        nodes = body['nodes']
        place = {str(node['name']): i for i, node in enumerate(nodes)}
        reads: dict[int, dict[int, None]] = {i: {} for i in place.values()}
        if [node['id'] for node in nodes] != list(reads):
            raise ValueError('nodes are not numbered in order, by different names')
        for link in body['links']:
            reads[link['target']][int(link['source'])] = None
        graph = TrainingGraph(
            kib=tuple(-(-int(node['cost_ram']) // KIB) for node in nodes),
            units=tuple(int(node['cost_cpu']) for node in nodes),
            reads=tuple(map(tuple, reads.values())),
            labels=tuple(f'/{i}/{name}' for name, i in place.items()),
            forward=tuple(
                place[forward] if last == 'backward' else -1
                for forward, _, last in (name.rpartition('_') for name in place)
            ),
            fixed_kib=0,
        )
    check_graph(graph)
    return graph
