"""What a batch size needs on a device that is not here, from two tiny iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainer_hybridmem.chainer_access.models import Model
from chainer_hybridmem.estimation import Estimator, load_device_model
from chainer_hybridmem.session.recording_session import record_pair
from chainer_hybridmem.simulation import Problem, make_problem


def estimate_batch(
    step: Callable[[int], Any],
    model: Model,
    batchsize: int,
    gpu: str | None,
    batchsizes: tuple[int, int],
) -> Problem:
    """Records two small batches of a step and extrapolates them.

    Args:
        step: Trains one iteration with as many examples as it is told: forward,
            backward, update.
        model: What is trained; a list if several are.
        batchsize: Examples in the batch that is asked about.
        gpu: Device model; None for the model's device.
        batchsizes: What is recorded, ascending.

    Returns:
        Problem: One iteration of that batch size, for planners.

    Raises:
        UnknownNameError: If there is no such device model.
        OptionError: If the iterations do not depend on the batch size.
        ProfileMismatchError: If the iterations of both batch sizes differ in more than
            sizes.
        SessionError: If a session is active, or nothing could be recorded.
    """
    device = load_device_model(gpu) if gpu is not None else None
    here = device is None
    pair = record_pair(step, model, batchsizes, parts=here, timed=here)
    estimator = Estimator.make(pair, device)
    return make_problem(estimator.profile(batchsize))
