"""The marker ``fits``: what it says, and whether it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.extras.memory_tests.measured_peak import describe_bytes
from chainer_hybridmem.units import format_bytes, parse_limit

if TYPE_CHECKING:
    from chainer_hybridmem.planning.records.peak import Peak
    from chainer_hybridmem.planning.simulation import Problem


@dataclasses.dataclass(frozen=True)
class Fits:
    """What the marker says.

    Attributes:
        memory_limit (int or str): Most bytes; None for the memory of ``gpu``.
        gpu (str or None): Device model that the training is estimated for; None for
            what runs here.
        batchsize (int or None): Examples in a batch there; None measures the test.
        planner (str or None): A plan of this planner must fit; None: plain Chainer.
        batchsizes (tuple of int): The two small ones that are recorded; by default 2
            and 4, with a planner 8 and 16: it plans no map that is tiny there.

    Raises:
        OptionError: If something is missing or cannot be used.
        UnknownNameError: If there is no such device model or planner.
        FormatError: If ``gpu`` is a file that is no device model.
    """

    memory_limit: int | str | None = None
    gpu: str | None = None
    batchsize: int | None = None
    planner: str | None = None
    batchsizes: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.memory_limit is None and self.gpu is None:
            raise OptionError("fits needs a memory limit, such as fits('16GiB').")
        if self.batchsize is None and (self.gpu or self.planner):
            asked = f'gpu={self.gpu!r}' if self.gpu else f'planner={self.planner!r}'
            raise OptionError(
                f'fits with {asked} is an estimate and needs a batchsize, such as '
                f'fits(..., {asked}, batchsize=64).'
            )
        if self.batchsize is None and self.batchsizes is not None:
            raise OptionError(
                f'fits with batchsizes={self.batchsizes!r} says what an estimate '
                f'records; it needs a batchsize, too, such as fits(..., batchsize=64).'
            )
        self._check_values()

    def _check_values(self) -> None:
        """Refuses what would only be refused once the training has been recorded."""
        from chainer_hybridmem.forecasting.estimation import (
            check_ascending,
            check_batchsize,
        )

        if self.batchsize is not None:
            check_batchsize(self.batchsize)
        check_ascending(self.recorded)
        if self.gpu is not None:
            _check_gpu(self.gpu)
        if self.planner is not None:
            _check_planner(self.planner)
        assert self.limit_bytes > 0

    @property
    def estimated(self) -> bool:
        """Whether the test hands its training over instead of being measured."""
        return self.batchsize is not None

    @property
    def recorded(self) -> tuple[int, int]:
        """Batch sizes that are recorded."""
        if self.batchsizes is not None:
            return self.batchsizes
        return (2, 4) if self.planner is None else (8, 16)

    @property
    def limit_bytes(self) -> int:
        """Most bytes.

        Raises:
            OptionError: If the limit cannot be read.
            UnknownNameError: If it is that of an unknown device model.
        """
        if self.memory_limit is not None:
            return parse_limit(self.memory_limit, 'the limit of fits')
        from chainer_hybridmem.forecasting.estimation import load_device_model

        assert self.gpu is not None
        return load_device_model(self.gpu).memory_bytes

    def check(self, peak: Peak) -> str | None:
        """Why what has been measured does not fit; None if it does."""
        if peak.nbytes <= self.limit_bytes:
            return None
        more = format_bytes(peak.nbytes - self.limit_bytes)
        return '\n'.join(
            [
                f'The peak is {describe_bytes(peak.nbytes)}, {more} more than '
                f'{self.memory_limit}. What it is made of:',
                *peak.describe(),
            ]
        )

    def estimate(self, step: Callable[[int], Any], model: Any) -> Problem:
        """Records two small batches; see :func:`.batch_estimate.estimate`."""
        from chainer_hybridmem.training.chainer_access import compat

        compat.import_chainer()
        from chainer_hybridmem.forecasting.batch_estimate import estimate

        assert self.batchsize is not None
        found = estimate(step, self.batchsize, model, self.gpu, self.recorded)
        return found.problem

    def check_estimate(self, problem: Problem) -> str | None:
        """Why an estimated iteration does not fit; None if it does."""
        where = f'on {self.gpu}' if self.gpu else 'here'
        if self.planner is not None:
            from chainer_hybridmem.planning.planners import make_plan

            try:
                make_plan(problem, self.limit_bytes, self.planner)
            except InfeasibleError as error:
                return f'Batch size {self.batchsize} {where}: {error}'
            return None
        from chainer_hybridmem.planning.simulation.in_core import in_core_peak

        needed = problem.in_core_peak_bytes
        if needed <= self.limit_bytes:
            return None
        more = format_bytes(needed - self.limit_bytes)
        return '\n'.join(
            [
                f'Batch size {self.batchsize} needs {describe_bytes(needed)} {where} '
                f'without a plan, {more} more than '
                f'{self.memory_limit or format_bytes(self.limit_bytes)}. '
                f'What it is made of:',
                *in_core_peak(problem.profile).describe(),
            ]
        )


def _check_gpu(name: Any) -> None:
    from chainer_hybridmem.forecasting.estimation import load_device_model, model_names

    if not isinstance(name, str):
        raise OptionError(
            f'gpu is {name!r}; the name of a device model is needed: '
            f'{", ".join(model_names())}, or a JSON file of your own.'
        )
    load_device_model(name)


def _check_planner(name: Any) -> None:
    from chainer_hybridmem.planning.planners import check_name, needs_options

    if needs_options(check_name(name)):
        raise OptionError(
            f'Planner {name} does nothing without options, and fits hands none over; '
            f'name another planner.'
        )
