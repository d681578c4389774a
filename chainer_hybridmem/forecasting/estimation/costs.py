"""How much each operation computes and moves: FLOPs, bytes, kernel launches.

Notation: |a| is the number of elements of an array, "bytes a" their bytes; x is
the first input, y the output, W the weights, gx and gy their gradients.

======================  ================================  =========================
function                FLOPs forward                     bytes forward; backward
======================  ================================  =========================
convolution             2 |y| |W| / out channels          x + W + y; twice that
deconvolution           2 |x| |W| / in channels           the same
linear                  2 |x| |W| / in channels           the same
matmul                  2 √(|a| |b| |y| / matrices)       a + b + y; twice that
batch normalisation     -                                 2 x + y; 2 x + 2 gy + gx
LRN                     -                                 2 x + 4 y; x + y + 2 gy + 5 gx
dropout                 -                                 x + 3 y; gy + mask + gx
activation, addition,   -                                 x + y; what backward keeps
pooling, anything else                                    + gy + gx
reshape, transpose      -                                 none
a pass of a recipe      -                                 inputs + products; no backward
update                  -                                 3 parameters + 2 state
======================  ================================  =========================

Backward of a convolution, a deconvolution, a linear layer or a matrix product
computes twice what forward does: one product for each gradient. An input that
needs no gradient (the pictures) saves one of them. Sums of gradients, where an
input has several uses, are counted with the function whose gradient completes them.
Normalisation passes twice over x, once for the statistics. Through im2col a
convolution also writes the matrix of patches, copies it in another order, and reads
both: 4 passes for each product of matrices. A recipe that is a pass is one elementwise
kernel (one of pooling, for pooling), whatever it covers; any other replays a forward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from chainer_hybridmem.planning.records.profile import (
    Category,
    MoveCost,
    Operation,
    Phase,
    Profile,
    Recipe,
    SlotKind,
)
from chainer_hybridmem.planning.records.specs import parse_spec, spec_bytes

CLASSES = ('convolution', 'gemm', 'normalization', 'pooling', 'elementwise')
"""What device models have an efficiency for."""

CONVOLUTIONS = frozenset({'Convolution2DFunction', 'ConvolutionND'})
DECONVOLUTIONS = frozenset({'Deconvolution2DFunction', 'DeconvolutionND'})
POOLINGS = frozenset(
    {'MaxPooling2D', 'MaxPoolingND', 'AveragePooling2D', 'AveragePoolingND'}
)
NORMALIZATIONS = frozenset({'BatchNormalization', 'FixedBatchNormalization'})
PRODUCTS = frozenset({'LinearFunction', 'MatMul', 'BatchL2NormSquared'})
LRN = 'LocalResponseNormalization'
VIEWS = frozenset(
    {'Reshape', 'Transpose', 'ExpandDims', 'Squeeze', 'Swapaxes', 'Moveaxis'}
    | {'Rollaxis', 'Separate', 'Identity', 'Flatten'}
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one operation asks of a device.

    Attributes:
        kind (str): One of :data:`CLASSES`.
        flops (float): Multiplications and additions of matrix products.
        nbytes (float): Bytes read from and written to device memory.
        launches (int): Kernels started.
    """

    kind: str
    flops: float
    nbytes: float
    launches: int


def operation_costs(profile: Profile, im2col: bool = False) -> list[Cost]:
    """Cost of every operation of a profile.

    Args:
        profile: With shapes of the batch size that is meant.
        im2col: Whether convolutions go through a matrix of patches.
    """
    return _Counter(profile, im2col).run()


def pass_cost(profile: Profile, recipe: Recipe) -> Cost:
    """Cost of a recipe that is a pass: one kernel over inputs and products."""
    kind = kind_of(profile.operations[recipe.operation].function)
    touched = {*recipe.inputs, *recipe.products}
    nbytes = sum(profile.storages[s].nbytes for s in touched)
    return Cost('pooling' if kind == 'pooling' else 'elementwise', 0.0, nbytes, 1)


