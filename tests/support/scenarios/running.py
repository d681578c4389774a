"""One run of a scenario, plain or under a session, and the digests it records."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Iterator
from typing import Any

import chainer_hybridmem as hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import numpy as np

from chainer_hybridmem.training.devices.host.device import HostDevice

UNLIMITED = 1 << 32


class Run:
    """One run of a program.

    Args:
        options: Of :func:`chainer_hybridmem.optimize`; None for plain Chainer.
        counted: Whether a plain run has its memory counted.

    Attributes:
        records (list): What was recorded, in order: digests by name.
        session (Session or None): The session.
        peak_bytes (int): Of a plain run that was counted.
    """

    def __init__(
        self, options: dict[str, Any] | None = None, counted: bool = False
    ) -> None:
        self.options = options
        self.counted = counted
        self.records: list[dict[str, str]] = []
        self.session: Any = None
        self.peak_bytes = 0

    @contextlib.contextmanager
    def training(self, model: chainer.Link) -> Iterator[None]:
        """Around the loop of a program."""
        if self.options is not None:
            with hybridmem.optimize(model, **self.options) as self.session:
                yield
        elif self.counted:
            device = HostDevice(UNLIMITED)
            device.memory.adopt(p.array for p in model.params() if p.array is not None)
            device.memory.install(lambda nbytes: None)
            try:
                yield
            finally:
                self.peak_bytes = device.memory.peak_bytes
                device.memory.uninstall()
                device.close()
        else:
            yield

    def record(self, *links: chainer.Link, **values: Any) -> None:
        """Records the digests of values, and of every array of the links."""
        contextvars.Context().run(self._record, links, values)  # not counted

    def _record(self, links: tuple[chainer.Link, ...], values: dict[str, Any]) -> None:
        digests = {name: digest(value) for name, value in values.items()}
        for i, link in enumerate(links):
            for path, parameter in link.namedparams():
                digests[f'{i}{path}'] = digest(parameter.array)
                gradient = parameter.grad if parameter.is_initialized else None
                digests[f'{i}{path}.grad'] = digest(gradient)
            for path, part in link.namedlinks():
                for name in part._persistent:
                    digests[f'{i}{path}.{name}'] = digest(part.__dict__[name])
        digests['random'] = digest(np.random.get_state()[1])
        self.records.append(digests)


def digest(value: Any) -> str:
    """Type, shape and bits of a Variable, array or number."""
    if isinstance(value, chainer.Variable):
        value = value.array
    if value is None:
        return 'None'
    array = np.asarray(value)
    bits = hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()
    return f'{array.dtype}{array.shape}:{bits}'
