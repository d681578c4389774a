"""The device that a session opens for its model."""

from __future__ import annotations

import chainer

from chainer_hybridmem.devices import open_device, parse_device
from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.session.setting.options import Options


def open_device_of(model: chainer.Link, options: Options) -> Device:
    """Opens the device that the model is on.

    Args:
        model: Is trained there.
        options: Say which device is meant, and with which limits.

    Raises:
        OptionError: If the model is on another one.
        UnknownNameError: If there is no such device.
    """
    return open_device(
        _name_device(model, options.device),
        options.limit_bytes,
        options.link_bandwidth,
        options.swap_dir,
        options.host_limit_bytes,
        options.disk_bandwidth,
        options.shared_link,
    )


def _name_device(model: chainer.Link, device: str | None) -> str:
    """The device to open; the model must be on it already."""
    on_gpu = isinstance(model.device, chainer.backend.GpuDevice)
    if device is None or device == 'auto':
        return f'cuda:{model.device.device.id}' if on_gpu else 'cpu'
    kind, number = parse_device(device)
    same = kind == ('cuda' if on_gpu else 'host')
    if same and number is not None:
        same = number == model.device.device.id
    if not same:
        raise OptionError(
            f'device is {device!r} but the model is on {model.device}; move one of '
            f'them, for example with model.to_device.'
        )
    return f'cuda:{model.device.device.id}' if on_gpu else 'cpu'
