"""Nodes: several GPUs, and how many of them share a link to host memory.

``device_models.json`` lists them. Links of a node are equal, and each belongs to the
same number of GPUs: those behind one PCIe switch, say, share its uplink.
"""

from __future__ import annotations

import dataclasses

from chainer_hybridmem.errors import OptionError, UnknownNameError, nearest
from chainer_hybridmem.forecasting.estimation.device_models import read_catalogue
from chainer_hybridmem.planning.records.profile import Category, Phase, Profile, Storage
from chainer_hybridmem.planning.records.sharing import ring_bytes


@dataclasses.dataclass(frozen=True)
class GpuNode:
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


def load_node(name: str) -> GpuNode:
    """Returns a node.

    Args:
        name: One of :func:`node_names`.

    Raises:
        UnknownNameError: If it is not.
    """
    nodes = read_catalogue()['nodes']
    if name not in nodes:
        hint = nearest(name.lower(), nodes, 0.5)
        raise UnknownNameError(
            f'There is no node {name!r}.{hint} Nodes: {", ".join(nodes)}. For GPUs on '
            'one link, give --ranks without --node.'
        )
    return GpuNode(name=name, **nodes[name])


def parameter_bytes(profile: Profile) -> int:
    """Bytes of all parameters, and so of their gradients."""
    kinds = (Category.PARAMETER,)
    return sum(s.nbytes for s in profile.storages if s.category in kinds)


def all_reduce_bytes(profile: Profile, gpus: int) -> int:
    """Bytes that each GPU sends, and receives, to sum gradients around a ring.

    Args:
        profile: One of the processes.
        gpus: How many take part.

    Raises:
        OptionError: If their number is out of range.
    """
    return ring_bytes(parameter_bytes(profile), gpus)


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
    """The profile with a sum of gradients over GPUs between backward and the update.

    It takes :func:`all_reduce_seconds`. Nothing else is on the link then, and nothing
    of it overlaps with backward.

    Args:
        profile: One of the processes, with the link as it has it. An all-reduce that it
            has is replaced.
        gpus: How many take part, on all links of the node.
    """
    if not any(op.phase is Phase.ALL_REDUCE for op in profile.operations):
        profile = _insert_all_reduce(profile)
    seconds = all_reduce_seconds(profile, gpus)
    nbytes = all_reduce_bytes(profile, gpus)
    operations = tuple(
        dataclasses.replace(op, device_seconds=seconds, exchanged_bytes=nbytes)
        if op.phase is Phase.ALL_REDUCE
        else op
        for op in profile.operations
    )
    return dataclasses.replace(profile, operations=operations)


def _insert_all_reduce(profile: Profile) -> Profile:
    """One that takes no time, before the update."""
    *before, update = profile.operations
    all_reduce = dataclasses.replace(
        update,
        label='all-reduce',
        phase=Phase.ALL_REDUCE,
        device_seconds=0.0,
        host_seconds=0.0,
        reads=(),
        writes=(),
        workspace_bytes=0,
        specs=(),
    )
    n = update.index
    return dataclasses.replace(
        profile,
        operations=(*before, all_reduce, dataclasses.replace(update, index=n + 1)),
        storages=tuple(_moved_behind(storage, n) for storage in profile.storages),
    )


def _moved_behind(storage: Storage, n: int) -> Storage:
    """The storage of a profile whose operation n comes one later."""
    later = {k if k < n else k + 1 for k in storage.backward_uses}
    if storage.persistent and n in storage.backward_uses:
        later.add(n)  # it has to be there before
    released = storage.releasable_from
    return dataclasses.replace(
        storage,
        producer=n + 1 if storage.producer == n else storage.producer,
        backward_uses=tuple(sorted(later)),
        releasable_from=released + 1 if released > n else released,
    )
