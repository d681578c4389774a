"""Small hand-made profiles: the running example, graphs and networks, also random ones.

The running example is a chain of layers. Layer i makes feature map i from
feature map i - 1; its backward needs both. Gradients live for one step.
"""

from .additions import with_persistent, with_shares
from .graphs import MIB, chain, graph, random_graph
from .networks import Node, network, random_network

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
