"""The emulator's cuDNN 9, called as a binding calls it."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
from support import cudnn9
from support.cudnn9 import (
    BAD_PARAM,
    DEFAULT_MATH,
    FMA_MATH,
    NOT_SUPPORTED,
    ask,
    call,
    check_refusal,
    descriptor,
    ints,
    scale,
    size,
)
from support.marks import needs_emulated_cudnn9

import chainer_hybridmem  # noqa: F401  (before Chainer)

# isort: split
import chainer.functions as F
import numpy as np

pytestmark = [pytest.mark.gpu, needs_emulated_cudnn9]


def test_the_version_and_the_names_of_statuses_are_those_of_9():
    library = cudnn9.library()
    assert library.cudnnGetVersion() == 92800
    parts = [ask('GetProperty', n, kind=ctypes.c_int) for n in range(3)]
    assert parts == [9, 28, 0]
    names = {0: 'SUCCESS', BAD_PARAM: 'BAD_PARAM', NOT_SUPPORTED: 'NOT_SUPPORTED'}
    for status, name in names.items():
        assert library.cudnnGetErrorString(status) == f'CUDNN_STATUS_{name}'.encode()
    assert library.cudnnGetErrorString(3) == b'CUDNN_UNKNOWN_STATUS'


def test_functions_that_9_lacks_are_lacking():
    gone = ('SetRNNDescriptor_v6', 'GetRNNParamsSize', 'RNNForwardTraining')
    for name in gone:
        assert not hasattr(cudnn9.library(), f'cudnn{name}')


def test_a_refusal_says_why_once():
    with descriptor('ConvolutionDescriptor') as convolution:
        check_refusal(BAD_PARAM, call, 'SetConvolutionGroupCount', convolution, 0)
        library = cudnn9.library()
        assert library.cudnnSetConvolutionGroupCount(convolution, 0) == BAD_PARAM
        assert cudnn9.last_error() == 'groups < 1'
        assert cudnn9.last_error() == ''


class Performance(ctypes.Structure):
    """An algorithm, as cuDNN describes it."""

    _fields_ = (
        ('number', ctypes.c_int),
        ('status', ctypes.c_int),
        ('milliseconds', ctypes.c_float),
        ('room', ctypes.c_size_t),
        ('determinism', ctypes.c_int),
        ('math', ctypes.c_int),
        ('reserved', ctypes.c_int * 3),
    )


class Convolution:
    """One of 3x3 on 16 channels, in two groups where `groups` says so."""

    def __init__(self, stack, math=FMA_MATH, groups=1):
        import cupy

        rng = np.random.RandomState(0)
        kinds = ('', 'TensorDescriptor', 'FilterDescriptor', 'ConvolutionDescriptor')
        self.handle, self.x_desc, self.w_desc, self.desc = (
            stack.enter_context(descriptor(kind)) for kind in kinds
        )
        self.y_desc = stack.enter_context(descriptor('TensorDescriptor'))
        self.x = cupy.asarray(rng.uniform(-1, 1, (2, 16, 9, 8)).astype('f'))
        weights = rng.uniform(-1, 1, (8, 16 // groups, 3, 3))
        self.w = cupy.asarray(weights.astype('f'))
        cudnn9.set_tensor(self.x_desc, self.x.shape)
        call('SetFilterNdDescriptor', self.w_desc, 0, 0, 4, ints(*self.w.shape))
        self.set()
        call('SetConvolutionMathType', self.desc, math)
        call('SetConvolutionGroupCount', self.desc, groups)
        shape = ints(*[0] * 4)
        operands = (self.desc, self.x_desc, self.w_desc)
        call('GetConvolutionNdForwardOutputDim', *operands, 4, shape)
        self.y = cupy.empty(tuple(shape), 'f')
        cudnn9.set_tensor(self.y_desc, self.y.shape)
        self.descriptors = (self.x_desc, self.w_desc, self.desc, self.y_desc)

    def set(self, pad=(1, 1), stride=(1, 1), dilation=(1, 1), mode=1, computes=0):
        arrays = (ints(*pad), ints(*stride), ints(*dilation))
        call('SetConvolutionNdDescriptor', self.desc, len(pad), *arrays, mode, computes)

    def forward(self, number=0, room=0):
        import cupy

        workspace = cupy.empty(room, 'b')
        call(
            'ConvolutionForward',
            *(self.handle, scale(1), self.x_desc, self.x, self.w_desc, self.w),
            *(self.desc, number, workspace, size(room), scale(0), self.y_desc, self.y),
        )
        return self.y.get()

    def find(self, room):
        import cupy

        found, count = (Performance * 8)(), ctypes.c_int()
        call(
            'FindConvolutionForwardAlgorithmEx',
            *(self.handle, self.x_desc, self.x, self.w_desc, self.w, self.desc),
            *(self.y_desc, self.y, 8, ctypes.byref(count), found),
            *(cupy.empty(room, 'b'), size(room)),
        )
        return list(found[: count.value])


@pytest.fixture
def convolution():
    with contextlib.ExitStack() as stack:
        yield lambda **arguments: Convolution(stack, **arguments)


@pytest.mark.parametrize('groups', [1, 2])
def test_only_fma_keeps_float32_in_convolutions(convolution, groups):
    exact, rounded = (
        convolution(math=math, groups=groups) for math in (FMA_MATH, DEFAULT_MATH)
    )
    plain = F.convolution_2d(exact.x.get(), exact.w.get(), pad=1, groups=groups).array
    np.testing.assert_allclose(exact.forward(), plain, 1e-4, 1e-4)
    np.testing.assert_allclose(rounded.forward(), plain, 2e-2, 2e-2)
    assert abs(rounded.y.get() - plain).max() > 1e-3


def test_what_cannot_be_used_comes_last_with_a_status(convolution):
    made = convolution()
    roomy = made.find(1 << 20)
    assert [a.status for a in roomy[:5]] == [0] * 5
    assert {a.status for a in roomy[5:]} == {NOT_SUPPORTED}
    assert sorted(a.number for a in roomy) == list(range(8))
    close = made.find(sorted(a.room for a in roomy)[-2])
    statuses = {a.number: a.status for a in close}
    assert list(statuses.values()).count(cudnn9.ALLOC_FAILED) == 1
    times = [a.milliseconds for a in close]
    assert times == sorted(times, key=lambda t: (t < 0, t)) and times[-1] == -1
    assert {a.math for a in roomy} == {FMA_MATH}
    for algorithm in roomy[:5]:
        asked = ask(
            'GetConvolutionForwardWorkspaceSize',
            *(made.handle, *made.descriptors, algorithm.number),
        )
        assert asked == algorithm.room


# As cuDNN 9.28 answers.
CONVOLUTION_REFUSALS = [
    {'pad': (-1, 1)},
    {'stride': (0, 1)},
    {'dilation': (0, 1)},
    {'mode': 5},
]


@pytest.mark.parametrize('changed', CONVOLUTION_REFUSALS, ids=str)
def test_convolutions_are_refused_as_by_the_library(convolution, changed):
    check_refusal(BAD_PARAM, convolution().set, **changed)


def test_a_convolution_computes_in_the_type_of_its_arrays(convolution):
    made = convolution()
    made.set(computes=1)
    check_refusal(NOT_SUPPORTED, made.forward)


def normalize_backward(shape, room):
    """A backward pass of batch normalization with so many bytes of workspace."""
    import cupy

    with contextlib.ExitStack() as stack:
        handle, x_desc, derived = (
            stack.enter_context(descriptor(kind))
            for kind in ('', 'TensorDescriptor', 'TensorDescriptor')
        )
        x, parameter = cupy.ones(shape, 'f'), cupy.ones(3, 'f')
        cudnn9.set_tensor(x_desc, x.shape)
        call('DeriveBNTensorDescriptor', derived, x_desc, 1)
        assert cudnn9.tensor_shape(derived) == (1, 3) + (1,) * (x.ndim - 2)
        needed = ctypes.c_size_t()
        call(
            'GetBatchNormalizationBackwardExWorkspaceSize',
            *(handle, 1, 0, x_desc, x_desc, x_desc, x_desc, x_desc, derived, None),
            ctypes.byref(needed),
        )
        room = needed.value + room
        call(
            *('BatchNormalizationBackwardEx', handle, 1, 0),
            *(scale(1), scale(0), scale(1), scale(0), x_desc, x, x_desc, None),
            *(x_desc, x, x_desc, None, x_desc, x, derived, parameter, None, parameter),
            *(parameter, ctypes.c_double(1e-5), parameter, parameter, None),
            *(cupy.empty(room, 'b'), size(room), None, size(0)),
        )


def test_batch_normalization_needs_its_workspace_and_four_axes():
    normalize_backward((2, 3, 4, 5), 0)
    check_refusal(BAD_PARAM, normalize_backward, (2, 3, 4, 5), -1)
    check_refusal(BAD_PARAM, normalize_backward, (2, 3, 4), 0)


def test_dropout_needs_its_reserve_in_backward_too():
    import cupy

    kinds = ('', 'TensorDescriptor', 'DropoutDescriptor')
    with contextlib.ExitStack() as stack:
        handle, tensor, dropout = (stack.enter_context(descriptor(k)) for k in kinds)
        states = cupy.empty(ask('DropoutGetStatesSize', handle), 'b')
        call(
            *('SetDropoutDescriptor', dropout, handle, ctypes.c_float(0.5), states),
            *(size(states.nbytes), ctypes.c_ulonglong(3)),
        )
        x = cupy.ones((2, 3, 4, 5), 'f')
        cudnn9.set_tensor(tensor, x.shape)
        reserve = cupy.empty(ask('DropoutGetReserveSpaceSize', tensor), 'b')

        def run(direction, bytes_):
            y = cupy.empty_like(x)
            call(
                *(f'Dropout{direction}', handle, dropout, tensor, x, tensor, y),
                *(reserve, size(bytes_)),
            )
            return y.get()

        y = run('Forward', reserve.nbytes)
        assert set(y.ravel()) == {0, 2}
        assert (run('Backward', reserve.nbytes) == y).all()
        for direction in ('Forward', 'Backward'):
            check_refusal(BAD_PARAM, run, direction, reserve.nbytes - 1)
