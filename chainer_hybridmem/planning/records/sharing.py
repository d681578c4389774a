"""One link to host memory, and several processes that copy over it."""

from __future__ import annotations

import dataclasses

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.records.profile import Link, Profile

MOST_RANKS = 1024


def check_ranks(ranks: int, name: str = 'ranks') -> int:
    """Returns a number of processes that can share a link.

    Args:
        ranks: Any value.
        name: What the user calls it.

    Raises:
        OptionError: If it is not a whole number from 1 to 1024.
    """
    whole = isinstance(ranks, int) and not isinstance(ranks, bool)
    if not whole or not 1 <= ranks <= MOST_RANKS:
        raise OptionError(
            f'{name} is {ranks!r}: the number of processes on one link is a whole '
            f'number from 1 to {MOST_RANKS}; 1 means that the link is not shared.'
        )
    return ranks


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that each of so many processes sends, and receives, to sum an array.

    Around a ring, each sends 2 (n - 1) / n of it: once to sum its part, once to hand it
    on (Patarasuk and Yuan: Bandwidth optimal all-reduce algorithms, 2009).

    Args:
        nbytes: Of the array that each of them has.
        ranks: How many take part.

    Raises:
        OptionError: If their number is out of range.
    """
    check_ranks(ranks, 'the number of processes')
    return 2 * (ranks - 1) * nbytes // ranks


def share_link(link: Link, ranks: int) -> Link:
    """The link as each of so many processes has it while all of them copy.

    What all have together is divided evenly: rates are bytes per second of one process,
    latencies are per copy and stay. A link that is shared already is divided anew:
    ``share_link(share_link(link, 2), 4)`` is ``share_link(link, 4)``, and 1 gives back
    what it carries for all. Shares of compute and of the other direction stay, too:
    they say what happens while a copy is under way, however fast it is.

    Args:
        link: Measured or modelled for ``link.ranks`` processes.
        ranks: Processes that copy over it at the same time.

    Raises:
        OptionError: If ``ranks`` is not a whole number from 1 to 1024.
    """
    share = link.ranks / check_ranks(ranks)
    return dataclasses.replace(
        link,
        d2h_bytes_per_second=link.d2h_bytes_per_second * share,
        h2d_bytes_per_second=link.h2d_bytes_per_second * share,
        ranks=ranks,
    )


def share_links(profile: Profile, ranks: int | None) -> Profile:
    """The profile of one of so many equal processes of a node.

    They share the link to host memory and, where there is one, the disk.

    Args:
        profile: Of one process; its links may be shared already.
        ranks: Processes; None leaves the profile as it is.

    Raises:
        OptionError: As :func:`share_link` does.
    """
    if ranks is None:
        return profile
    disk = profile.disk_link
    return dataclasses.replace(
        profile,
        link=share_link(profile.link, ranks),
        disk_link=None if disk is None else share_link(disk, ranks),
    )
