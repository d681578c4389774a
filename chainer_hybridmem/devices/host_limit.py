"""The option ``host_limit``: most bytes of RAM for copies of what is swapped."""

from __future__ import annotations

from chainer_hybridmem.devices.link import LEAST_ROOM_BYTES
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.units import parse_bytes


def host_limit_bytes(host_limit: int | str | None, swap_dir: str | None) -> int | None:
    """The limit in bytes; None is no limit.

    Args:
        host_limit: As :func:`chainer_hybridmem.optimize` has it.
        swap_dir: Likewise. With it alone, everything goes there.

    Raises:
        OptionError: If it cannot be read, or if nothing could be swapped under it.
    """
    if host_limit is None:
        return None if swap_dir is None else 0
    nbytes = parse_bytes(host_limit, 'host_limit', least=0)
    if swap_dir is None and nbytes < LEAST_ROOM_BYTES:
        raise OptionError(
            f'host_limit is {host_limit!r} and there is no swap_dir, so that nothing '
            f'could be swapped; give swap_dir a folder on a disk, or host_limit at '
            f'least {LEAST_ROOM_BYTES} bytes.'
        )
    return nbytes
