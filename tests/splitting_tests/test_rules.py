"""Every rule: the same bits, layouts and attributes as the function as a whole."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from chainer.functions.activation import leaky_relu, relu, sigmoid, tanh
from chainer.functions.connection import (
    convolution_2d,
    convolution_nd,
    deconvolution_2d,
    deconvolution_nd,
    linear,
)
from chainer.functions.noise import dropout
from chainer.functions.normalization import batch_normalization as bn
from chainer.functions.pooling import average_pooling_2d, max_pooling_nd
from chainer.utils import conv
from support import networks  # imports chainer_hybridmem before chainer

from chainer_hybridmem.training.splitting import rules
from chainer_hybridmem.training.splitting.rules import whole

del networks
ROUNDING = {'e': 3e-3, 'f': 2e-6, 'd': 1e-14}  # of the largest number, seen: a third


def channels_first(x):
    return np.ascontiguousarray(x)


def channels_last(x):
    """As convolutions leave their outputs."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def numbers(dtype, *shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype(dtype)


def run(function, inputs, way=None):
    """Outputs and the function, from the same random state."""
    clone = copy.copy(function)
    clone._input_layouts = (None,) * len(inputs)
    for name in ('running_mean', 'running_var'):
        if getattr(clone, name, None) is not None:
            setattr(clone, name, getattr(clone, name).copy())
    np.random.seed(1)
    outputs = clone.forward(inputs) if way is None else rules.run(clone, inputs, way)
    return outputs, clone


def check(function, *inputs):
    """Compares every way with the whole; returns the ways' cuts."""
    expected, reference = run(function, inputs)
    ways = list(rules.ways(reference, inputs))
    for way in ways:
        outputs, clone = run(function, inputs, way)
        for left, right in zip(expected, outputs, strict=True):
            assert left.dtype == right.dtype and left.shape == right.shape
            assert left.strides == right.strides, way
            if way.exact:
                assert left.tobytes() == right.tobytes(), way
            else:
                most = ROUNDING[left.dtype.char] * max(abs(left).max(), 1)
                np.testing.assert_allclose(left, right, 0, most)
        assert vars(reference).keys() == vars(clone).keys()
        for name, value in vars(reference).items():
            other = vars(clone)[name]
            if isinstance(value, np.ndarray):
                assert value.strides == other.strides, name
                assert value.tobytes() == other.tobytes(), name
            elif name not in ('_impl', 'func', 'apool2d'):
                assert value == other, name
    return {way.cut for way in ways}


DTYPES = pytest.mark.parametrize('dtype', ['e', 'f', 'd'])
LAYOUTS = pytest.mark.parametrize('layout', [channels_first, channels_last])
BATCHES = pytest.mark.parametrize('batch', [2, 5, 8])


