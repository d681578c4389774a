"""Dropout and recurrent networks over packed sequences.

Note: [the older form]
    Chainer calls recurrent networks as cuDNN 5 to 8 had them; in cuDNN 9 a descriptor
    also says how wide the input is, which Chainer tells later. So a descriptor is set
    where that is known: by ``getRNNParamsSize`` and by what computes.

Sequences are packed: rows of all that go on at step 0, then of those at step 1, with
the longest sequence first. ``lengths`` has how many go on at each step.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Any

from chainer_hybridmem.training.cudnn import constants as c
from chainer_hybridmem.training.cudnn.arithmetic import choose_math, sum_kind
from chainer_hybridmem.training.cudnn.descriptors import (
    Descriptor,
    contiguous,
    create_tensor_nd_descriptor,
    flattened,
    get_data_type,
    get_handle,
    ints,
    make,
)
from chainer_hybridmem.training.cudnn.functions import FUNCTIONS as f

_ITEM_BYTES = {c.CUDNN_DATA_HALF: 2, c.CUDNN_DATA_FLOAT: 4, c.CUDNN_DATA_DOUBLE: 8}


# -- dropout ---------------------------------------------------------------------------
def create_dropout_descriptor(
    handle: int, dropout: float, states: int, state_size_in_bytes: int, seed: int
) -> Descriptor:
    """Describes a dropout; a seed makes its states, which lie at an address."""
    result = make('Dropout')
    f['setDropoutDescriptor'](
        result.value, handle, dropout, states, state_size_in_bytes, seed
    )
    return result


def set_dropout_descriptor(desc: Descriptor, handle: int, dropout: float) -> None:
    """Sets the ratio; states stay as they are."""
    f['setDropoutDescriptor'](desc.value, handle, dropout, 0, 0, 0)


class DropoutStates:
    """A generator of masks on the GPU.

    Args:
        handle (int): None for the current one.
        seed (int): Of the generator.
    """

    def __init__(self, handle: int | None, seed: int) -> None:
        import cupy

        handle = get_handle() if handle is None else handle
        nbytes = f['dropoutGetStatesSize'](handle)
        # The names are CuPy's, and Chainer reads the second.
        self._states = cupy.cuda.alloc(nbytes)
        self._desc = create_dropout_descriptor(
            handle, 0.0, self._states.ptr, nbytes, seed
        )

    def set_dropout_ratio(self, dropout_ratio: float) -> None:
        """Sets the ratio of what follows."""
        set_dropout_descriptor(self._desc, get_handle(), dropout_ratio)

    def forward(self, handle: int | None, x: Any, dropout_ratio: float) -> Any:
        """Draws a mask; it, and the array that it leaves."""
        import cupy

        handle = get_handle() if handle is None else handle
        set_dropout_descriptor(self._desc, handle, dropout_ratio)
        x = contiguous(x)
        y = cupy.ndarray(x.shape, x.dtype)
        if not x.size:
            return cupy.ndarray((0,), 'b'), y
        flat = flattened(x).value
        mask = cupy.ndarray((f['dropoutGetReserveSpaceSize'](flat),), 'b')
        f['dropoutForward'](
            handle, self._desc.value, flat, x.data.ptr, flat, y.data.ptr,
            mask.data.ptr, mask.nbytes,
        )  # fmt: skip
        return mask, y

    def backward(
        self, handle: int | None, dy: Any, dropout_ratio: float, reserve_space: Any
    ) -> Any:
        """The gradient of the input, by the mask of forward."""
        import cupy

        handle = get_handle() if handle is None else handle
        set_dropout_descriptor(self._desc, handle, dropout_ratio)
        dy = contiguous(dy)
        dx = cupy.ndarray(dy.shape, dy.dtype)
        if dy.size:
            flat = flattened(dy).value
            f['dropoutBackward'](
                handle, self._desc.value, flat, dy.data.ptr, flat, dx.data.ptr,
                reserve_space.data.ptr, reserve_space.nbytes,
            )  # fmt: skip
        return dx


# -- recurrent networks --------------------------------------------------------------
class RNNDescriptor(Descriptor):
    """Describes a recurrent network; see [the older form].

    Attributes:
        units (int): In each direction.
        layers (int): Of the network.
    """

    __slots__ = ('_set_for', '_settings', 'layers', 'units')

    def __init__(
        self,
        hidden_size: int,
        num_layers: int,
        dropout_desc: Descriptor,
        input_mode: int,
        direction: int,
        mode: int,
        data_type: int,
        algo: int | None = None,
    ) -> None:
        super().__init__(0, f['destroyRNNDescriptor'])
        self.value = f['createRNNDescriptor']()
        self.units, self.layers = hidden_size, num_layers
        self._set_for: int | None = None
        algorithm = c.CUDNN_RNN_ALGO_STANDARD if algo is None else algo
        # The descriptor of dropout must live as long as this one.
        self._settings = (
            algorithm, mode, direction, input_mode, data_type, dropout_desc
        )  # fmt: skip
        _known[self.value] = self

    def set(self, input_size: int) -> int:
        """Says how wide the input is; the address."""
        if self._set_for == input_size:
            return self.value
        algorithm, mode, direction, input_mode, kind, dropout = self._settings
        f['setRNNDescriptor_v8'](
            self.value, algorithm, mode, c.CUDNN_RNN_DOUBLE_BIAS, direction,
            input_mode, kind, sum_kind(kind), choose_math(kind), input_size,
            self.units, self.units, self.layers, dropout.value, 0,
        )  # fmt: skip
        self._set_for = input_size
        return self.value


_known: weakref.WeakValueDictionary[int, RNNDescriptor] = weakref.WeakValueDictionary()


create_rnn_descriptor = RNNDescriptor


def getRNNParamsSize(handle: int, rnn_desc: int, x_desc: int, data_type: int) -> int:
    """Bytes of all weights and biases, for the address of a descriptor."""
    _, sizes = _read_tensor(x_desc)
    return int(f['getRNNWeightSpaceSize'](handle, _known[rnn_desc].set(sizes[1])))


def get_rnn_lin_layer_matrix_params(*args: Any) -> Any:
    """The part of ``w`` with one matrix, flat; arguments are those of `_find_part`."""
    return _find_part(*args)[0]


def get_rnn_lin_layer_bias_params(*args: Any) -> Any:
    """The part of ``w`` with one bias; arguments are those of `_find_part`."""
    return _find_part(*args)[1]


def _find_part(
    handle: int,
    rnn_desc: RNNDescriptor,
    layer: int,
    x_desc: Descriptor,
    w_desc: Descriptor,
    w: Any,
    number: int,
) -> list[Any]:
    network = rnn_desc.set(_read_tensor(x_desc.value)[1][1])
    descriptors = make('Tensor'), make('Tensor')
    addresses = f['getRNNWeightParams'](
        handle, network, layer, w.nbytes, w.data.ptr, number,
        *(descriptor.value for descriptor in descriptors),
    )  # fmt: skip
    parts = []
    for descriptor, address in zip(descriptors, addresses, strict=True):
        kind, sizes = _read_tensor(descriptor.value)
        start = (address - w.data.ptr) // _ITEM_BYTES[kind]
        parts.append(w[start : start + math.prod(sizes)])
    return parts


def _read_tensor(descriptor: int) -> tuple[int, list[int]]:
    """The type and the shape that a descriptor has."""
    sizes, strides = (ctypes.c_int * 8)(), (ctypes.c_int * 8)()
    kind, count = f['getTensorNdDescriptor'](descriptor, 8, sizes, strides)
    return kind, sizes[:count]


class _RecurrentCall:
    """What all three functions of a recurrent network give to cuDNN."""

    def __init__(
        self,
        states: DropoutStates,
        direction: int,
        mode: int,
        hx: Any,
        xs: Any,
        lengths: Sequence[int],
    ) -> None:
        self.handle = get_handle()
        kind = get_data_type(xs.dtype)
        directions = 2 if direction == c.CUDNN_BIDIRECTIONAL else 1
        units = hx.shape[2]
        network = create_rnn_descriptor(
            units, hx.shape[0] // directions, states._desc, c.CUDNN_LINEAR_INPUT,
            direction, mode, kind,
        )  # fmt: skip
        self.network = network
        self.value = network.set(xs.shape[1])
        self.width = directions * units
        steps = _count_steps(lengths)
        self.xs = _describe_sequences(kind, len(lengths), xs.shape[1], steps)
        self.ys = _describe_sequences(kind, len(lengths), self.width, steps)
        self.state = create_tensor_nd_descriptor(hx)

    def find_sizes(self, mode: int) -> tuple[int, int]:
        """Bytes of memory for a while, and of what forward leaves to backward."""
        sizes = f['getRNNTempSpaceSizes'](self.handle, self.value, mode, self.xs.value)
        return sizes[0], sizes[1]


def _count_steps(lengths: Sequence[int]) -> list[int]:
    """How long each sequence is, the longest one first."""
    steps: list[int] = []
    for step in reversed(range(len(lengths))):
        steps += [step + 1] * (lengths[step] - len(steps))
    return steps


def _describe_sequences(
    kind: int, longest: int, width: int, steps: Sequence[int]
) -> Descriptor:
    result = make('RNNData')
    f['setRNNDataDescriptor'](
        result.value, kind, c.CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_PACKED, longest,
        len(steps), width, ints(steps), 0,
    )  # fmt: skip
    return result


def rnn_forward_inference(*args: Any) -> tuple[Any, ...]:
    """As :func:`rnn_forward_training`, without what backward needs."""
    return _forward(c.CUDNN_FWD_MODE_INFERENCE, *args)[1:]


def rnn_forward_training(*args: Any) -> tuple[Any, ...]:
    """Runs a recurrent network.

    Args:
        args: The states of the dropout between layers, with its ratio set.
            ``CUDNN_UNIDIRECTIONAL`` or ``CUDNN_BIDIRECTIONAL``.
            ``CUDNN_LSTM``, ``CUDNN_GRU`` or ``CUDNN_RNN_...``.
            hx (layers x directions, batch, units) in float16, float32 or float64, and
            cx, the same for an LSTM, else None.
            w, all weights and biases, flat.
            xs (rows of all steps, inputs), and how many sequences go on at each step.

    Returns:
        Memory for backward, the states ``hy`` and ``cy``, and the outputs (rows of all
        steps, directions x units).
    """
    return _forward(c.CUDNN_FWD_MODE_TRAINING, *args)


def _forward(
    forward_mode: int,
    states: DropoutStates,
    direction: int,
    mode: int,
    hx: Any,
    cx: Any,
    w: Any,
    xs: Any,
    lengths: Sequence[int],
) -> tuple[Any, ...]:
    import cupy

    hx, w, xs = contiguous(hx), contiguous(w), contiguous(xs)
    cx = None if cx is None else contiguous(cx)
    run = _RecurrentCall(states, direction, mode, hx, xs, lengths)
    ys = cupy.ndarray((xs.shape[0], run.width), xs.dtype)
    hy = cupy.ndarray(hx.shape, hx.dtype)
    cy = cupy.ndarray((0,) if cx is None else cx.shape, hx.dtype)
    workspace_bytes, reserved_bytes = run.find_sizes(forward_mode)
    workspace, reserved = (
        cupy.cuda.alloc(workspace_bytes),
        cupy.cuda.alloc(reserved_bytes),
    )
    f['RNNForward'](
        run.handle, run.value, forward_mode, 0, run.xs.value, xs.data.ptr,
        run.ys.value, ys.data.ptr, run.state.value, hx.data.ptr, hy.data.ptr,
        run.state.value, _address(cx), 0 if cx is None else cy.data.ptr,
        w.nbytes, w.data.ptr, workspace_bytes, workspace.ptr,
        reserved_bytes, reserved.ptr,
    )  # fmt: skip
    return reserved, hy, cy, ys


def rnn_backward_data(
    states: DropoutStates,
    direction_mode: int,
    rnn_mode: int,
    hx: Any,
    cx: Any,
    w: Any,
    xs: Any,
    ys: Any,
    reserve_space: Any,
    dhy: Any,
    dcy: Any,
    dys: Any,
    lengths: Sequence[int],
) -> tuple[Any, Any, Any]:
    """The gradients of ``hx``, ``cx`` and ``xs``; comes before those of weights."""
    import cupy

    hx, w, xs, ys = contiguous(hx), contiguous(w), contiguous(xs), contiguous(ys)
    dhy, dys = contiguous(dhy), contiguous(dys)
    cx = None if cx is None else contiguous(cx)
    dcy = None if cx is None else contiguous(dcy)
    run = _RecurrentCall(states, direction_mode, rnn_mode, hx, xs, lengths)
    dxs, dhx = cupy.ndarray(xs.shape, xs.dtype), cupy.ndarray(hx.shape, hx.dtype)
    dcx = cupy.ndarray((0,) if cx is None else cx.shape, hx.dtype)
    workspace_bytes, reserved_bytes = run.find_sizes(c.CUDNN_FWD_MODE_TRAINING)
    workspace = cupy.cuda.alloc(workspace_bytes)
    f['RNNBackwardData_v8'](
        run.handle, run.value, 0, run.ys.value, ys.data.ptr, dys.data.ptr,
        run.xs.value, dxs.data.ptr, run.state.value, hx.data.ptr, dhy.data.ptr,
        dhx.data.ptr, run.state.value, _address(cx), _address(dcy),
        0 if cx is None else dcx.data.ptr, w.nbytes, w.data.ptr,
        workspace_bytes, workspace.ptr, reserved_bytes, reserve_space.ptr,
    )  # fmt: skip
    return dhx, dcx, dxs


def rnn_backward_weights(
    states: DropoutStates,
    direction_mode: int,
    rnn_mode: int,
    xs: Any,
    hx: Any,
    ys: Any,
    w: Any,
    reserve_space: Any,
    lengths: Sequence[int],
) -> Any:
    """The gradient of ``w``; follows :func:`rnn_backward_data`."""
    import cupy

    xs, hx, ys = contiguous(xs), contiguous(hx), contiguous(ys)
    run = _RecurrentCall(states, direction_mode, rnn_mode, hx, xs, lengths)
    dw = cupy.zeros(w.shape, w.dtype)
    workspace_bytes, reserved_bytes = run.find_sizes(c.CUDNN_FWD_MODE_TRAINING)
    workspace = cupy.cuda.alloc(workspace_bytes)
    f['RNNBackwardWeights_v8'](
        run.handle, run.value, c.CUDNN_WGRAD_MODE_ADD, 0, run.xs.value, xs.data.ptr,
        run.state.value, hx.data.ptr, run.ys.value, ys.data.ptr,
        dw.nbytes, dw.data.ptr, workspace_bytes, workspace.ptr, reserved_bytes,
        reserve_space.ptr,
    )  # fmt: skip
    return dw


def _address(array: Any) -> int:
    return 0 if array is None else array.data.ptr