def kind_of(function: str) -> str:
    """The class of a function, by the name of its class in Chainer."""
    if function in CONVOLUTIONS or function in DECONVOLUTIONS:
        return 'convolution'
    if function in PRODUCTS:
        return 'gemm'
    if function in NORMALIZATIONS or function == LRN:
        return 'normalization'
    if function in POOLINGS:
        return 'pooling'
    return 'elementwise'


def gradients_by_storage(profile: Profile) -> dict[int, list[int]]:
    """Backward operations that make a gradient of each storage.

    Where there are several, the gradients are added. A function that only looks at
    its input in another way does not count beside one that uses what it makes.
    """
    backward_of = {
        op.forward: op.index
        for op in profile.operations
        if op.phase is Phase.BACKWARD and op.forward >= 0
    }
    result: dict[int, list[int]] = {}
    for op in profile.operations:
        if op.index not in backward_of or op.function in VIEWS:
            continue
        for storage in dict.fromkeys(op.reads):
            item = profile.storages[storage]
            if item.producer >= 0 and item.category is not Category.PARAMETER:
                result.setdefault(storage, []).append(backward_of[op.index])
    return result


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Arrays of one forward function.

    Attributes:
        shapes (tuple): Of every input.
        parameters (tuple of bool): Which inputs are parameters.
        inputs (int): Bytes of those that are not.
        weights (int): Bytes of those that are.
        output (int): Bytes of all outputs.
        itemsize (int): Bytes of one element of the first input.
        attributes (int): Bytes of what the function keeps besides.
        differentiable (bool): Whether the first input has a gradient.
    """

    shapes: tuple[tuple[int, ...], ...]
    parameters: tuple[bool, ...]
    inputs: int
    weights: int
    output: int
    itemsize: int
    attributes: int
    differentiable: bool

    @property
    def output_elements(self) -> float:
        return self.output / self.itemsize


class _Counter:
    def __init__(self, profile: Profile, im2col: bool) -> None:
        self.profile = profile
        self.im2col = im2col
        self.gradients = gradients_by_storage(profile)
        self.made: dict[int, list[int]] = {}
        for storage in profile.storages:
            if storage.producer >= 0:
                self.made.setdefault(storage.producer, []).append(storage.id)

    def run(self) -> list[Cost]:
        costs = []
        for op in self.profile.operations:
            if op.phase is Phase.FORWARD:
                costs.append(self._forward(op, self._sizes(op)))
            elif op.phase is Phase.BACKWARD and op.forward >= 0:
                costs.append(self._backward(op))
            elif op.phase is Phase.UPDATE:
                costs.append(self._update())
            else:
                costs.append(self._other(op))
        return costs

    # -- sizes ----------------------------------------------------------------
    def _sizes(self, op: Operation) -> _Sizes:
        storages = self.profile.storages
        parsed = [parse_spec(spec) for spec in op.specs]
        paired = len(op.reads) == len(op.specs)
        kinds = [
            paired and storages[op.reads[i]].category is Category.PARAMETER
            for i in range(len(op.specs))
        ]
        nbytes = [spec_bytes(spec) for spec in op.specs]
        shapes = tuple(shape for _, shape in parsed)
        elements = math.prod(shapes[0]) if shapes else 0
        output, attributes = self._produced(op)
        if not output and nbytes:  # a view: it has what it is a view of
            output = nbytes[0]
        first = storages[op.reads[0]] if op.reads else None
        return _Sizes(
            shapes=shapes,
            parameters=tuple(kinds),
            inputs=sum(n for n, k in zip(nbytes, kinds, strict=True) if not k),
            weights=sum(n for n, k in zip(nbytes, kinds, strict=True) if k),
            output=output,
            itemsize=nbytes[0] // elements if elements else 4,
            attributes=attributes,
            differentiable=first is None or first.producer >= 0,
        )

    def _produced(self, op: Operation) -> tuple[int, int]:
        """Bytes of outputs, and of arrays kept as attributes."""
        output = attributes = 0
        written = set(op.writes)
        for index in self.made.get(op.index, ()):
            storage = self.profile.storages[index]
            own = {slot.kind for slot in storage.slots if slot.operation == op.index}
            if own == {SlotKind.ATTRIBUTE} and not storage.forward_uses:
                attributes += storage.nbytes
            elif index in written or storage.forward_uses or storage.slots:
                output += storage.nbytes
        return output, attributes

    # -- forward --------------------------------------------------------------
    def _forward(self, op: Operation, s: _Sizes) -> Cost:
        function, kind = op.function, kind_of(op.function)
        flops = self._flops(function, s)
        nbytes: float = s.inputs + s.weights + s.output + s.attributes
        launches = 2 if kind in ('convolution', 'gemm') else 1
        if kind == 'convolution' and self.im2col:
            nbytes += 4 * self._patches(function, s)
            launches += 3
        elif function in NORMALIZATIONS:
            nbytes += s.inputs
        elif function == LRN:
            nbytes = 2 * s.inputs + 4 * s.output
            launches = 3
        elif function == 'Dropout':
            nbytes, launches = s.inputs + 3 * s.output, 2
        elif function in VIEWS:
            nbytes, launches = 0.0, 0
        elif function == 'SoftmaxCrossEntropy':
            nbytes, launches = 4.0 * s.inputs, 6
        return Cost(kind, flops, nbytes, launches)

    def _flops(self, function: str, s: _Sizes) -> float:
        """FLOPs of one matrix product."""
        if len(s.shapes) < 2 or not s.shapes[1]:
            return 0.0
        x, w = s.shapes[0], s.shapes[1]
        if function in CONVOLUTIONS:
            return 2.0 * s.output_elements * math.prod(w[1:])
        if function in DECONVOLUTIONS:
            return 2.0 * math.prod(x) * math.prod(w[1:])
        if function == 'LinearFunction':
            return 2.0 * math.prod(x) * w[0]
        if function == 'MatMul':
            matrices = max(1, math.prod(x[:-2]))
            product = math.prod(x) * math.prod(w) * s.output_elements
            return 2.0 * math.sqrt(product / matrices)
        return 0.0

    def _patches(self, function: str, s: _Sizes) -> float:
        """Bytes of a convolution's matrix of patches."""
        x, w = s.shapes[0], s.shapes[1]
        if function in DECONVOLUTIONS:
            return math.prod(x) * math.prod(w[2:]) * w[1] * s.itemsize / max(1, x[1])
        elements = s.output_elements / max(1, w[0]) * x[1] * math.prod(w[2:])
        return elements * s.itemsize

    # -- backward -------------------------------------------------------------
    def _backward(self, op: Operation) -> Cost:
        forward = self.profile.operations[op.forward]
        s, function = self._sizes(forward), forward.function
        kind = kind_of(function)
        gradient = s.inputs if s.differentiable else 0
        kept = sum(self.profile.storages[i].nbytes for i in set(op.reads))
        nbytes: float = kept + s.output + gradient
        flops, launches = 0.0, 1
        if kind in ('convolution', 'gemm'):
            products = 2 if s.differentiable else 1
            flops = products * self._flops(function, s)
            nbytes = products * (s.inputs + s.weights + s.output)
            launches = products + 1
            if kind == 'convolution' and self.im2col:
                nbytes += products * 4 * self._patches(function, s)
                launches += 3 * products
        elif function in NORMALIZATIONS:
            nbytes = 2 * s.inputs + 2 * s.output + gradient
        elif function == LRN:
            nbytes, launches = 2 * s.inputs + 2 * s.output + 5 * gradient, 3
        elif function in VIEWS or function == 'Add':
            nbytes, launches = 0.0, 0  # hands the same array on
        added = self._added_bytes(op, forward)
        return Cost(kind, flops, nbytes + added, launches + (1 if added else 0))

    def _added_bytes(self, op: Operation, forward: Operation) -> float:
        """Bytes moved to add the gradients of all uses of the first input."""
        if not forward.reads:
            return 0.0
        users = self.gradients.get(forward.reads[0], [])
        if len(users) < 2 or max(users) != op.index:
            return 0.0
        nbytes = spec_bytes(forward.specs[0]) if forward.specs else 0
        return 3.0 * (len(users) - 1) * nbytes

    # -- the rest -------------------------------------------------------------
    def _update(self) -> Cost:
        parameters = state = count = 0
        for storage in self.profile.storages:
            if storage.category is Category.PARAMETER:
                parameters += storage.nbytes
                count += 1
            elif storage.category is Category.OPTIMIZER_STATE:
                state += storage.nbytes
        # No operation lists a state that it does not touch: momentum is the rule.
        state = state or parameters
        return Cost('elementwise', 0.0, 3 * parameters + 2 * state, count)

    def _other(self, op: Operation) -> Cost:
        nbytes = sum(self.profile.storages[i].nbytes for i in {*op.reads, *op.writes})
        return Cost('elementwise', 0.0, nbytes, 1)


