"""Nodes: several GPUs, and how many of them share a link to host memory.

``device_models.json`` lists them. Links of a node are equal, and each belongs to the
same number of GPUs: those behind one PCIe switch, say, share its uplink.
"""

from __future__ import annotations

import dataclasses
import difflib

from chainer_hybridmem.errors import OptionError, UnknownNameError
from chainer_hybridmem.estimation.device_models import read_catalogue
from chainer_hybridmem.records.profile import Category, Profile
from chainer_hybridmem.records.sharing import check_ranks


@dataclasses.dataclass(frozen=True)
class Node:
    """A machine with several equal GPUs.

    Attributes:
        name (str): How it is called on the command line.
        title (str): For people.
        source (str): Where the figures come from.
        gpu (str): The device model of its GPUs.
        links (int): Links to host memory.
        gpus_per_link (int): GPUs that share each of them.
        nvlink (bool): Whether gradients have a path of their own from GPU to GPU.
    """

    name: str
    title: str
    source: str
    gpu: str
    links: int
    gpus_per_link: int
    nvlink: bool

    @property
    def gpus(self) -> int:
        """How many it has."""
        return self.links * self.gpus_per_link

    def ranks_on_link(self, gpus: int) -> int:
        """Processes on the busiest link, if so many GPUs are spread over the links.

        Raises:
            OptionError: If the node has not so many.
        """
        if gpus > self.gpus:
            raise OptionError(
                f'Node {self.name} has {self.gpus} GPUs, not {gpus}; ask for at most '
                f'{self.gpus}, or leave out --node for so many on one link.'
            )
        return -(-gpus // self.links)


def node_names() -> list[str]:
    """Names that :func:`load_node` knows."""
    return list(read_catalogue()['nodes'])


def load_node(name: str) -> Node:
    """Returns a node.

    Args:
        name: One of :func:`node_names`.

    Raises:
        UnknownNameError: If it is not.
    """
    nodes = read_catalogue()['nodes']
    if name not in nodes:
        close = difflib.get_close_matches(name.lower(), nodes, 1, 0.5)
        hint = f' Did you mean {close[0]!r}?' if close else ''
        raise UnknownNameError(
            f'There is no node {name!r}.{hint} Nodes: {", ".join(nodes)}. For GPUs on '
            'one link, give --ranks without --node.'
        )
    return Node(name=name, **nodes[name])


def parameter_bytes(profile: Profile) -> int:
    """Bytes of all parameters, and so of their gradients."""
    kinds = (Category.PARAMETER,)
    return sum(s.nbytes for s in profile.storages if s.category in kinds)


def all_reduce_bytes(profile: Profile, gpus: int) -> int:
    """Bytes that each GPU sends, and receives, to sum gradients around a ring.

    Each of n GPUs sends 2 (n - 1) / n of them: once to sum its part, once to hand it
    on (Patarasuk and Yuan: Bandwidth optimal all-reduce algorithms, 2009).

    Args:
        profile: One of the processes.
        gpus: How many take part.

    Raises:
        OptionError: If their number is out of range.
    """
    check_ranks(gpus, 'the number of GPUs')
    return 2 * (gpus - 1) * parameter_bytes(profile) // gpus


def all_reduce_seconds(profile: Profile, gpus: int) -> float:
    """The time in which these bytes cross the link; the slower direction counts.

    Args:
        profile: One of the processes, with the link as it has it while all copy.
        gpus: How many take part, on all links of the node.
    """
    link = profile.link
    rate = min(link.d2h_bytes_per_second, link.h2d_bytes_per_second)
    return all_reduce_bytes(profile, gpus) / rate


def with_all_reduce(profile: Profile, gpus: int) -> Profile:
    """The profile with the sum of gradients as a part of the update.

    It takes :func:`all_reduce_seconds`. Nothing else is assumed to be on the link then,
    and nothing of it to overlap with backward.

    Args:
        profile: One of the processes, with the link as it has it.
        gpus: How many take part, on all links of the node.
    """
    update = profile.operations[-1]
    seconds = update.device_seconds + all_reduce_seconds(profile, gpus)
    return dataclasses.replace(
        profile,
        operations=(
            *profile.operations[:-1],
            dataclasses.replace(update, device_seconds=seconds),
        ),
    )
