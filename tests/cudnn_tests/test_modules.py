"""What Chainer and other programs call, on CuPy 14 with the emulated cuDNN 9."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from support.cudnn_workspaces import workspaces_up_to
from support.marks import needs_emulated_cudnn

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
from chainer.backends import cuda

from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.training.session.plan_cache import describe_cudnn

pytestmark = [
    pytest.mark.gpu,
    needs_emulated_cudnn,
    pytest.mark.skipif(compat.cupy_has_cudnn(), reason='this CuPy has cuDNN itself'),
]
WIDE = (4, 64, 14, 14)  # for algorithms that take a workspace


def draw(*shape, dtype='f'):
    import cupy

    numbers = np.random.RandomState(sum(shape)).uniform(-1, 1, shape)
    return cupy.asarray(numbers.astype(dtype))


def convolve(x, w, **options):
    """The output and both gradients."""
    x, w = chainer.Variable(x), chainer.Variable(w)
    y = F.convolution_2d(x, w, pad=1, **options)
    y.grad = y.array + 1
    y.backward()
    return [array.get().tobytes() for array in (y.array, x.grad, w.grad)]


def test_chainer_finds_cudnn():
    assert cuda.cudnn_enabled
    assert cuda.libcudnn.getVersion() == 92800
    assert chainer.functions.connection.convolution_2d._cudnn_version == 92800


def test_float32_is_float32_unless_tf32_is_asked_for():
    import cupy

    from chainer_hybridmem.training.cudnn.arithmetic import may_use_tf32

    x, w = draw(*WIDE), draw(8, 64, 3, 3)
    assert not may_use_tf32()
    exact = convolve(x, w)
    core = cupy._core
    former = core.get_compute_type('f')
    core.set_compute_type('f', core._routines_linalg.COMPUTE_TYPE_TF32)
    try:
        assert may_use_tf32()
        rounded = convolve(x, w)
    finally:
        core.set_compute_type('f', former)
    assert all(a != b for a, b in zip(exact, rounded, strict=True))
    assert convolve(x, w) == exact


def test_a_cached_plan_knows_what_algorithms_depend_on():
    before = describe_cudnn()
    assert before['version'] == 92800
    with workspaces_up_to(1 << 20):
        assert describe_cudnn() == {**before, 'workspace_bytes': 1 << 20}


@pytest.mark.parametrize('autotune', [False, True])
@pytest.mark.parametrize('deterministic', [False, True])
def test_an_algorithm_is_remembered(autotune, deterministic):
    if not deterministic and 'EMU_ATOMICS' in os.environ:
        pytest.skip('gives other bits at each call')
    x, w = draw(*WIDE), draw(8, 64, 3, 3)
    options = {'autotune': autotune, 'cudnn_deterministic': deterministic}
    with chainer.using_config('use_cudnn', 'always'), contextlib.ExitStack() as stack:
        for name, value in options.items():
            stack.enter_context(chainer.using_config(name, value))
        first = convolve(x, w)
        assert convolve(x, w) == first


def test_shapes_that_differ_in_one_thing_have_algorithms_of_their_own():
    """Groups, dilation and layouts among them, which CuPy 13 left out."""
    x, w = draw(2, 8, 12, 12), draw(8, 8, 3, 3)
    with chainer.using_config('autotune', True):
        for options in ({}, {'dilate': 2}, {'stride': 2}):
            y = F.convolution_2d(x, w, pad=2, **options).array.get()
            with chainer.using_config('use_cudnn', 'never'):
                plain = F.convolution_2d(x, w, pad=2, **options).array.get()
            np.testing.assert_allclose(y, plain, atol=1e-4)


def test_too_small_a_workspace_is_told_with_one_that_does():
    import cupy.cudnn

    gy, w, gx = draw(4, 8, 14, 14), draw(8, 64, 3, 3), draw(*WIDE)
    asked = ((1, 1), (1, 1), (1, 1), 1)
    options = {'deterministic': True, 'auto_tune': False, 'tensor_core': 'auto'}
    with (
        workspaces_up_to(0),
        pytest.raises(RuntimeError, match=r'workspace_size\([1-9]\d+\)'),
    ):
        cupy.cudnn.convolution_backward_data(w, gy, None, gx, *asked, **options)
    with pytest.raises(ValueError, match='is -1; 0 bytes or more'):
        cupy.cudnn.set_max_workspace_size(-1)


def test_what_cudnn_refuses_is_told_with_its_shapes():
    import cupy.cudnn

    x, w, y = draw(4, 3, 8, 8), draw(8, 3, 3, 3), draw(4, 8, 9, 9)
    with pytest.raises(RuntimeError, match=r'(?s)BAD_PARAM.*\(4, 3, 8, 8\).*9, 9\)'):
        cupy.cudnn.convolution_forward(
            x, w, None, y, (1, 1), (1, 1), (1, 1), 1, auto_tune=False,
            tensor_core='auto',
        )  # fmt: skip
    with pytest.raises(ValueError, match='"auto", "always", "never"'):
        cupy.cudnn.convolution_forward(
            x, w, None, y, (1, 1), (1, 1), (1, 1), 1, auto_tune=False, tensor_core='no'
        )
    with pytest.raises(TypeError, match='int32'):
        cupy.cudnn.activation_forward(x.astype('i'), 1)


def convolve_into(y, x=None, w=None, pad=(1, 1), stride=(1, 1)):
    import cupy.cudnn

    x, w = draw(2, 3, 8, 8) if x is None else x, draw(4, 3, 3, 3) if w is None else w
    cupy.cudnn.convolution_forward(
        x, w, None, y, pad, stride, (1, 1), 1, auto_tune=False, tensor_core='auto'
    )


def normalize(x, n):
    import cupy.cudnn

    arrays = [draw(n) for _ in range(4)]
    cupy.cudnn.batch_normalization_forward_training(
        x, *arrays, None, None, 1e-5, 0.9, True, 1, False
    )


def call(name, *arguments):
    import cupy.cudnn

    getattr(cupy.cudnn, name)(*arguments)


POOLED = (2, 2), (2, 2), (0, 0), 0
# Each would be read or written beyond its end, or as what it is not.
REFUSED = {
    'another type': lambda: convolve_into(
        draw(2, 4, 8, 8), draw(2, 3, 8, 8, dtype='e')
    ),
    'on the host': lambda: convolve_into(draw(2, 4, 8, 8), draw(2, 3, 8, 8).get()),
    'an order': lambda: convolve_into(draw(2, 8, 8, 4).transpose(0, 3, 1, 2)),
    'axes': lambda: convolve_into(draw(2, 4, 8, 8), stride=(1,)),
    'axes of a pooling': lambda: call(
        'pooling_forward', draw(2, 3, 8, 8), draw(2, 3, 4, 4), (2, 2), (2,), (0, 0), 0
    ),
    'a pooled type': lambda: call(
        'pooling_forward', draw(2, 3, 8, 8), draw(2, 3, 4, 4, dtype='d'), *POOLED
    ),
    'a pooled shape': lambda: call(
        'pooling_backward', draw(2, 3, 8, 8), draw(2, 3, 4, 4), draw(2, 3, 4), *POOLED
    ),
    'a gradient': lambda: call('activation_backward', draw(9), draw(9), draw(8), 1),
    'a softmax': lambda: call('softmax_backward', draw(2, 3), draw(2, 2), 1, 1),
    'parameters': lambda: normalize(draw(2, 3, 4, 4), 2),
    'nothing': lambda: call('create_tensor_descriptor', draw(0, 3)),
}


@pytest.mark.parametrize('name', REFUSED)
def test_arrays_that_are_not_alike_are_refused(name):
    with pytest.raises(ValueError, match=r'\d|C order only'):
        REFUSED[name]()


def test_c_functions_count_their_arguments():
    from cupy.cuda import cudnn

    with pytest.raises(TypeError, match='takes 0 arguments, not 1'):
        cudnn.createTensorDescriptor(1)
    with pytest.raises(TypeError, match='takes 7 arguments, not 1'):
        cudnn.setTensor4dDescriptor(1)


def test_without_a_gpu_there_is_an_error_and_no_crash():
    code = """
    import chainer_hybridmem
    from cupy.cuda import cudnn
    print(cudnn.getVersion())
    try:
        cudnn.create()
    except cudnn.CuDNNError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)],
        capture_output=True, text=True, env={**os.environ, 'EMU_DEVICES': '0'},
    )  # fmt: skip
    version, told = done.stdout.splitlines()
    assert version == '92800'
    assert 'cudnnCreate ended with CUDNN_STATUS_NOT_INITIALIZED (1001)' in told


