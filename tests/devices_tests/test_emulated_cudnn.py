"""The emulator's cuDNN against NumPy, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from support.marks import needs_emulated_cudnn

import chainer_hybridmem  # noqa: F401  (before Chainer)

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

pytestmark = [pytest.mark.gpu, needs_emulated_cudnn]
TOLERANCES = {'f': 1e-4, 'd': 1e-10, 'e': 5e-2}
IMAGES = (4, 3, 8, 7)


def _pooling(name, **arguments):
    return lambda x: getattr(F, name)(x, 3, 2, 1, **arguments)


def _fixed(x, gamma, beta):
    xp = chainer.backend.get_array_module(x.array)
    mean, var = xp.zeros(3, x.dtype), xp.ones(3, x.dtype)
    return F.fixed_batch_normalization(x, gamma, beta, mean, var)


FUNCTIONS = {
    'convolution': (
        lambda x, w, b: F.convolution_2d(x, w, b, pad=1),
        [(2, 4, 9, 8), (6, 4, 3, 3), (6,)],
    ),
    'groups and strides': (
        lambda x, w, b: F.convolution_2d(x, w, b, 2, 1, groups=2),
        [(2, 4, 9, 8), (6, 2, 3, 3), (6,)],
    ),
    'dilated': (
        lambda x, w: F.dilated_convolution_2d(x, w, dilate=2),
        [(2, 4, 9, 8), (6, 4, 3, 3)],
    ),
    'convolution_3d': (
        lambda x, w, b: F.convolution_3d(x, w, b, pad=1),
        [(2, 3, 5, 6, 4), (4, 3, 3, 3, 3), (4,)],
    ),
    'deconvolution': (
        lambda x, w, b: F.deconvolution_2d(x, w, b, 2, 1),
        [(2, 4, 5, 6), (4, 3, 4, 4), (3,)],
    ),
    'relu': (F.relu, [IMAGES]),
    'sigmoid': (F.sigmoid, [IMAGES]),
    'tanh': (F.tanh, [(3, 5)]),
    'clipped_relu': (lambda x: F.clipped_relu(x, 0.5), [IMAGES]),
    'softmax': (F.softmax, [IMAGES]),
    'log_softmax': (F.log_softmax, [(3, 5)]),
    'max_pooling': (_pooling('max_pooling_2d', cover_all=False), [IMAGES]),
    'max_pooling, all covered': (_pooling('max_pooling_2d', cover_all=True), [IMAGES]),
    'max_pooling_3d': (_pooling('max_pooling_3d'), [(2, 3, 8, 7, 5)]),
    'average_pooling': (_pooling('average_pooling_2d'), [IMAGES]),
    'average_pooling, inside': (
        _pooling('average_pooling_nd', pad_value=None),
        [(2, 3, 8, 6, 4)],
    ),
    'batch_normalization': (F.batch_normalization, [IMAGES, (3,), (3,)]),
    'batch_normalization of rows': (F.batch_normalization, [(8, 3), (3,), (3,)]),
    'fixed_batch_normalization': (_fixed, [IMAGES, (3,), (3,)]),
    'spatial_transformer_grid': (
        lambda theta: F.spatial_transformer_grid(theta, (4, 5)),
        [(2, 2, 3)],
    ),
    'spatial_transformer_sampler': (
        F.spatial_transformer_sampler,
        [(2, 3, 6, 5), (2, 2, 4, 4)],
    ),
}
ONLY_FLOATS = ('spatial_transformer_grid', 'spatial_transformer_sampler')


def compute(xp, function, shapes, dtype):
    """The output and all gradients, as arrays of NumPy."""
    rng = np.random.RandomState(0)
    inputs = [
        chainer.Variable(xp.asarray(rng.uniform(-1, 1, shape).astype(dtype)))
        for shape in shapes
    ]
    with chainer.using_config('use_cudnn', 'always'):
        y = function(*inputs)
        y.grad = xp.asarray(rng.uniform(-1, 1, y.shape).astype(dtype))
        y.backward()
    arrays = [y.array, *(x.grad for x in inputs)]
    return [chainer.backends.cuda.to_cpu(array) for array in arrays]


@pytest.mark.matrix
@pytest.mark.parametrize('autotune', [False, True])
@pytest.mark.parametrize('dtype', TOLERANCES)
@pytest.mark.parametrize('name', FUNCTIONS)
def test_functions_give_what_numpy_gives(name, dtype, autotune):
    import cupy

    if name in ONLY_FLOATS and dtype != 'f':
        pytest.skip('for float32 only')
    function, shapes = FUNCTIONS[name]
    with chainer.using_config('autotune', autotune):
        ours = compute(cupy, function, shapes, dtype)
    for a, b in zip(ours, compute(np, function, shapes, dtype), strict=True):
        tolerance = TOLERANCES[dtype]
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize('name', ONLY_FLOATS)
@pytest.mark.parametrize('dtype', 'ed')
def test_what_is_for_float32_only_is_refused(name, dtype):
    import cupy

    with pytest.raises(RuntimeError, match='NOT_SUPPORTED'):
        compute(cupy, *FUNCTIONS[name], dtype)


RECURRENT = [
    *(L.NStepLSTM, L.NStepBiLSTM, L.NStepGRU, L.NStepBiGRU),
    *(L.NStepRNNTanh, L.NStepRNNReLU, L.NStepBiRNNTanh, L.NStepBiRNNReLU),
]


def run_recurrent(link, layers, xp):
    """The loss, the outputs and all gradients of sequences of four lengths."""
    link.to_device('@cupy:0' if xp is not np else '@numpy')
    rng = np.random.RandomState(0)
    xs = [
        chainer.Variable(xp.asarray(rng.uniform(-1, 1, (count, 5)).astype('f')))
        for count in (4, 3, 3, 1)
    ]
    for parameter in link.params():
        values = rng.uniform(-0.5, 0.5, parameter.shape).astype('f')
        parameter.array[...] = xp.asarray(values)
    link.cleargrads()
    states = [None] * (2 if 'LSTM' in type(link).__name__ else 1)
    with chainer.using_config('use_cudnn', 'always'):
        *ends, ys = link(*states, xs)
        loss = sum(F.sum(y * y * 0.3 + y) for y in ys) + sum(F.sum(end) for end in ends)
        loss.backward()
    arrays = [loss.array, *(y.array for y in ys), *(x.grad for x in xs)]
    arrays += [parameter.grad for parameter in link.params()]
    return [chainer.backends.cuda.to_cpu(array) for array in arrays]


@pytest.mark.parametrize('layers', [1, 2])
@pytest.mark.parametrize('kind', RECURRENT)
def test_recurrent_layers_give_what_numpy_gives(kind, layers):
    import cupy

    ours = run_recurrent(kind(layers, 5, 6, 0.0), layers, cupy)
    plain = run_recurrent(kind(layers, 5, 6, 0.0), layers, np)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_dropout_draws_anew_each_time():
    import cupy

    x = chainer.Variable(cupy.ones((200, 300), 'f'))
    with chainer.using_config('use_cudnn', 'always'):
        ys = [F.dropout(x, 0.3) for _ in range(2)]
    assert not (ys[0].array == ys[1].array).all()
    for y in ys:
        assert abs(float((y.array == 0).mean()) - 0.3) < 0.02
        x.cleargrad()
        y.grad = cupy.ones_like(y.array)
        y.backward()
        assert (x.grad == y.array).all()


NUMBERS = (0, 1, 2, 6, 7)  # of algorithms of a convolution's forward pass


class Call:
    """A convolution by hand: one of 3x3 on 16 channels."""

    def __init__(self):
        import cupy
        import cupy.cudnn as tools
        from cupy.cuda import cudnn

        self.library = cudnn
        self.x = cupy.ones((2, 16, 12, 12), 'f')
        self.w = cupy.asarray(np.random.RandomState(0).rand(8, 16, 3, 3).astype('f'))
        self.y = cupy.empty((2, 8, 12, 12), 'f')
        self.handle = tools.get_handle()
        self.x_desc = tools.create_tensor_descriptor(self.x)
        self.w_desc = tools.create_filter_descriptor(self.w)
        self.desc = tools.create_convolution_descriptor((1, 1), (1, 1), self.x.dtype)

    def rooms(self):
        """Bytes of workspace by the number of the algorithm."""
        descriptors = self.descriptors(self.y)
        size = self.library.getConvolutionForwardWorkspaceSize
        return {number: size(self.handle, *descriptors, number) for number in NUMBERS}

    def descriptors(self, y):
        """All of them."""
        import cupy.cudnn as tools

        self.y_desc = tools.create_tensor_descriptor(y)
        all_of_them = (self.x_desc, self.w_desc, self.desc, self.y_desc)
        return [descriptor.value for descriptor in all_of_them]

    def forward(self, number, room, y=None):
        """The output of one algorithm in a workspace of so many bytes."""
        import cupy

        y = self.y if y is None else y
        one, zero = np.ones(1, 'f'), np.zeros(1, 'f')
        x_desc, w_desc, desc, y_desc = self.descriptors(y)
        workspace = cupy.cuda.alloc(room)
        self.library.convolutionForward(
            *(self.handle, one.ctypes.data, x_desc, self.x.data.ptr, w_desc),
            *(self.w.data.ptr, desc, number, workspace.ptr, room, zero.ctypes.data),
            *(y_desc, y.data.ptr),
        )
        return chainer.backends.cuda.to_cpu(y)


def test_algorithms_differ_in_workspace_and_bits():
    call = Call()
    rooms = call.rooms()
    assert len(set(rooms.values())) == len(NUMBERS)
    results = [call.forward(*algorithm) for algorithm in rooms.items()]
    for result in results:
        np.testing.assert_allclose(result, results[0], rtol=1e-5)
    assert len({result.tobytes() for result in results}) > 2


def test_what_does_not_fit_is_refused():
    import cupy

    call = Call()
    number, room = max(call.rooms().items(), key=lambda algorithm: algorithm[1])
    with pytest.raises(call.library.CuDNNError, match='BAD_PARAM'):
        call.forward(number, room - 1)
    with pytest.raises(call.library.CuDNNError, match='BAD_PARAM'):
        call.forward(0, 0, cupy.empty((2, 8, 11, 12), 'f'))
    with pytest.raises(call.library.CuDNNError, match='NOT_SUPPORTED'):
        call.forward(5, 0)


REPEATED = """
    import chainer_hybridmem, chainer, chainer.functions as F, cupy
    x, w = (chainer.Variable(cupy.random.rand(*s, dtype='f'))
            for s in ((8, 4, 9, 8), (6, 4, 3, 3)))
    bits = set()
    with chainer.using_config('cudnn_deterministic', {deterministic}):
        for _ in range(8):
            w.cleargrad()
            F.sum(F.convolution_2d(x, w, pad=1, groups=1) ** 2).backward()
            bits.add(w.grad.tobytes())
    print(len(bits))
"""


@pytest.mark.parametrize('deterministic', [True, False])
def test_atomic_additions_differ_where_they_may(deterministic):
    tests = os.path.dirname(os.path.dirname(__file__))
    paths = [os.environ['PYTHONPATH'], tests, os.path.dirname(tests)]
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(REPEATED.format(**locals()))],
        env={
            **os.environ,
            'EMU_ATOMICS': '1',
            'PYTHONPATH': os.pathsep.join(paths),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    count = int(done.stdout.split()[-1])
    assert count == 1 if deterministic else count > 1
