"""Ways to convolve, each with its time and workspace, by a device model.

======================  =================================  ==========================
algorithm               multiplications                    workspace
======================  =================================  ==========================
gemm                    as counted in :mod:`.costs`        the model's
winograd, 3 x 3         1 / 2.25 of that, F(2 x 2)         the model's
winograd-nonfused       36 T C K, F(4 x 4)                 36 (T C + T K + C K)
fft                     4 F N C K                          2 F (N C + N K + C K)
======================  =================================  ==========================

N pictures, C channels in and K out, T tiles of 4 x 4 outputs, F frequencies of one
channel; workspaces in elements. The last two write the transformed arrays to the
workspace and read them again: their time is that of the bytes, and of the product of
matrices. Each pass (forward, gradient of the input, gradient of the weights) has the
same numbers. All but gemm are for stride 1, one group and single precision. Sources:
Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016, section 4;
Mathieu, Henaff and LeCun, "Fast training of convolutional networks through FFTs",
2014, section 2. What cuDNN really reaches is not known here: these are the rooflines
of the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from chainer_hybridmem.forecasting.estimation.costs import Cost, operation_costs
from chainer_hybridmem.forecasting.estimation.device_models import DeviceModel
from chainer_hybridmem.planning.records.profile import Phase, Profile
from chainer_hybridmem.planning.records.specs import parse_spec

GEMM, WINOGRAD, NONFUSED, FFT = 'gemm', 'winograd', 'winograd-nonfused', 'fft'
FUNCTION = 'Convolution2DFunction'
TILE, TILE_POINTS, FUSED_SAVING = 4, 36, 2.25
FACTORS = 2, 3, 5  # of the lengths that a Fourier transform is quick for
ITEM_BYTES = 4


class Algorithm(NamedTuple):
    """One way to run an operation that convolves.

    Attributes:
        name (str): Of each pass, joined by ``+``.
        seconds (float): Of the whole operation.
        workspace_bytes (int): Of the pass that needs most.
    """

    name: str
    seconds: float
    workspace_bytes: int


Algorithms = Mapping[int, tuple[Algorithm, ...]]
"""By operation; each faster than the ones before it, and with a larger workspace."""


class _Shape(NamedTuple):
    pictures: int
    channels: int
    filters: int
    inputs: tuple[int, int]
    outputs: int  # of one channel of one picture
    kernel: tuple[int, int]
    bytes_moved: float
    flops: float


def list_algorithms(profile: Profile, model: DeviceModel) -> Algorithms:
    """The algorithms of every operation that convolves.

    Args:
        profile: With shapes of the batch size that is meant, not lowered yet.
        model: Tells times, and what any convolution may use as workspace.
    """
    costs = operation_costs(profile)
    result = {}
    for op in profile.operations:
        forward = profile.operations[op.forward] if op.forward >= 0 else op
        if forward.function != FUNCTION or op.phase is Phase.UPDATE:
            continue
        passes = _algorithms_of(forward.specs, costs[forward.index], model)
        gemm = passes[0].seconds
        both = op.phase is Phase.BACKWARD and (
            costs[op.index].flops > 1.5 * costs[forward.index].flops
        )
        count = 2 if both else 1
        rest = model.seconds(costs[op.index]) - count * gemm
        result[op.index] = _frontier(passes, count, rest)
    return result


def with_seconds(profile: Profile, chosen: Mapping[int, Algorithm]) -> Profile:
    """The profile with the times of the chosen algorithms, those of replays, too."""
    return dataclasses.replace(
        profile,
        operations=tuple(
            dataclasses.replace(op, device_seconds=chosen[op.index].seconds)
            if op.index in chosen
            else op
            for op in profile.operations
        ),
        recipes=tuple(
            dataclasses.replace(recipe, seconds=chosen[recipe.operation].seconds)
            if recipe.operation in chosen and not recipe.covers
            else recipe
            for recipe in profile.recipes
        ),
    )


def _frontier(
    passes: list[Algorithm], count: int, rest_seconds: float
) -> tuple[Algorithm, ...]:
    found = []
    for algorithms in itertools.product(passes, repeat=count):
        name = '+'.join(dict.fromkeys(algorithm.name for algorithm in algorithms))
        seconds = rest_seconds + sum(algorithm.seconds for algorithm in algorithms)
        found.append(
            Algorithm(name, seconds, max(w.workspace_bytes for w in algorithms))
        )
    result: list[Algorithm] = []
    for algorithm in sorted(found, key=lambda w: (w.workspace_bytes, w.seconds)):
        if not result or algorithm.seconds < result[-1].seconds:
            result.append(algorithm)
    return tuple(result)


def _algorithms_of(
    specs: tuple[str, ...], cost: Cost, model: DeviceModel
) -> list[Algorithm]:
    """The algorithms of one pass; the first is gemm."""
    least = model.workspace_bytes
    algorithms = [Algorithm(GEMM, model.seconds(cost), least)]
    shape = _shape(specs, cost)
    if shape is None:
        return algorithms
    if shape.kernel == (3, 3):
        fused = dataclasses.replace(cost, flops=cost.flops / FUSED_SAVING)
        algorithms.append(Algorithm(WINOGRAD, model.seconds(fused), least))
        algorithms.append(_nonfused(shape, model))
    if max(shape.kernel) > 1:
        algorithms.append(_fft(shape, model))
    return algorithms


def _shape(specs: tuple[str, ...], cost: Cost) -> _Shape | None:
    """What the transforms need to know; None where they are no help."""
    if len(specs) < 2:
        return None
    (dtype, x), (_, w) = parse_spec(specs[0]), parse_spec(specs[1])
    if dtype != 'float32' or len(x) != 4 or len(w) != 4 or x[1] != w[1]:
        return None
    outputs = round(cost.flops / (2 * x[0] * math.prod(w)))
    valid = [side - k + 1 for side, k in zip(x[2:], w[2:], strict=True)]
    full = [side + k - 1 for side, k in zip(x[2:], w[2:], strict=True)]
    if min(valid) < 1 or not math.prod(valid) <= outputs <= math.prod(full):
        return None  # a larger stride
    return _Shape(
        x[0],
        x[1],
        w[0],
        (x[2], x[3]),
        outputs,
        (w[2], w[3]),
        cost.nbytes,
        cost.flops,
    )


def _nonfused(s: _Shape, model: DeviceModel) -> Algorithm:
    side = math.sqrt(s.outputs)
    tiles = s.pictures * math.ceil(side / TILE) ** 2
    both = s.channels + s.filters
    elements = TILE_POINTS * (tiles * both + s.channels * s.filters)
    products = 2.0 * TILE_POINTS * tiles * s.channels * s.filters
    return _transformed(NONFUSED, s, model, products, ITEM_BYTES * elements)


def _fft(s: _Shape, model: DeviceModel) -> Algorithm:
    high, wide = (
        _quick_length(side + k - 1) for side, k in zip(s.inputs, s.kernel, strict=True)
    )
    frequencies = high * (wide // 2 + 1)
    elements = frequencies * (
        s.pictures * (s.channels + s.filters) + s.channels * s.filters
    )
    products = 8.0 * frequencies * s.pictures * s.channels * s.filters
    return _transformed(FFT, s, model, products, 2 * ITEM_BYTES * elements)


def _transformed(
    name: str, s: _Shape, model: DeviceModel, products: float, workspace_bytes: int
) -> Algorithm:
    """Transforms into the workspace, products there, and back from it."""
    there_and_back = Cost('elementwise', 0.0, s.bytes_moved + workspace_bytes, 3)
    product = Cost('gemm', products, float(workspace_bytes), 1)
    seconds = model.seconds(there_and_back) + model.seconds(product)
    return Algorithm(name, seconds, workspace_bytes)


def _quick_length(least: int) -> int:
    for length in itertools.count(least):
        left = length
        for factor in FACTORS:
            while left % factor == 0:
                left //= factor
        if left == 1:
            return length
    raise AssertionError
