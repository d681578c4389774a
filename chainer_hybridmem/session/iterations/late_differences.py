"""What a GPU finds out about replays after they have run."""

from __future__ import annotations

from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.errors import SessionError


def end_iteration(device: Device, iteration: int) -> None:
    """What a GPU has been asked to compare so far belongs to this iteration."""
    if device.late_checks is not None:
        device.late_checks.end_iteration(iteration)


def refuse(device: Device, wait: bool) -> None:
    """Tells what a GPU has found out about replays of earlier iterations.

    Args:
        device: Compares what replays make.
        wait: Whether comparisons under way are waited for.

    Raises:
        SessionError: If one of them has not made what it should.
    """
    checks = device.late_checks
    for iteration, what in () if checks is None else checks.differences(wait):
        raise SessionError(f'Numbers since iteration {iteration} are wrong. {what}')
