"""From two small samples to a profile at any batch size on any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.forecasting.estimation.affine import SamplePair
from chainer_hybridmem.forecasting.estimation.costs import (
    PASS,
    WHOLE,
    time_model,
    with_cuda_passes,
    with_whole_forwards,
)
from chainer_hybridmem.forecasting.estimation.device_models import (
    CONVOLUTIONS,
    DeviceModel,
)
from chainer_hybridmem.forecasting.estimation.lowering import lower_to_cudnn
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.sharing import share_links

KIND = 'estimate'
MOST_PICTURES = 2**24


def check_batchsize(batchsize: int) -> None:
    """Refuses what no estimate can be made for.

    Raises:
        OptionError: If the batch size is out of range.
    """
    whole = isinstance(batchsize, int) and not isinstance(batchsize, bool)
    if not whole or not 0 < batchsize <= MOST_PICTURES:
        raise OptionError(
            f'Batch size {batchsize!r} is out of range: a whole number from 1 to '
            f'{MOST_PICTURES} is needed.'
        )


def choose_convolution(model: DeviceModel | None, convolution: str | None) -> str:
    """How a device convolves, where it is not said.

    Args:
        model: The device; None for that of the recording.
        convolution: As in :meth:`Estimator.make`.

    Raises:
        OptionError: If there is no such way to convolve, or no model that could tell
            times other than the recorded ones.
    """
    if convolution is None:
        convolution = 'im2col' if model is None else model.convolution
    if convolution not in CONVOLUTIONS:
        raise OptionError(
            f'convolution is {convolution!r}; it must be one of '
            f'{", ".join(CONVOLUTIONS)}.'
        )
    if model is None and convolution != 'im2col':
        raise OptionError(
            f'convolution {convolution!r} needs a device model: the recorded '
            f'times are those of the recorded functions. Name a model (--gpu).'
        )
    return convolution


@dataclasses.dataclass(frozen=True)
class Estimator:
    """Makes profiles of batch sizes and devices that were not recorded.

    Attributes:
        samples (SamplePair): Two recorded iterations.
        model (DeviceModel or None): Where times and link come from; None for the
            device of the recording.
        convolution (str): ``'cudnn'`` or ``'im2col'``, which keeps the recorded
            events. Without a model nothing is changed whatever it says.
        recompute (str): ``'pass'``: what the recording has made again in one pass is
            one kernel; ``'whole'``: replays run whole forwards, as on a GPU whose cuDNN
            rounds in a way that no kernel does.
            Without a model recipes are as recorded whatever it says.
        factor (float): All compute times are multiplied by it.
        calibration (dict or None): What ``factor`` comes from.
        ranks (int or None): Processes that share the link; None for as many as the
            model or the recording has.
    """

    samples: SamplePair
    model: DeviceModel | None = None
    convolution: str = 'im2col'
    recompute: str = PASS
    factor: float = 1.0
    calibration: dict[str, Any] | None = None
    ranks: int | None = None

    @classmethod
    def make(
        cls,
        samples: SamplePair,
        model: DeviceModel | None = None,
        convolution: str | None = None,
    ) -> Estimator:
        """Makes an estimator.

        Args:
            samples: Two recorded iterations.
            model: The device; None for that of the recording.
            convolution: ``'cudnn'`` or ``'im2col'``; None for the model's.

        Raises:
            OptionError: As :func:`choose_convolution` does.
        """
        return cls(samples, model, choose_convolution(model, convolution))

    def calibrated(self, images_per_second: float, batchsize: int) -> Estimator:
        """An estimator whose in-core speed at one batch size is a measured one.

        Args:
            images_per_second: Measured while everything fitted.
            batchsize: The batch size it was measured with.

        Raises:
            OptionError: If a value is not above zero.
        """
        if not 0 < images_per_second < float('inf') or batchsize < 1:
            raise OptionError(
                f'Calibration needs images per second and a batch size above zero, '
                f'got {images_per_second} and {batchsize}.'
            )
        plain = dataclasses.replace(self, factor=1.0, calibration=None)
        seconds = plain.profile(batchsize).compute_seconds
        if seconds <= 0:
            raise OptionError(
                'Calibration is not possible: the estimated iteration takes no time.'
            )
        return dataclasses.replace(
            self,
            factor=batchsize / images_per_second / seconds,
            calibration={
                'images_per_second': float(images_per_second),
                'batchsize': batchsize,
            },
        )

    def with_factor_of(self, other: Estimator) -> Estimator:
        """An estimator with another one's calibration, of another network, say."""
        return dataclasses.replace(
            self, factor=other.factor, calibration=other.calibration
        )

    def profile(self, batchsize: int) -> Profile:
        """The estimated profile of one iteration.

        Args:
            batchsize: Examples in the batch.

        Raises:
            OptionError: If the batch size is out of range.
        """
        check_batchsize(batchsize)
        profile = self.samples.at(batchsize)
        if self.model is not None:
            whole = self.recompute == WHOLE
            profile = (with_whole_forwards if whole else with_cuda_passes)(profile)
            im2col = self.convolution == 'im2col'
            if not im2col:
                profile = lower_to_cudnn(profile, self.model.workspace_bytes)
            profile = time_model(profile, self.model.seconds, im2col)
            # How functions run in parts is known of the recording's device only.
            profile = dataclasses.replace(profile, link=self.model.link, splits=())
        profile = share_links(profile, self.ranks)
        return dataclasses.replace(
            profile,
            operations=tuple(
                dataclasses.replace(op, device_seconds=op.device_seconds * self.factor)
                for op in profile.operations
            ),
            recipes=tuple(
                dataclasses.replace(recipe, seconds=recipe.seconds * self.factor)
                for recipe in profile.recipes
            ),
            device=self._device(batchsize),
        )

    def _device(self, batchsize: int) -> dict[str, Any]:
        recorded = self.samples.large.device
        name = self.model.title if self.model else recorded.get('name', 'unknown')
        return {
            'kind': KIND,
            'name': f'{name} (estimated)',
            'estimated': True,
            'batchsize': batchsize,
            'model': self.model.name if self.model else None,
            'convolution': self.convolution if self.model else 'recorded',
            'recompute': self.recompute if self.model else 'recorded',
            'sample_batchsizes': list(self.samples.batchsizes),
            'recorded_on': recorded,
            'compute_factor': self.factor,
            'calibration': self.calibration,
        }


