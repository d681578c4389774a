"""The real cuDNN 9 on a machine without a GPU: ``make try-cudnn`` fetches it.

What a GPU computes is not here; names, numbers, types and shapes are.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import random
import re

import pytest

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
from chainer.utils import conv

from chainer_hybridmem.training.cudnn import (
    arithmetic,
    constants,
    convolutions,
    descriptors,
    functions,
    recurrent,
)

PACKAGE = os.environ.get('CUDNN_PACKAGE')  # one in a process: descriptors are kept
pytestmark = pytest.mark.skipif(not PACKAGE, reason='needs cuDNN: make try-cudnn')
FLOAT, DRAWN = constants.CUDNN_DATA_FLOAT, 500


@pytest.fixture
def package(monkeypatch):
    """The folder of a package, whose library is the one that is called."""
    folder = pathlib.Path(PACKAGE) / 'nvidia/cudnn'
    library = ctypes.CDLL(str(folder / 'lib/libcudnn.so.9'))
    monkeypatch.setattr(functions, 'load', lambda: library)
    monkeypatch.setattr(arithmetic, 'may_use_tf32', lambda: False)  # it asks CuPy
    functions.check_names.cache_clear()
    yield folder
    functions.check_names.cache_clear()


@pytest.fixture
def headers(package):
    """All of them without comments."""
    texts = [path.read_text() for path in sorted((package / 'include').glob('*.h'))]
    return re.sub(r'/\*.*?\*/', '', '\n'.join(texts), flags=re.DOTALL)


def test_every_function_is_exported(package):
    functions.check_names()
    assert functions.getVersion() // 10_000 == 9


def letters(parameter):
    """Those that may stand for a parameter of a function; see [signatures]."""
    kind = parameter.rpartition(' ')[0].replace('const', '').strip()
    if '[' in parameter or '*' in parameter:
        pointed = parameter.replace('const', '').split('*')[0].strip()
        capital = {'size_t': 'Z', 'void': 'P' if '**' in parameter else ''}
        return 'p' + capital.get(pointed, 'P' if 'Descriptor_t' in pointed else 'IP')
    plain = {'int': 'i', 'int32_t': 'i', 'unsigned': 'u', 'uint32_t': 'u'}
    plain |= {'size_t': 'z', 'double': 'd', 'float': 'f', 'unsigned long long': 'q'}
    plain |= {'cudnnHandle_t': 'h', 'cudaStream_t': 'p'}
    return plain.get(kind, 'p' if kind.endswith('Descriptor_t') else 'i')


def test_every_signature_is_that_of_the_headers(headers):
    declared = dict(re.findall(r'\bcudnn(\w+)\s*\(([^;{}()]*)\)\s*;', headers))
    for name, signature in functions.SIGNATURES.items():
        parameters = [' '.join(text.split()) for text in declared[name].split(',')]
        allowed = [letters(parameter) for parameter in parameters]
        assert len(allowed) == len(signature), name
        for letter, may_be in zip(signature, allowed, strict=True):
            assert letter in may_be, (name, signature, allowed)


def test_every_number_is_that_of_the_headers(headers):
    found = {}
    for body in re.findall(r'enum\s*\{([^}]*)\}', headers):
        for entry in filter(None, map(str.strip, body.split(','))):
            name, _, value = entry.partition('=')
            found[name.split()[0]] = value.strip()
    found |= dict(re.findall(r'#define (CUDNN_\w+) ([\d.]+)', headers))
    ours = {name: n for name, n in vars(constants).items() if name.startswith('CUDNN')}
    assert len(ours) > 60
    for name, number in ours.items():
        assert float(found[name]) == number, name


def test_what_is_told_of_an_algorithm_has_the_fields_of_the_headers(headers):
    kinds = {'float': ctypes.c_float, 'size_t': ctypes.c_size_t}
    for part in ('Fwd', 'BwdData', 'BwdFilter'):
        pattern = rf'struct cudnnConvolution{part}AlgoPerfStruct \{{(.*?)\}}'
        body, *_ = re.findall(pattern, headers, flags=re.DOTALL)
        fields = [line.split() for line in body.split(';') if line.strip()]
        theirs = [
            ctypes.c_int * 3 if name == 'reserved[3]' else kinds.get(kind, ctypes.c_int)
            for kind, name in fields
        ]
        assert [kind for _, kind in convolutions._Performance._fields_] == theirs


def draw(rng):
    """A convolution or a pooling that gives at least one element."""
    while True:
        count = rng.choice([2, 2, 3])
        size, ksize, stride, pad, dilation = (
            tuple(rng.randint(least, most) for _ in range(count))
            for least, most in ((1, 24), (1, 5), (1, 4), (0, 3), (1, 3))
        )
        fits = all(
            n + 2 * p >= d * (k - 1) + 1
            for n, k, p, d in zip(size, ksize, pad, dilation, strict=True)
        )
        if fits:
            return size, ksize, stride, pad, dilation


def ask(name, count, *arguments):
    found = (ctypes.c_int * count)()
    functions.FUNCTIONS[name](*arguments, count, found)
    return tuple(found)


def test_drawn_convolutions_have_the_shapes_of_chainer(package):
    rng = random.Random(0)
    for _ in range(DRAWN):
        size, ksize, stride, pad, dilation = draw(rng)
        groups, batch = rng.choice([1, 1, 2, 3]), rng.randint(1, 9)
        inputs, outputs = groups * rng.randint(1, 5), groups * rng.randint(1, 5)
        x = descriptors.images(FLOAT, (batch, inputs, *size), 0)
        w = descriptors.filters(FLOAT, (outputs, inputs // groups, *ksize), 0)
        convolution = convolutions.create_convolution_descriptor(
            pad, stride, _Float32, dilation=dilation, groups=groups
        )
        found = ask(
            'getConvolutionNdForwardOutputDim', 2 + len(size), convolution.value,
            x.value, w.value,
        )  # fmt: skip
        expected = tuple(
            conv.get_conv_outsize(n, k, s, p, d=d)
            for n, k, s, p, d in zip(size, ksize, stride, pad, dilation, strict=True)
        )
        assert found == (batch, outputs, *expected)


class _Float32:
    char = 'f'


def test_drawn_poolings_have_the_shapes_of_chainer(package):
    rng, seen = random.Random(1), 0
    while seen < DRAWN:
        size, ksize, stride, pad, _ = draw(rng)
        if any(p >= k for p, k in zip(pad, ksize, strict=True)):
            continue  # windows in the padding alone
        seen += 1
        x = descriptors.tensor(FLOAT, (2, 3, *size))
        pooling = descriptors.pooling(constants.CUDNN_POOLING_MAX, ksize, stride, pad)
        found = ask(
            'getPoolingNdForwardOutputDim', 2 + len(size), pooling.value, x.value
        )
        expected = tuple(
            conv.get_conv_outsize(n, k, s, p)
            for n, k, s, p in zip(size, ksize, stride, pad, strict=True)
        )
        assert found == (2, 3, *expected)


@pytest.mark.parametrize('shape', [(2**32 + 8, 3, 1, 1), (2, 2**31, 1, 1)])
@pytest.mark.parametrize('layout', range(2))
def test_sizes_that_no_int_holds_are_refused(package, shape, layout):
    with pytest.raises(OverflowError, match='up to 2,147,483,647'):
        descriptors.images(FLOAT, shape, layout)


def test_channels_last_are_what_the_library_has_for_them(package):
    theirs = descriptors.make('Tensor')
    functions.FUNCTIONS['setTensor4dDescriptor'](
        theirs.value, constants.CUDNN_TENSOR_NHWC, FLOAT, 2, 3, 5, 6
    )
    ours = descriptors.images(FLOAT, (2, 5, 6, 3), constants.CUDNN_TENSOR_NHWC)
    found = []
    for descriptor in (theirs, ours):
        sizes, strides = (ctypes.c_int * 4)(), (ctypes.c_int * 4)()
        read = functions.FUNCTIONS['getTensorNdDescriptor']
        found.append((read(descriptor.value, 4, sizes, strides), *sizes, *strides))
    assert found[0] == found[1]


def test_other_descriptors_are_accepted(package):
    """Each is set once, with everything that the package ever sets."""
    descriptors.activation(constants.CUDNN_ACTIVATION_CLIPPED_RELU, 0.5)
    descriptors.images(FLOAT, (2, 5, 6, 3), constants.CUDNN_TENSOR_NHWC)
    descriptors.filters(FLOAT, (4, 5, 6, 3), constants.CUDNN_TENSOR_NHWC)
    descriptors.filters(FLOAT, (40, 1, 1), constants.CUDNN_TENSOR_NCHW)
    sizes = descriptors.ints((2, 1, 4, 5))
    descriptors.create_spatial_transformer_descriptor(
        constants.CUDNN_SAMPLER_BILINEAR, _Float32, 4, ctypes.addressof(sizes)
    )
    recurrent._describe_sequences(FLOAT, 4, 7, recurrent._count_steps([3, 2, 2, 1]))
    parameters, x = descriptors.make('Tensor'), descriptors.tensor(FLOAT, (8, 3, 1, 1))
    for mode in range(3):
        functions.FUNCTIONS['deriveBNTensorDescriptor'](parameters.value, x.value, mode)
    dropout = descriptors.make('Dropout')
    for mode in range(4):
        for direction in range(2):
            recurrent.create_rnn_descriptor(
                5, 2, dropout, constants.CUDNN_LINEAR_INPUT, direction, mode, FLOAT
            ).set(7)
