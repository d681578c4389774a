"""Chainer's functions that ask cuDNN, each beside the same function without it.

Outputs, gradients of all inputs and what is updated in place are compared with those of
``use_cudnn='never'`` in float64, from the same inputs on the same GPU.
"""

from __future__ import annotations

import contextlib
import types
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import chainer
import chainer.functions as F
import numpy as np

from benchmarks.gpu.children import describe

# Of the largest difference, relative to the largest value of an array. TF32 would show
# in float32: its factors have errors of 5e-4.
TOLERANCES = {'float32': 5e-5, 'float16': 1e-2, 'float64': 1e-9}
_PREPARE = ('create', 'destroy', 'set', 'get', 'derive', 'dropoutGet', 'query')
WAYS: dict[str, dict[str, Any]] = {
    'default': {},
    'deterministic': {'cudnn_deterministic': True},
    'autotune': {'autotune': True},
    'autotune, deterministic': {'autotune': True, 'cudnn_deterministic': True},
}
Shapes = dict[str, tuple[int, ...]]


class Family(NamedTuple):
    """One kind of function.

    Attributes:
        shapes: Of the inputs, by name.
        function: Takes a namespace of inputs and states; gives what is differentiated,
            or a list of it.
        states: Shapes of arrays that the function may write into.
        config: Of Chainer, where cuDNN computes.
        ways: Names of ``WAYS``.
        dtypes: For which Chainer asks cuDNN.
    """

    shapes: Shapes
    function: Callable[[Any], Any]
    states: Shapes = {}
    config: dict[str, Any] = {}
    ways: Iterable[str] = ('default',)
    dtypes: Iterable[str] = tuple(TOLERANCES)


def _convolution(
    function: Callable[..., Any],
    x: tuple[int, ...],
    w: tuple[int, ...],
    outputs: int,
    **options: Any,
) -> Family:
    shapes = {'x': x, 'W': w, 'b': (outputs,)}
    return Family(shapes, lambda v: function(v.x, v.W, v.b, **options), ways=WAYS)


def _unary(shape: tuple[int, ...], function: Callable[[Any], Any]) -> Family:
    return Family({'x': shape}, lambda v: function(v.x))


def _normalization(shape: tuple[int, ...], channels: int, **config: Any) -> Family:
    return Family(
        {'x': shape, 'gamma': (channels,), 'beta': (channels,)},
        lambda v: F.batch_normalization(
            v.x, v.gamma, v.beta, running_mean=v.mean, running_var=v.var
        ),
        {'mean': (channels,), 'var': (channels,)},
        config,
    )


def _fixed(v: Any) -> Any:
    # Variances are positive.
    return F.fixed_batch_normalization(v.x, v.gamma, v.beta, v.mean, v.var**2 + 1)


def _transform(v: Any) -> Any:
    return F.spatial_transformer_sampler(
        v.x, F.spatial_transformer_grid(v.theta * 0.5, (7, 6))
    )


def _drop(v: Any) -> Any:
    """What any mask has: its values, its share, the same one in backward."""
    y = F.dropout(v.x, 0.5)
    (mask,) = chainer.grad([y], [v.x], [chainer.as_variable(v.x.array * 0 + 1)])
    kept = mask.array != 0
    values = [(y.array - v.x.array * mask.array) + 1, mask.array.max(), kept.mean()]
    values[-1] = values[-1] > 0.4 and values[-1] < 0.6
    return [chainer.as_variable(v.x.array.dtype.type(1) * value) for value in values]


UNITS, WIDTH, LAYERS = 6, 5, 2
GOING_ON = (4, 3, 3, 1, 1)  # sequences at each step


def _recurrent(
    function: Callable[..., Any], gates: int, directions: int, *, cell: bool = False
) -> Family:
    """An ``n_step`` function over packed sequences."""
    shapes: Shapes = {'hx': (LAYERS * directions, GOING_ON[0], UNITS)}
    if cell:
        shapes['cx'] = shapes['hx']
    for layer in range(LAYERS * directions):
        width = WIDTH if layer < directions else UNITS * directions
        for i in range(2 * gates):
            shapes[f'w{layer}_{i}'] = (UNITS, width if i < gates else UNITS)
            shapes[f'b{layer}_{i}'] = (UNITS,)
    shapes |= {f'x{i}': (count, WIDTH) for i, count in enumerate(GOING_ON)}

    def run(v: Any) -> Any:
        def take(letter: str) -> list[list[Any]]:
            return [
                [getattr(v, f'{letter}{layer}_{i}') for i in range(2 * gates)]
                for layer in range(LAYERS * directions)
            ]

        states = (v.hx, v.cx) if cell else (v.hx,)
        xs = [getattr(v, f'x{i}') for i in range(len(GOING_ON))]
        *last, ys = function(LAYERS, 0.0, *states, take('w'), take('b'), xs)
        return [*last, *ys]

    return Family(shapes, run)