EMPTY = {
    'convolution': lambda x: F.convolution_2d(x, draw(8, 3, 3, 3), pad=1),
    'deconvolution': lambda x: F.deconvolution_2d(x, draw(3, 8, 3, 3), pad=1),
    'relu': F.relu,
    'average_pooling': lambda x: F.average_pooling_2d(x, 2),
    'softmax': F.softmax,
    'log_softmax': F.log_softmax,
}


@pytest.mark.parametrize('name', EMPTY)
def test_empty_batches_pass(name):
    import cupy

    x = chainer.Variable(cupy.empty((0, 3, 8, 8), 'f'))
    y = EMPTY[name](x)
    y.grad = y.array
    y.backward()
    assert y.shape[0] == 0
    assert x.grad.shape == x.shape


def test_an_empty_batch_has_no_statistics():
    import cupy

    x = cupy.empty((0, 3, 8, 8), 'f')
    with pytest.raises(ValueError, match='empty'):
        F.batch_normalization(x, draw(3), draw(3))


def test_nan_stays_nan():
    x = draw(2, 3, 8, 8)
    x[0, 0, 0, 0] = np.nan
    y = F.convolution_2d(x, draw(8, 3, 3, 3), pad=1).array.get()
    assert np.isnan(y[0]).any()
    assert not np.isnan(y[1]).any()


def test_work_is_in_the_current_stream():
    import cupy

    x, w = draw(*WIDE), draw(8, 64, 3, 3)
    expected = convolve(x, w)
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
        with stream:
            doubled = F.relu(x) * 2
            assert (doubled.array.get() >= 0).all()
            assert convolve(x, w) == expected


def test_threads_have_handles_of_their_own():
    import cupy.cudnn

    x, w = draw(*WIDE), draw(8, 64, 3, 3)
    expected = convolve(x, w)

    def work(_):
        with cupy.cuda.Stream(non_blocking=True):
            return convolve(x, w), cupy.cudnn.get_handle()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(6)))
    assert all(bits == expected for bits, _ in results)
    assert cupy.cudnn.get_handle() not in {handle for _, handle in results}


@pytest.mark.parametrize('dtype', 'efd')
def test_normalization_keeps_types(dtype):
    x, gamma, beta = draw(4, 3, 5, 5, dtype=dtype), draw(3), draw(3)
    gamma, beta = gamma.astype(dtype), beta.astype(dtype)
    mean, var = gamma * 0, gamma * 0 + 1
    y = F.batch_normalization(x, gamma, beta, running_mean=mean, running_var=var)
    assert y.dtype == mean.dtype == var.dtype == np.dtype(dtype)
    batch_mean = x.astype('d').mean((0, 2, 3)).get()
    np.testing.assert_allclose(mean.get(), 0.1 * batch_mean, atol=1e-3)
