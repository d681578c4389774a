"""``estimate()``: what a batch size needs, also on a device that is not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.forecasting.estimation import (
    StepEstimator,
    check_ascending,
    check_batchsize,
    load_device_model,
)
from chainer_hybridmem.forecasting.recording_session import check_step, record_pairs
from chainer_hybridmem.planning.planners import DEFAULT, make_plan
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.training.chainer_access.models import Model


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What :func:`estimate` has found out about a batch size.

    Attributes:
        batchsize (int): Examples.
        iterations (int): Of a step; if there are several, as with a GAN, the figures
            are those of the one that needs most.
        problem (Problem): That iteration, for planners.
        older_bytes (int): What plain Chainer has beside it where a step needs most:
            maps of earlier iterations whose losses the program holds, say.
    """

    batchsize: int
    iterations: int
    problem: Problem = dataclasses.field(repr=False)
    older_bytes: int = 0

    @property
    def profile(self) -> Profile:
        """The iteration; :func:`.save` writes it for the commands."""
        return self.problem.profile

    @property
    def in_core_peak_bytes(self) -> int:
        """What plain Chainer needs."""
        return self.problem.whole_bytes + self.older_bytes

    @property
    def least_memory_bytes(self) -> int:
        """No plan needs less."""
        return least_memory(self.problem)[0]

    @property
    def in_core_seconds(self) -> float:
        """Of the iteration, without a limit."""
        return self.problem.in_core_seconds

    def plan(
        self, memory_limit: int | str, planner: str = DEFAULT, **options: Any
    ) -> Plan:
        """A plan, as :func:`.make_plan` makes it.

        Raises:
            InfeasibleError: If the planner finds none inside the limit.
        """
        return make_plan(self.problem, memory_limit, planner, **options)


def estimate(
    step: Callable[[int], Any],
    batchsize: int,
    model: Model | None = None,
    gpu: str | None = None,
    batchsizes: tuple[int, int] = (2, 4),
) -> Estimate:
    """Predicts memory and time of a batch size from two small ones.

    The model, its optimizer's states and NumPy's generator are put back.

    >>> step = lambda size: optimizer.update(model, x[:size], t[:size])
    >>> found = hybridmem.estimate(step, 640, model, gpu='v100-16gb-pcie3')
    >>> found.in_core_peak_bytes, found.plan('16GB').overhead

    Args:
        step: As for :func:`.largest_batch`.
        batchsize: Examples in the batch that is asked about.
        model: What is trained; a list if several are. It has to be given.
        gpu: Device model; None for the model's device.
        batchsizes: What is recorded, ascending. Without ``gpu``, times are better
            where they are not tiny.

    Raises:
        UnknownNameError: If there is no such device model.
        OptionError: If a value cannot be used, or the iterations do not depend on the
            batch size.
        ProfileMismatchError: If the iterations of both batch sizes differ in more than
            sizes.
        SessionError: If a session is active, or nothing could be recorded.
    """
    check_batchsize(batchsize)
    sizes = check_ascending(batchsizes)
    device = load_device_model(gpu) if gpu is not None else None
    check_step(step, model)
    here = device is None
    pairs = record_pairs(step, model, sizes, parts=here, timed=here)
    estimator = StepEstimator.make(pairs, device)
    problem = make_problem(estimator.profile(batchsize))
    older_bytes = estimator.older_bytes(batchsize)
    return Estimate(batchsize, sum(estimator.counts), problem, older_bytes)