@dataclasses.dataclass(frozen=True)
class StepEstimator:
    """Estimators of all kinds of iteration in a step.

    Attributes:
        estimators (tuple of Estimator): One for each kind.
        counts (tuple of int): How often each comes in a step.
    """

    estimators: tuple[Estimator, ...]
    counts: tuple[int, ...]

    @classmethod
    def make(
        cls, samples: Sequence[tuple[SamplePair, int]], *device: Any
    ) -> StepEstimator:
        """Makes estimators of what :func:`.match_kinds` has found.

        Args:
            samples: Of all kinds.
            device: As for :meth:`Estimator.make`.

        Raises:
            OptionError: As :func:`choose_convolution` does.
        """
        pairs, counts = zip(*samples, strict=True)
        return cls(tuple(Estimator.make(pair, *device) for pair in pairs), counts)

    def changed(self, change: Callable[[Estimator], Estimator]) -> StepEstimator:
        """The same with other estimators."""
        return StepEstimator(tuple(map(change, self.estimators)), self.counts)

    def largest(self, batchsize: int) -> Estimator:
        """That of the kind which needs most in-core with a batch size.

        Raises:
            OptionError: If the batch size is out of range.
        """
        if len(self.estimators) == 1:
            return self.estimators[0]
        from chainer_hybridmem.planning.simulation.in_core import in_core_peak_bytes

        return max(
            self.estimators,
            key=lambda one: in_core_peak_bytes(one.profile(batchsize)),
        )

    def older_bytes(self, batchsize: int) -> int:
        """What plain Chainer has beside that kind; see :class:`.Kind`."""
        return self.largest(batchsize).samples.older_bytes_at(batchsize)

    def profile(self, batchsize: int) -> Profile:
        """The estimated profile of that kind."""
        return self.largest(batchsize).profile(batchsize)
