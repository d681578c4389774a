"""Estimates without the device: two tiny recordings, any batch size, any GPU.

Pure, like the planners: profiles in, profiles out. See ``docs/guide/estimate.md``.
"""

from chainer_hybridmem.forecasting.estimation.affine import (
    Kind,
    SamplePair,
    check_ascending,
    match_kinds,
    same_sizes,
)
from chainer_hybridmem.forecasting.estimation.device_models import (
    DeviceModel,
    load_device_model,
    model_names,
)
from chainer_hybridmem.forecasting.estimation.estimator import (
    MOST_PICTURES,
    Estimator,
    StepEstimator,
    check_batchsize,
    choose_convolution,
)
from chainer_hybridmem.forecasting.estimation.lowering import lower_to_cudnn
from chainer_hybridmem.forecasting.estimation.nodes import (
    GpuNode,
    all_reduce_bytes,
    all_reduce_seconds,
    load_node,
    node_names,
    with_all_reduce,
)

__all__ = [
    'MOST_PICTURES',
    'DeviceModel',
    'Estimator',
    'GpuNode',
    'Kind',
    'SamplePair',
    'StepEstimator',
    'all_reduce_bytes',
    'all_reduce_seconds',
    'check_ascending',
    'check_batchsize',
    'load_device_model',
    'load_node',
    'lower_to_cudnn',
    'match_kinds',
    'model_names',
    'node_names',
    'same_sizes',
    'choose_convolution',
    'with_all_reduce',
]
