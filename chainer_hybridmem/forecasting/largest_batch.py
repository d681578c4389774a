"""``largest_batch()``: the largest batch of a live model inside a memory limit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.forecasting.batches import (
    LargestBatch,
    find_largest_batch,
    largest_batchsize,
)
from chainer_hybridmem.forecasting.estimation import (
    MOST_PICTURES,
    StepEstimator,
    check_ascending,
    load_device_model,
)
from chainer_hybridmem.forecasting.recording_session import (
    check_step,
    record_pairs,
    recording_options,
)
from chainer_hybridmem.planning.planners import DEFAULT, check_name, check_options
from chainer_hybridmem.planning.records.rules import check_rules
from chainer_hybridmem.planning.records.splits import EXACT, Splitting
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.planning.simulation.problem import CrossIteration
from chainer_hybridmem.training.chainer_access.models import Model, one_model
from chainer_hybridmem.training.devices.ram import total_ram
from chainer_hybridmem.training.session.setting.runtime import open_device_of
from chainer_hybridmem.units import parse_limit

SMALL = (2, 4)
MIDDLE = 16
# Temporaries of NumPy that are reused from 256 KiB on, and times, are those of a large
# batch only in iterations that are not tiny.
LARGER_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Question:
    """What :func:`largest_batch` may be told beside the planner's own options.

    Attributes:
        batchsizes (tuple of int or None): What is recorded, ascending. None: 2 and 4,
            and without ``gpu`` then a quarter and half of what fits in-core, as far as
            that takes at most 1 GiB, or up to 8 and 16 if that is small.
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
            check_ascending(self.batchsizes)
        check_rules(self.rules)
        if self.min_speed is not None and not _is_share(self.min_speed):
            raise OptionError(
                f'min_speed is {self.min_speed!r}; it is a share of the speed without '
                f'a limit, such as 0.8.'
            )
        if not isinstance(self.most, int) or self.most < 2:
            raise OptionError(
                f'most is {self.most!r}; two batch sizes are recorded, so at least 2 '
                f'is needed.'
            )


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value <= 1


def largest_batch(
    step: Callable[[int], Any],
    memory_limit: int | str | None = None,
    model: Model | None = None,
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
    >>> found = hybridmem.largest_batch(step, '8GiB', model, most=len(x))
    >>> found.batchsize, found.refusal

    Args:
        step: Trains one iteration with as many examples as it is told: forward,
            backward, update. Of several iterations in a step, as of a GAN, the one
            counts that needs most.
        memory_limit: Bytes, or text such as ``'16GiB'``. None: all the memory of
            ``gpu`` or, without it, of the model's device: on a CPU, the RAM of this
            machine or, in a container, what that may have.
        model: What is trained; a list if several are. It has to be given.
        planner: Name of the planner.
        options: ``min_speed``, the least speed as a share of that of the same batch
            without a limit, such as 0.8; ``gpu``, a device model to ask for instead of
            the model's device; ``batchsizes``, the two to record; ``most``, where the
            search ends; ``rules``, ``splitting`` and ``cross_iteration`` as in
            :func:`chainer_hybridmem.optimize`. Others are the planner's.

    Returns:
        LargestBatch: The answer, its plan, and why one more example does not fit.

    Raises:
        UnknownNameError: If there is no such planner or device model.
        OptionError: If a value cannot be used.
        ProfileMismatchError: If the iterations of both batch sizes differ in more than
            sizes.
        SessionError: If a session is active, or nothing could be recorded.
    """
    names = {field.name for field in dataclasses.fields(Question)} & options.keys()
    question = Question(**{name: options.pop(name) for name in names})
    check_options(check_name(planner), options)
    check_step(step, model)
    limit_bytes = _limit_of(memory_limit, model, question.gpu)
    estimator = _record(step, model, question, limit_bytes)

    def problem_of(batchsize: int) -> Problem:
        return make_problem(
            estimator.profile(batchsize),
            question.cross_iteration,
            splitting=question.splitting,
            rules=question.rules,
        )

    return find_largest_batch(
        problem_of,
        limit_bytes,
        question.most,
        planner,
        question.min_speed,
        _find_spare(model, question.gpu, limit_bytes),
        **options,
    )


def _find_spare(model: Model, gpu: str | None, limit_bytes: int) -> int:
    """Bytes that plans of a session on the model's device leave of the limit.

    cuDNN chooses algorithms by the batch: what is recorded with a small one does not
    tell the workspace of a large one, but it is never larger than Chainer allows.
    """
    if gpu is not None:
        return 0
    device = open_device_of(one_model(model), recording_options(limit_bytes))
    with contextlib.closing(device):
        spare_bytes = device.offsets.spare_bytes
    if device.kind == 'cuda' and chainer.should_use_cudnn('>=auto'):
        spare_bytes += cuda.get_max_workspace_size()
    return spare_bytes


def _limit_of(memory_limit: int | str | None, model: Model, gpu: str | None) -> int:
    """The limit in bytes; all there is if none is given."""
    if memory_limit is not None:
        return parse_limit(memory_limit)
    if gpu is not None:
        return load_device_model(gpu).memory_bytes
    if one_model(model).xp is np:
        return total_ram()
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[1])


def _record(
    step: Callable[[int], Any], model: Model, question: Question, limit_bytes: int
) -> StepEstimator:
    """What the iterations of other batch sizes are estimated from."""
    device = load_device_model(question.gpu) if question.gpu is not None else None

    def record(sizes: tuple[int, int], parts: bool) -> StepEstimator:
        pairs = record_pairs(step, model, sizes, parts, timed=device is None)
        return StepEstimator.make(pairs, device)

    if question.batchsizes is not None:
        return record(question.batchsizes, parts=device is None)
    if question.most < SMALL[1]:
        return record((question.most // 2, question.most), parts=device is None)
    estimator = record(SMALL, parts=False)
    if device is not None:
        return estimator
    return record(_larger_sizes(estimator, limit_bytes, question.most), parts=True)


def _larger_sizes(
    estimator: StepEstimator, limit_bytes: int, most: int
) -> tuple[int, int]:
    """Two batch sizes that plain Chainer trains easily, in many equal parts."""

    def in_core_bytes(batchsize: int) -> int:
        return make_problem(estimator.profile(batchsize)).in_core_peak_bytes

    in_core = largest_batchsize(in_core_bytes, limit_bytes, most)
    size = min(in_core // 2, largest_batchsize(in_core_bytes, LARGER_BYTES, most))
    size -= size % (64 if size >= 256 else 16)
    if size <= 2 * MIDDLE:
        size = MIDDLE
        while size > min(in_core, most) and size > SMALL[1]:
            size //= 2
    return size // 2, size
