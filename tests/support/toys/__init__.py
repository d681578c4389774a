"""Small hand-made profiles: the running example, graphs and networks, also random ones.

The running example is a chain of layers. Layer i makes feature map i from
feature map i - 1; its backward needs both. Gradients live for one step.
"""

from chainer_hybridmem.testing.networks import (
    MIB,
    Node,
    network,
    random_network,
    with_persistent,
)

from .additions import with_shares
from .graphs import chain, graph, random_graph

__all__ = [
    'MIB',
    'Node',
    'chain',
    'graph',
    'network',
    'random_graph',
    'random_network',
    'with_persistent',
    'with_shares',
]
