"""Estimates without the device: two tiny recordings, any batch size, any GPU.

Pure, like the planners: profiles in, profiles out. See ``docs/guide/estimate.md``.
"""

from chainer_hybridmem.estimation.affine import SamplePair, check_ascending
from chainer_hybridmem.estimation.device_models import (
    DeviceModel,
    load_device_model,
    model_names,
)
from chainer_hybridmem.estimation.estimator import (
    MOST_PICTURES,
    Estimator,
    check_algorithms,
    check_batchsize,
    ways,
)
from chainer_hybridmem.estimation.lowering import lower_to_cudnn

__all__ = [
    'MOST_PICTURES',
    'DeviceModel',
    'Estimator',
    'SamplePair',
    'check_algorithms',
    'check_ascending',
    'check_batchsize',
    'load_device_model',
    'lower_to_cudnn',
    'model_names',
    'ways',
]
