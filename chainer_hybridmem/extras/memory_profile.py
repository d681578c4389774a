"""``profile_memory()``: the four series of a memory pool for any Chainer run."""

from __future__ import annotations

import chainer

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.extras.memory_pools import CupyPool, DevicePool, NumpyPool
from chainer_hybridmem.extras.memory_series import SHARE, MeasuredPool, MemoryProfiler
from chainer_hybridmem.training.chainer_access import owners
from chainer_hybridmem.training.chainer_access.models import name_device
from chainer_hybridmem.training.devices import parse_device
from chainer_hybridmem.training.session import session as sessions

CAPACITY = 1 << 15  # samples of 56 bytes


def profile_memory(
    model: chainer.Link | None = None,
    device: str | None = None,
    capacity: int = CAPACITY,
    share: float = SHARE,
) -> MemoryProfiler:
    """Watches the memory pool of a Chainer run, planned or not.

    >>> with hybridmem.profile_memory(model) as memory:
    ...     trainer.run()
    >>> memory.summary(), memory.series()

    Inside a session the session's pool is watched; enter the session first. Without
    one on the CPU, where NumPy has no pool, the one of the host device serves NumPy for
    the time, without a limit. On a GPU CuPy's pool is watched.

    Args:
        model: Its arrays count from the start (CPU); says the device.
        device: ``'cpu'`` or ``'cuda'``; by default the session's or the model's.
        capacity: Most samples kept; a longer run is sampled more coarsely.
        share: Most of the time that sampling may take, from 0 to 1; 0 samples every
            operation, whatever it takes.

    Returns:
        MemoryProfiler: To be used in a ``with`` statement.

    Raises:
        OptionError: If an option cannot be used.
        SessionError: When entered, if NumPy's memory is watched already.
    """
    if model is not None and not isinstance(model, chainer.Link):
        raise OptionError(
            f'model is a {type(model).__name__}; a chainer.Link is needed.'
        )
    if device is not None:
        parse_device(device)
    if not (isinstance(share, (int, float)) and 0 <= share <= 1):
        raise OptionError(
            f'share is {share!r}; it is a share of the time, from 0 to 1.'
        )
    return MemoryProfiler(lambda: _find_pool(model, device), capacity, share)


def _find_pool(model: chainer.Link | None, device: str | None) -> MeasuredPool:
    session = sessions.active_session()
    if session is not None:
        return DevicePool(session.device)
    if device is None:
        device = 'cpu' if model is None else name_device(model)
    if parse_device(device)[0] == 'cuda':
        from chainer_hybridmem.training.devices.cuda.gpu import import_cupy

        return CupyPool(import_cupy())
    if model is None:
        return NumpyPool([])
    owners.bring_home(model)
    return NumpyPool(owners.model_arrays(model))
