"""The devices a session can run on, behind one protocol."""

from __future__ import annotations

import re
from typing import Any

from chainer_hybridmem.errors import OptionError, UnknownNameError
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.devices.link import LEAST_ROOM_BYTES
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.devices.ram import available_ram
from chainer_hybridmem.units import parse_bytes

_HOST_NAMES = ('cpu', 'host', '@numpy')
_CUDA_PATTERN = re.compile(r'(?:@cupy|cuda|gpu)(?::(\d+))?|(\d+)')


def parse_device(spec: str | int | None) -> tuple[str, int | None]:
    """Kind and number of a device by name.

    Args:
        spec: ``'cpu'``, ``'host'``, ``'@numpy'`` or None for NumPy; ``'cuda'``,
            ``'cuda:1'``, ``'@cupy:1'`` or ``'1'`` for CUDA.

    Returns:
        tuple: ``'host'`` or ``'cuda'``, and the GPU's number or None.

    Raises:
        UnknownNameError: If no device has this name.
    """
    name = 'host' if spec is None else str(spec).strip().lower()
    if name in _HOST_NAMES:
        return 'host', None
    match = _CUDA_PATTERN.fullmatch(name)
    if match is None:
        raise UnknownNameError(
            f"device {spec!r} is not known; use 'cpu' for NumPy, 'cuda' for the "
            "current GPU, or 'cuda:N' for GPU number N."
        )
    number = match.group(1) or match.group(2)
    return 'cuda', None if number is None else int(number)


def open_device(
    spec: str | int | None,
    limit_bytes: int,
    **options: Any,
) -> Device:
    """Opens a device by name.

    Args:
        spec: As in :func:`parse_device`.
        limit_bytes: Most bytes that may be in use.
        options: Of :class:`.host.device.HostDevice`; what another device cannot do
            must be None there.

    Raises:
        UnknownNameError: If no device has this name.
        OptionError: If it cannot do what the others say.
    """
    kind, device_id = parse_device(spec)
    if kind == 'host':
        return HostDevice(limit_bytes, **options)
    # CuPy is looked for only here: most machines that plan have none.
    from chainer_hybridmem.training.devices.cuda.device import CudaDevice

    return CudaDevice(limit_bytes, device_id, **options)


def measure_free(spec: str | int | None) -> tuple[int, int]:
    """What a device has left, and what CuPy's own pool holds of it.

    Args:
        spec: As in :func:`parse_device`.

    Returns:
        tuple of int: Bytes; the second ones are in use. On the host they are 0.

    Raises:
        UnknownNameError: If no device has this name.
        OptionError: If it does not tell.
    """
    kind, number = parse_device(spec)
    if kind == 'host':
        room_bytes = available_ram()
        if room_bytes is None:
            raise OptionError('This machine does not tell how much RAM is free.')
        return room_bytes, 0
    from chainer_hybridmem.training.devices.cuda.gpu import Gpu

    return Gpu(number).measure_free()


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
