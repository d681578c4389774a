"""``optimize()``: trains a model inside a memory limit."""

from __future__ import annotations

from typing import Any

from chainer_hybridmem.chainer_access.models import Model
from chainer_hybridmem.session.session import Session
from chainer_hybridmem.session.setting.options import Options, documents_options


@documents_options
def optimize(
    model: Model,
    memory_limit: int | str,
    planner: str | None = None,
    **options: Any,
) -> Session:
    """Trains a model inside a memory limit.

    Args:
        model: The model that is trained; its parameters are counted. A list if
            several are trained together, as with a GAN.
        {options}

    Returns:
        Session: To be used in a ``with`` statement around the training loop.

    Raises:
        UnknownNameError: If there is no such planner or device.
        OptionError: If a value cannot be used, or an option is unknown.
    """
    return Session(model, Options.of(memory_limit, planner, options))