FAMILIES: dict[str, Family] = {
    'convolution': _convolution(
        F.convolution_2d, (8, 64, 14, 14), (32, 64, 3, 3), 32, pad=1
    ),
    'convolution 1x1': _convolution(
        F.convolution_2d, (8, 64, 14, 14), (32, 64, 1, 1), 32
    ),
    'convolution 7x7, stride': _convolution(
        F.convolution_2d, (4, 3, 32, 32), (16, 3, 7, 7), 16, pad=3, stride=2
    ),
    'batch normalization': _normalization((8, 6, 9, 9), 6),
    'batch normalization, persistent': _normalization(
        (8, 6, 9, 9), 6, cudnn_fast_batch_normalization=True
    ),
    'batch normalization, per activation': _normalization((32, 12), 12)._replace(
        dtypes=('float32', 'float64')
    ),
    'batch normalization, fixed': Family(
        {name: (6,) for name in ('gamma', 'beta', 'mean', 'var')} | {'x': (8, 6, 9, 9)},
        _fixed,
    ),
    'relu': _unary((8, 100), F.relu),
    'max pooling': _unary(
        (2, 2, 15, 15), lambda x: F.max_pooling_2d(x, 3, 2, 1, cover_all=False)
    ),
    'max pooling, cover all': _unary(
        (2, 2, 15, 14), lambda x: F.max_pooling_2d(x, 3, 2)
    ),
    'average pooling': _unary(
        (2, 2, 15, 15), lambda x: F.average_pooling_2d(x, 3, 2, 1)
    ),
    'softmax': _unary((8, 10, 4), F.softmax),
    'log softmax': _unary((8, 10), F.log_softmax),
    'dropout': _unary((40, 100), lambda x: x)._replace(function=_drop),
    'n_step LSTM': _recurrent(F.n_step_lstm, 4, 1, cell=True),
    'deconvolution': _convolution(
        F.deconvolution_2d, (4, 16, 9, 9), (16, 8, 4, 4), 8, pad=1, stride=2
    ),
    'convolution, groups': _convolution(
        F.convolution_2d, (4, 16, 12, 12), (32, 4, 3, 3), 32, pad=1, groups=4
    ),
    'convolution, depthwise': _convolution(
        F.convolution_2d, (4, 16, 12, 12), (16, 1, 3, 3), 16, pad=1, groups=16
    ),
    'convolution, dilated': _convolution(
        F.convolution_2d, (4, 16, 15, 15), (16, 16, 3, 3), 16, pad=2, dilate=2
    ),
    'convolution 3D': _convolution(
        F.convolution_nd, (2, 8, 7, 7, 7), (16, 8, 3, 3, 3), 16, pad=1
    ),
    'deconvolution, groups': _convolution(
        F.deconvolution_2d, (4, 16, 9, 9), (16, 2, 3, 3), 8, pad=1, groups=4
    ),
    'deconvolution 3D': _convolution(
        F.deconvolution_nd, (2, 8, 5, 5, 5), (8, 4, 3, 3, 3), 4, pad=1, stride=2
    ),
    'max pooling 3D': _unary(
        (1, 2, 7, 7, 7), lambda x: F.max_pooling_nd(x, 3, 2, cover_all=False)
    ),
    'average pooling 3D': _unary(
        (1, 2, 7, 7, 7), lambda x: F.average_pooling_nd(x, 3, 2, 1)
    ),
    'average pooling, without pad': _unary(
        (2, 2, 15, 15), lambda x: F.average_pooling_nd(x, 3, 2, 1, pad_value=None)
    ),
    'group normalization': Family(
        {'x': (4, 8, 6, 6), 'gamma': (8,), 'beta': (8,)},
        lambda v: F.group_normalization(v.x, 4, v.gamma, v.beta),
    ),
    'sigmoid': _unary((8, 100), F.sigmoid),
    'tanh': _unary((8, 100), F.tanh),
    'clipped relu': _unary((8, 100), lambda x: F.clipped_relu(x, 0.5)),
    'spatial transformer': Family(
        {'x': (2, 3, 8, 9), 'theta': (2, 2, 3)}, _transform, dtypes=('float32',)
    ),
    'n_step GRU': _recurrent(F.n_step_gru, 3, 1),
    'n_step RNN': _recurrent(
        lambda *args: F.n_step_rnn(*args, activation='tanh'), 1, 1
    ),
    'n_step LSTM, bidirectional': _recurrent(F.n_step_bilstm, 4, 2, cell=True),
    'n_step GRU, bidirectional': _recurrent(F.n_step_bigru, 3, 2),
    'n_step RNN, bidirectional': _recurrent(
        lambda *args: F.n_step_birnn(*args, activation='relu'), 1, 2
    ),
}