def time_model(
    profile: Profile, cost_seconds: Callable[[Cost], float], im2col: bool
) -> Profile:
    """Gives every operation and recipe the time that a device model says.

    What a session costs the recorded machine says nothing of another one.

    Args:
        profile: With shapes of the batch size that is meant.
        cost_seconds: Seconds of one cost.
        im2col: Whether convolutions go through a matrix of patches.
    """
    seconds = [cost_seconds(cost) for cost in operation_costs(profile, im2col)]
    return dataclasses.replace(
        profile,
        operations=tuple(
            dataclasses.replace(
                op, device_seconds=s, host_seconds=0.0, session_seconds=0.0
            )
            for op, s in zip(profile.operations, seconds, strict=True)
        ),
        recipes=tuple(
            dataclasses.replace(
                recipe,
                seconds=(
                    cost_seconds(pass_cost(profile, recipe))
                    if recipe.covers
                    else seconds[recipe.operation]
                ),
            )
            for recipe in profile.recipes
        ),
        move_cost=MoveCost(),
    )


# -- how recipes are meant on a device: whole forwards, or passes ---------------
# A recording on the host makes much again in one pass over several functions
# (`Recipe.covers`): a ReLU behind a batch normalisation straight from the output of the
# convolution, say. So does a GPU, if a trial has found a kernel that rounds as its
# forward does (training/recompute/cuda_sums.py). Local response normalization is one
# pass on a GPU only (training/recompute/fused_replays.py). Where there are no passes,
# each function replays its own forward, and what lies in between is made on the way.
WHOLE, PASS = 'whole', 'pass'