@pytest.mark.matrix
@DTYPES
@LAYOUTS
@BATCHES
@pytest.mark.parametrize(
    ('stride', 'pad', 'ksize', 'options'),
    [
        (1, 1, 3, {}),
        (2, 0, 1, {}),
        (2, 3, 7, {}),
        (1, 2, 3, {'dilate': 2}),
        (1, 1, 3, {'groups': 2}),
        (2, 1, 3, {'cover_all': True}),
    ],
)
def test_convolution_and_its_gradients(
    dtype, layout, batch, stride, pad, ksize, options
):
    groups = options.get('groups', 1)
    x = layout(numbers(dtype, batch, 6, 9, 9))
    w = numbers(dtype, 4, 6 // groups, ksize, ksize, seed=1)
    b = numbers(dtype, 4, seed=2)
    function = convolution_2d.Convolution2DFunction(stride, pad, **options)
    cuts = {'batch'} if groups > 1 else {'windows', 'batch'}
    assert check(function, x, w) == check(function, x, w, b) == cuts
    (y,), _ = run(function, (x, w))
    gy = layout(numbers(dtype, *y.shape, seed=3))
    gradient = convolution_2d.Convolution2DGradW(function, w.shape, w.dtype, None)
    assert check(gradient, x, gy) == cuts
    options = {k: v for k, v in options.items() if k != 'cover_all'}
    back = deconvolution_2d.Deconvolution2DFunction(
        stride, pad, outsize=(9, 9), **options
    )
    assert check(back, gy, w) == {'batch'}


@pytest.mark.matrix
@DTYPES
@pytest.mark.parametrize('batch', [2, 5])
@pytest.mark.parametrize('sides', [(11,), (7, 6, 5)])
@pytest.mark.parametrize(
    ('stride', 'pad', 'ksize', 'options'),
    [
        (1, 1, 3, {}),
        (2, 0, 1, {}),
        (1, 2, 3, {'dilate': 2}),
        (1, 1, 3, {'groups': 2}),
        (2, 1, 3, {'cover_all': True}),
    ],
)
def test_convolution_in_any_dimensions(
    dtype, batch, sides, stride, pad, ksize, options
):
    groups, n = options.get('groups', 1), len(sides)
    x = numbers(dtype, batch, 6, *sides)
    w = numbers(dtype, 4, 6 // groups, *(n * (ksize,)), seed=1)
    b = numbers(dtype, 4, seed=2)
    function = convolution_nd.ConvolutionND(n, stride, pad, **options)
    cuts = {'batch'} if groups > 1 else {'windows', 'batch'}
    assert check(function, x, w) == check(function, x, w, b) == cuts
    (y,) = convolution_nd.ConvolutionND(n, stride, pad, **options).apply((x, w))
    gy = numbers(dtype, *y.shape, seed=3)
    gradient = convolution_nd.ConvolutionNDGradW(y.creator_node)
    assert check(gradient, x, gy) == cuts
    options = {k: v for k, v in options.items() if k != 'cover_all'}
    back = deconvolution_nd.DeconvolutionND(n, stride, pad, outsize=sides, **options)
    assert check(back, gy, w) == {'batch'}


def test_deconvolution_finds_its_own_size():
    x, w = numbers('f', 4, 3, 5, 5), numbers('f', 3, 2, 3, 3)
    check(deconvolution_2d.Deconvolution2DFunction(2, 1), x, w, numbers('f', 2))


@DTYPES
@BATCHES
def test_linear_and_its_gradients(dtype, batch):
    x, w, b = numbers(dtype, batch, 7), numbers(dtype, 4, 7), numbers(dtype, 4)
    gy = numbers(dtype, batch, 4, seed=1)
    expected = {'batch'} if batch >= 4 else set()  # two samples: no other BLAS call
    assert check(linear.LinearFunction(), x, w, b) == expected
    assert check(linear.LinearGradData(), w, gy) == expected
    assert check(linear.LinearGradWeight(w.dtype), x, gy) == expected


@DTYPES
@LAYOUTS
@pytest.mark.parametrize('shape', [(5, 6, 9, 9), (8, 33, 7, 7), (3, 4, 41, 57)])
def test_batch_normalization_by_channels(dtype, layout, shape):
    kind = np.promote_types(dtype, 'f')
    n = shape[1]
    x, gamma, beta = layout(numbers(dtype, *shape)), numbers(kind, n), numbers(kind, n)
    function = bn.BatchNormalization(mean=np.zeros(n, kind), var=np.ones(n, kind))
    assert check(function, x, gamma, beta) == {'channels'}
    assert check(bn.BatchNormalization(), x, gamma, beta) == {'channels'}
    variance = abs(gamma) + 1
    fixed = bn.FixedBatchNormalization()
    assert check(fixed, x, gamma, beta, beta, variance) == (
        {'batch'} if len(x) >= 4 else set()
    )
    _, ran = run(function, (x, gamma, beta))
    back = bn.BatchNormalizationGrad(
        ran.eps, ran.expander, ran.axis, ran.mean, None, ran.inv_std,
        ran.key_axis, ran._impl, None,
    )  # fmt: skip
    for other in (channels_first, channels_last):
        gy = other(numbers(dtype, *shape, seed=1))
        assert check(back, x, gamma, gy) == {'channels'}


def test_batch_normalization_of_vectors():
    x, gamma, beta = numbers('f', 9, 32), numbers('f', 32), numbers('f', 32)
    assert check(bn.BatchNormalization(), x, gamma, beta) == {'channels'}


def test_batch_normalization_along_other_axes_stays_whole():
    x, gamma = numbers('f', 4, 6, 5), numbers('f', 5)
    function = bn.BatchNormalization(axis=(0, 1))
    assert check(function, x, gamma, gamma) == set()


def test_statistics_across_processes_stay_whole():
    def selects(function, inputs):
        return bn.GeneralBatchNormalizationImpl()

    x, gamma = numbers('f', 4, 6, 5, 5), numbers('f', 6)
    function = bn.BatchNormalization(impl_selector=selects)
    assert check(function, x, gamma, gamma) == set()


@DTYPES
@LAYOUTS
@BATCHES
def test_pooling(dtype, layout, batch):
    x = layout(numbers(dtype, batch, 6, 9, 9))
    for function, gradient in (
        (max_pooling_nd.MaxPoolingND(2, 3, 2, 1), max_pooling_nd.MaxPoolingNDGrad),
        (
            average_pooling_2d.AveragePooling2D(3, 2, 1, False),
            average_pooling_2d.AveragePooling2DGrad,
        ),
    ):
        assert check(function, x) == {'batch'}
        (y,), ran = run(function, (x,))
        assert check(gradient(ran), y) == {'batch'}


@DTYPES
@LAYOUTS
def test_elementwise(dtype, layout):
    x, gy = layout(numbers(dtype, 7, 6, 5, 5)), numbers(dtype, 7, 6, 5, 5, seed=1)
    for function, *inputs in (
        (relu.ReLUGrad2(x), gy),
        (leaky_relu.LeakyReLU(), x),
        (leaky_relu.LeakyReLU(-0.1), x),
        (leaky_relu._LeakyReLUGrad(x, 0.2), gy),
        (sigmoid.Sigmoid(), x),
        (sigmoid.SigmoidGrad((None,)), x, gy),
        (sigmoid.SigmoidGrad((x,)), x, gy),
        (tanh.TanhGrad(x), x, gy),
        (dropout.Dropout(0.4), x),
        (dropout.Dropout(0.4, mask=gy), x),
    ):
        assert check(function, *inputs) == {'batch'}, type(function)


def test_one_sample_is_never_cut():
    x, w = numbers('f', 1, 6, 9, 9), numbers('f', 4, 6, 3, 3)
    assert check(convolution_2d.Convolution2DFunction(1, 1), x, w) == set()
    assert check(max_pooling_nd.MaxPoolingND(2, 3), x) == set()
    assert check(sigmoid.Sigmoid(), x) == set()


def test_what_has_no_element_is_never_cut():
    x = numbers('f', 8, 0)
    assert list(rules.ways(tanh.TanhGrad(x), (x, x))) == []


def test_other_axis_orders_and_other_classes_stay_whole():
    class Mine(convolution_2d.Convolution2DFunction):
        pass

    x, w = numbers('f', 4, 6, 9, 9), numbers('f', 4, 6, 3, 3)
    assert check(Mine(1, 1), x, w) == set()
    function = convolution_2d.Convolution2DFunction(1, 1)
    function._input_layouts = (None, 'CUDNN_CHANNEL_LAST_W')
    assert list(rules.ways(function, (x, w))) == []


def test_a_failed_forward_is_undone():
    function = dropout.Dropout(0.5)
    np.random.seed(3)
    restore = rules.state(function)
    expected = np.random.rand(4)
    restore()
    assert np.random.rand(4).tobytes() == expected.tobytes()
    mean, var = np.zeros(3, 'f'), np.ones(3, 'f')
    function = bn.BatchNormalization(mean=mean, var=var)
    restore = rules.state(function)
    mean += 5
    var += 5
    restore()
    assert mean.tolist() == [0, 0, 0] and var.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    'made',
    [
        lambda n: np.zeros((n, 3, 4)),
        lambda n: np.zeros((3, n, 4)).transpose(1, 0, 2),
        lambda n: np.zeros((n, 4, 3)).transpose(0, 2, 1),
        lambda n: np.zeros((n, 5, 7))[:, 1:4, 2:6],
        lambda n: np.zeros((5, n, 1, 7))[1:4, :, :, 2:6].transpose(1, 0, 2, 3),
    ],
)
@pytest.mark.parametrize('length', [1, 2])
def test_whole_looks_at_memory_as_if_made_at_once(made, length):
    result, expected = whole(made(length), 0, 6), made(6)
    assert result.shape == expected.shape
    seen = [a for a in range(expected.ndim) if expected.shape[a] > 1]
    assert [result.strides[a] for a in seen] == [expected.strides[a] for a in seen]


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
@pytest.mark.parametrize('layout', ['usual', 'channels last'])
@pytest.mark.parametrize(
    ('stride', 'pad', 'ksize', 'options'),
    [
        ((1, 2), (1, 0), (3, 2), {}),
        (2, 3, (7, 5), {}),
        (1, 2, (3, 3), {'dilate': (2, 1)}),
        ((2, 1), 1, (3, 1), {'cover_all': True}),
    ],
)
def test_a_kernel_lays_out_all_windows(dtype, layout, stride, pad, ksize, options):
    """As Chainer does, and with no memory beside the result."""
    import cupy

    x = cupy.asarray(numbers(dtype, 3, 4, 9, 8))
    if layout == 'channels last':
        x = cupy.moveaxis(cupy.ascontiguousarray(cupy.moveaxis(x, 1, -1)), -1, 1)
    function = convolution_2d.Convolution2DFunction(stride, pad, **options)
    places = function.sy, function.sx, function.ph, function.pw
    expected = conv.im2col(
        x, *ksize, *places, function.cover_all, function.dy, function.dx
    )
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        found = rules.columns(function, x, ksize)
    assert pool.total_bytes() - found.nbytes < 1024
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert found.transpose(0, 4, 5, 1, 2, 3).flags.c_contiguous
    assert found.get().tobytes() == expected.get().tobytes()