def compare(name: str, dtype: str, called: set[str]) -> dict[str, Any]:
    """What a family's row says.

    Args:
        name: Of the family.
        dtype: Of all arrays.
        called: To which the names of functions of cuDNN are added as they are called.
    """
    family = FAMILIES[name]
    row: dict[str, Any] = {'family': name, 'dtype': dtype, 'ways': {}}
    expected = expect(family, dtype)
    called.clear()
    for way in family.ways:
        try:
            row['ways'][way] = measure(family, dtype, expected, WAYS[way])
        except Exception as error:
            row['ways'][way] = {'why': describe(error)}
    row['functions'] = sorted(n for n in called if not n.startswith(_PREPARE))
    return {**row, **_judge(row, TOLERANCES[dtype])}


def _judge(row: dict[str, Any], tolerance: float) -> dict[str, Any]:
    failed = [f'{w}: {r["why"]}' for w, r in row['ways'].items() if 'why' in r]
    good = [r for r in row['ways'].values() if 'why' not in r]
    verdict: dict[str, Any] = {'tolerance': tolerance, 'agrees': False}
    if good:
        worst = max(good, key=lambda r: r['largest_difference'])
        verdict |= {key: worst[key] for key in ('largest_difference', 'where')}
        verdict['repeats'] = all(r['repeats'] for r in good)
    if failed:
        verdict['why'] = '; '.join(failed)
    elif not row['functions']:
        verdict['why'] = 'cuDNN was not called'
    elif not all(r['repeats'] for w, r in row['ways'].items() if 'determin' in w):
        verdict['why'] = 'other bits when repeated with cudnn_deterministic'
    else:
        verdict['agrees'] = worst['largest_difference'] <= tolerance
    return verdict


def expect(family: Family, dtype: str) -> dict[str, Any]:
    """The results without cuDNN, in float64, of inputs that ``dtype`` can tell."""
    with chainer.using_config('use_cudnn', 'never'):
        return _results(family, dtype, 'float64')


def measure(
    family: Family, dtype: str, expected: Mapping[str, Any], way: Mapping[str, Any]
) -> dict[str, Any]:
    """How far cuDNN's results are from others, and whether it repeats them.

    Args:
        family: The functions.
        dtype: Of all arrays.
        expected: What :func:`expect` gives.
        way: Chainer's configuration, as in ``WAYS``.
    """
    with contextlib.ExitStack() as stack:
        for key, value in {'use_cudnn': 'always', **family.config, **way}.items():
            stack.enter_context(chainer.using_config(key, value))
        found, again = (_results(family, dtype, dtype) for _ in range(2))
    differences = {name: difference(expected[name], found[name]) for name in expected}
    where = max(differences, key=lambda name: differences[name])
    return {
        'largest_difference': differences[where],
        'where': where,
        'repeats': all(found[n].tobytes() == again[n].tobytes() for n in found),
    }


def difference(expected: Any, found: Any) -> float:
    """The largest difference of two arrays, relative to the largest value expected."""
    if expected.shape != found.shape:
        return float('inf')
    apart = np.abs(expected - found.astype('d')).max(initial=0)
    relative = float(apart / max(np.abs(expected).max(initial=0), 1e-30))
    return relative if np.isfinite(relative) else float('inf')


def _draw(shapes: Shapes, dtype: str) -> dict[str, Any]:
    """No number is twice in an array, or zero: maxima and ReLUs have one answer."""
    result = {}
    for name, shape in shapes.items():
        rng = np.random.RandomState(zlib.crc32(name.encode()))
        size = int(np.prod(shape))
        values = (rng.permutation(size) + 0.5) / size * 2 - 1
        result[name] = values.reshape(shape).astype(dtype)
    return result


def _results(family: Family, drawn: str, dtype: str) -> dict[str, Any]:
    """Outputs, gradients and states, on the host.

    Args:
        family: The functions.
        drawn: The type in which inputs are drawn.
        dtype: The one in which they are given.
    """
    send = chainer.get_device('@cupy:0').send
    given = _draw({**family.shapes, **family.states}, drawn)
    states = {name: send(given[name].astype(dtype)) for name in family.states}
    inputs = {
        name: chainer.Variable(send(given[name].astype(dtype)))
        for name in family.shapes
    }
    outputs = family.function(types.SimpleNamespace(**inputs, **states))
    outputs = outputs if isinstance(outputs, list) else [outputs]
    result = {f'output {i}': output.array for i, output in enumerate(outputs)}
    wanted = [output for output in outputs if output.creator is not None]
    if wanted:
        shapes = {f'seed {i}': output.shape for i, output in enumerate(wanted)}
        seeds = _draw(shapes, 'float16').values()  # the same ones in every type
        seeds = [chainer.Variable(send(seed.astype(dtype))) for seed in seeds]
        gradients = chainer.grad(wanted, list(inputs.values()), seeds)
        result |= {
            f'gradient of {name}': gradient.array
            for name, gradient in zip(inputs, gradients, strict=True)
            if gradient is not None
        }
    host = chainer.get_device('@numpy').send
    return {name: host(array) for name, array in {**result, **states}.items()}
