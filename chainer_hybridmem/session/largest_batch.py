"""``largest_batch()``: the largest batch of a live model inside a memory limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.chainer_access.models import Model
from chainer_hybridmem.errors import OptionError, SessionError
from chainer_hybridmem.estimation import (
    MOST_PICTURES,
    Estimator,
    SamplePair,
    load_device_model,
)
from chainer_hybridmem.planners import DEFAULT, check_name, check_options
from chainer_hybridmem.planners.largest import LargestBatch, find_largest_batch
from chainer_hybridmem.records.rules import check_rules
from chainer_hybridmem.records.splits import EXACT, Splitting
from chainer_hybridmem.search.largest import largest_batchsize
from chainer_hybridmem.session import session as sessions
from chainer_hybridmem.session.recording_session import record_step
from chainer_hybridmem.simulation import Problem, make_problem
from chainer_hybridmem.simulation.crossing import CrossIteration
from chainer_hybridmem.units import parse_bytes

SMALL, SMALL_IN_PARTS = (2, 4), (8, 16)
# Temporaries of NumPy that are reused from 256 KiB on, and times, are those of a large
# batch only in iterations that are not tiny.
LARGER_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Question:
    """What :func:`largest_batch` may be told beside the planner's own options.

    Attributes:
        batchsizes (tuple of int or None): What is recorded, ascending. None: 8 and 16,
            then a quarter and half of what fits in-core, if that takes at most 1 GiB;
            with ``gpu``, 2 and 4.
        min_speed (float or None): Least speed, as a share of that of the same batch
            without a limit.
        gpu (str or None): A device model to ask for instead of the model's device.
        cross_iteration: As in :func:`chainer_hybridmem.optimize`.
        splitting: As there.
        rules: As there.
        most (int): Not looked beyond, such as the examples there are.
    """

    batchsizes: tuple[int, int] | None = None
    min_speed: float | None = None
    gpu: str | None = None
    cross_iteration: CrossIteration = False
    splitting: Splitting = EXACT
    rules: Any = None
    most: int = MOST_PICTURES

    def __post_init__(self) -> None:
        if self.batchsizes is not None:
            first, second = self.batchsizes
            if not 0 < first < second:
                raise OptionError(
                    f'batchsizes are {first} and {second}; two ascending ones are '
                    f'needed.'
                )
        check_rules(self.rules)
        if self.min_speed is not None and not 0 < self.min_speed <= 1:
            raise OptionError(
                f'min_speed is {self.min_speed}; it is a share of the speed without a '
                f'limit, such as 0.8.'
            )
        if self.most < 2:
            raise OptionError(
                f'most is {self.most}; two batch sizes are recorded, so at least 2 is '
                f'needed.'
            )

    @property
    def first_sizes(self) -> tuple[int, int]:
        """The batch sizes to begin with."""
        if self.batchsizes is not None:
            return self.batchsizes
        small, large = SMALL_IN_PARTS if self.gpu is None else SMALL
        return (small, large) if large <= self.most else (self.most // 2, self.most)


def largest_batch(
    step: Callable[[int], Any],
    memory_limit: int | str,
    model: Model,
    planner: str = DEFAULT,
    **options: Any,
) -> LargestBatch:
    """Finds the largest batch with which a model trains inside a memory limit.

    Some iterations with two small batches are trained and recorded, and on the model's
    own device with two larger ones that surely fit. Every size is an affine function of
    the batch from then on, and the planner is asked about batch sizes until the answer
    has a plan and the next one has none. The model, its optimizer's states and NumPy's
    generator are put back; ``optimizer.t`` goes on.

    >>> step = lambda size: optimizer.update(model, x[:size], t[:size])
    >>> found = hybridmem.largest_batch(step, '8GiB', model)
    >>> found.batchsize, found.refusal.reason

    Args:
        step: Trains one iteration with as many examples as it is told: forward,
            backward, update.
        memory_limit: Bytes, or text such as ``'16GiB'``.
        model: What is trained; a list if several are.
        planner: Name of the planner.
        options: Those of :class:`Question`; others are the planner's.

    Returns:
        LargestBatch: The answer, its plan, and why one more example does not fit.

    Raises:
        UnknownNameError: If there is no such planner or device model.
        OptionError: If a value cannot be used.
        ProfileMismatchError: If the iterations of both batch sizes differ in more than
            sizes.
        SessionError: If a session is active, or nothing could be recorded.
    """
    limit_bytes = parse_bytes(memory_limit, 'memory_limit')
    names = {field.name for field in dataclasses.fields(Question)} & options.keys()
    question = Question(**{name: options.pop(name) for name in names})
    check_options(check_name(planner), options)
    estimator = _record(step, model, question, limit_bytes)

    def problem_of(batchsize: int) -> Problem:
        return make_problem(
            estimator.profile(batchsize),
            question.cross_iteration,
            splitting=question.splitting,
            rules=question.rules,
        )

    return find_largest_batch(
        problem_of, limit_bytes, question.most, planner, question.min_speed, **options
    )


def _record(
    step: Callable[[int], Any], model: Model, question: Question, limit_bytes: int
) -> Estimator:
    """What the iterations of other batch sizes are estimated from."""
    device = load_device_model(question.gpu) if question.gpu is not None else None
    if sessions.active_session() is not None:
        raise SessionError(
            'largest_batch records in sessions of its own; ask it before optimize() or '
            'after its with statement.'
        )

    def record(sizes: tuple[int, int]) -> Estimator:
        small, large = (record_step(step, model, b, device is None) for b in sizes)
        return Estimator.make(SamplePair.match(small, large, sizes), device)

    estimator = record(question.first_sizes)
    if device is None and question.batchsizes is None:
        larger = _larger_sizes(estimator, limit_bytes, question.most)
        if larger is not None:
            estimator = record(larger)
    return estimator


def _larger_sizes(
    estimator: Estimator, limit_bytes: int, most: int
) -> tuple[int, int] | None:
    """Two batch sizes that plain Chainer trains easily; None if those are small."""

    def in_core_bytes(batchsize: int) -> int:
        return make_problem(estimator.profile(batchsize)).in_core_peak_bytes

    size = min(
        largest_batchsize(in_core_bytes, limit_bytes, most) // 2,
        largest_batchsize(in_core_bytes, LARGER_BYTES, most),
    )
    size -= size % (64 if size >= 256 else 16)  # many numbers of parts are equal ones
    return (size // 2, size) if size > 2 * SMALL_IN_PARTS[1] else None