def with_cuda_passes(profile: Profile) -> Profile:
    """The profile with the passes that functions have on a GPU and not on the host."""
    return dataclasses.replace(
        profile,
        recipes=tuple(
            dataclasses.replace(recipe, covers=(recipe.operation,))
            if profile.operations[recipe.operation].function == LRN
            else recipe
            for recipe in profile.recipes
        ),
    )


def with_whole_forwards(profile: Profile) -> Profile:
    """The profile with every pass given up for the forward of its last function."""
    return dataclasses.replace(
        profile,
        recipes=tuple(whole_forward(profile, recipe) for recipe in profile.recipes),
    )


def whole_forward(profile: Profile, recipe: Recipe) -> Recipe:
    """One recipe without its pass.

    Its inputs are what the function has read, its time and memory those of the
    function's forward. It counts as exact if the pass is: both give what forward
    has given. Statistics of a normalisation stay with the graph and are not among
    the products.

    Args:
        profile: Whose recipe it is.
        recipe: Returned as it is if it is no pass.
    """
    if not recipe.covers:
        return recipe
    op = profile.operations[recipe.operation]
    nbytes = sum(profile.storages[s].nbytes for s in recipe.products)
    return dataclasses.replace(
        recipe,
        inputs=tuple(sorted(set(op.reads))),
        seconds=op.device_seconds,
        peak_bytes=nbytes + op.workspace_bytes,
        covers=(),
        formula=0,
    )
