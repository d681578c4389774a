"""Recurrent layers of the emulator's cuDNN 9 against NumPy, and what they refuse."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses

import pytest
from support import cudnn9
from support.cudnn9 import (
    BAD_PARAM,
    DEFAULT_MATH,
    FMA_MATH,
    NOT_SUPPORTED,
    SEQUENCES_PADDED,
    STEPS_PACKED,
    STEPS_PADDED,
    ask,
    call,
    check_refusal,
    descriptor,
    ints,
    size,
)
from support.marks import needs_emulated_cudnn9

import chainer_hybridmem  # noqa: F401  (before Chainer)

# isort: split
import chainer
import chainer.functions as F
import numpy as np

pytestmark = [pytest.mark.gpu, needs_emulated_cudnn9]


LAYERS, INPUTS, UNITS = 2, 5, 4
CELLS = {'relu': 0, 'tanh': 1, 'lstm': 2, 'gru': 3}
GATES = {'relu': 1, 'tanh': 1, 'lstm': 4, 'gru': 3}
PADDING = -7.0


@dataclasses.dataclass(frozen=True)
class Case:
    """Layers and sequences; `lengths` in the order in which they lie in memory."""

    cell: str = 'lstm'
    directions: int = 1
    layout: int = STEPS_PACKED
    lengths: tuple[int, ...] = (4, 3, 3, 1)
    dtype: str = 'd'
    math: int = FMA_MATH
    algorithm: int = 0

    @property
    def pseudo_layers(self):
        return LAYERS * self.directions

    @property
    def width(self):
        return UNITS * self.directions

    def draw(self):
        """Inputs, states, weights and gradients of all results."""
        rng = np.random.RandomState(0)

        def uniform(*shape):
            return rng.uniform(-1, 1, shape).astype(self.dtype)

        states = (self.pseudo_layers, len(self.lengths), UNITS)
        weights, biases = [], []
        for layer in range(self.pseudo_layers):
            wide = self.width if layer >= self.directions else INPUTS
            gates = GATES[self.cell]
            weights.append([uniform(UNITS, wide) for _ in range(gates)])
            weights[-1] += [uniform(UNITS, UNITS) for _ in range(gates)]
            biases.append([uniform(UNITS) for _ in range(2 * gates)])
        return {
            'xs': [uniform(length, INPUTS) for length in self.lengths],
            'dys': [uniform(length, self.width) for length in self.lengths],
            **{name: uniform(*states) for name in ('hx', 'cx', 'dhy', 'dcy')},
            'weights': weights,
            'biases': biases,
        }

    def lay_out(self, sequences):
        """The array that cuDNN sees of one sequence each."""
        longest, wide = max(self.lengths), sequences[0].shape[1]
        if self.layout == STEPS_PACKED:
            rows = [s[t] for t in range(longest) for s in sequences if t < len(s)]
            return np.array(rows)
        out = np.full((len(sequences), longest, wide), np.nan, self.dtype)
        for row, sequence in zip(out, sequences, strict=True):
            row[: len(sequence)] = sequence
        return out if self.layout == SEQUENCES_PADDED else out.swapaxes(0, 1).copy()

    def take_apart(self, array, expected_padding):
        """One array for each sequence; what lies between them is the padding."""
        if self.layout == STEPS_PACKED:
            sequences = [
                np.empty((n, array.shape[-1]), array.dtype) for n in self.lengths
            ]
            rows = iter(array)
            for t in range(max(self.lengths)):
                for sequence in sequences:
                    if t < len(sequence):
                        sequence[t] = next(rows)
            assert next(rows, None) is None
            return sequences
        if self.layout == STEPS_PADDED:
            array = array.swapaxes(0, 1)
        for row, length in zip(array, self.lengths, strict=True):
            np.testing.assert_array_equal(row[length:], expected_padding)
        return [row[:length] for row, length in zip(array, self.lengths, strict=True)]


class Network:
    """Descriptors of a case, its weights and what its passes give."""

    def __init__(self, case, stack, drawn):
        import cupy

        self.case, self.drawn = case, drawn
        self.handle, self.rnn, self.matrix, self.bias, self.states, self.dropout = (
            stack.enter_context(descriptor(kind))
            for kind in (
                *('', 'RNNDescriptor', 'TensorDescriptor', 'TensorDescriptor'),
                *('TensorDescriptor', 'DropoutDescriptor'),
            )
        )
        self.x_data, self.y_data = (
            stack.enter_context(descriptor('RNNDataDescriptor')) for _ in 'xy'
        )
        self.code = cudnn9.TYPES[case.dtype]
        self.set_rnn()
        self.set_data(self.x_data, INPUTS)
        self.set_data(self.y_data, case.width)
        shape = (case.pseudo_layers, len(case.lengths), UNITS)
        cudnn9.set_tensor(self.states, shape, case.dtype)
        bytes_ = ask('GetRNNWeightSpaceSize', self.handle, self.rnn)
        self.weights = cupy.zeros(bytes_ // np.dtype(case.dtype).itemsize, case.dtype)
        self.hx, self.cx, self.dhy, self.dcy = (
            cupy.asarray(drawn[name]) for name in ('hx', 'cx', 'dhy', 'dcy')
        )
        self.x = cupy.asarray(case.lay_out(drawn['xs']))
        self.dy = cupy.asarray(case.lay_out(drawn['dys']))
        self.y = cupy.empty_like(self.dy)
        self.lengths = cupy.asarray(np.array(case.lengths, 'i'))
        self.sizes = self.temporary_sizes(training=1)
        self.workspace, self.reserve = (cupy.empty(n, 'b') for n in self.sizes)

    def set_rnn(self, **changed):
        case = self.case
        arguments = {
            'algorithm': case.algorithm,
            'cell': CELLS[case.cell],
            'bias': 2,
            'direction': case.directions - 1,
            'input': 0,
            'type': self.code,
            'precision': self.code,
            'math': case.math,
            'inputs': INPUTS,
            'units': UNITS,
            'projection': UNITS,
            'layers': LAYERS,
            'dropout': self.dropout,
            'flags': int(case.layout != STEPS_PACKED),
            **changed,
        }
        call('SetRNNDescriptor_v8', self.rnn, *arguments.values())

    def set_data(self, data, default_wide, **changed):
        case = self.case
        padding = np.array(PADDING, case.dtype)
        lengths = changed.get('lengths', case.lengths)
        arguments = {
            'type': self.code,
            'layout': case.layout,
            'longest': max(case.lengths),
            'count': len(lengths),
            'wide': default_wide,
            **changed,
            'lengths': ints(*lengths),
            'fill': padding.ctypes,
        }
        call('SetRNNDataDescriptor', data, *arguments.values())

    def temporary_sizes(self, training):
        room, reserve = ctypes.c_size_t(), ctypes.c_size_t()
        call(
            'GetRNNTempSpaceSizes',
            *(self.handle, self.rnn, training, self.x_data),
            *(ctypes.byref(room), ctypes.byref(reserve)),
        )
        return room.value, reserve.value

    def part(self, layer, number, array):
        """The views of a matrix and a bias in an array of all weights."""
        matrix, bias = ctypes.c_void_p(), ctypes.c_void_p()
        call(
            'GetRNNWeightParams',
            *(self.handle, self.rnn, layer, size(array.nbytes), array, number),
            *(self.matrix, ctypes.byref(matrix), self.bias, ctypes.byref(bias)),
        )
        views = []
        for tensor, address in ((self.matrix, matrix), (self.bias, bias)):
            one, *shape = cudnn9.tensor_shape(tensor)
            assert one == 1
            start = (address.value - array.data.ptr) // array.itemsize
            views.append(array[start : start + np.prod(shape)].reshape(shape))
        return views[0], views[1].ravel()

    def parts(self, array):
        return [
            [
                self.part(layer, number, array)
                for number in range(2 * GATES[self.case.cell])
            ]
            for layer in range(self.case.pseudo_layers)
        ]

    def fill_weights(self):
        import cupy

        for layer, parts in enumerate(self.parts(self.weights)):
            for number, (matrix, bias) in enumerate(parts):
                matrix[...] = cupy.asarray(self.drawn['weights'][layer][number])
                bias[...] = cupy.asarray(self.drawn['biases'][layer][number])

    def forward(self, training=1, workspace=None, reserve=None, lengths=None):
        import cupy

        self.hy, self.cy = cupy.empty_like(self.hx), cupy.empty_like(self.cx)
        workspace = self.workspace if workspace is None else workspace
        reserve = self.reserve if reserve is None else reserve
        call(
            'RNNForward',
            *(self.handle, self.rnn, training, lengths, self.x_data, self.x),
            *(self.y_data, self.y, self.states, self.hx, self.hy),
            *(self.states, self.cx, self.cy, size(self.weights.nbytes), self.weights),
            *(size(workspace.nbytes), workspace, size(reserve.nbytes), reserve),
        )

    def backward(self):
        import cupy

        self.dx = cupy.empty_like(self.x)
        self.dhx, self.dcx = cupy.empty_like(self.hx), cupy.empty_like(self.cx)
        self.dw = cupy.ones_like(self.weights)
        spaces = (
            *(size(self.workspace.nbytes), self.workspace),
            *(size(self.reserve.nbytes), self.reserve),
        )
        call(
            'RNNBackwardData_v8',
            *(self.handle, self.rnn, self.lengths, self.y_data, self.y, self.dy),
            *(self.x_data, self.dx, self.states, self.hx, self.dhy, self.dhx),
            *(self.states, self.cx, self.dcy, self.dcx),
            *(size(self.weights.nbytes), self.weights, *spaces),
        )
        call(
            'RNNBackwardWeights_v8',
            *(self.handle, self.rnn, 0, self.lengths, self.x_data, self.x),
            *(self.states, self.hx, self.y_data, self.y),
            *(size(self.dw.nbytes), self.dw, *spaces),
        )

    def results(self):
        """All that both passes have given, named as in `reference`."""
        take = self.case.take_apart
        out = {'ys': take(self.y.get(), PADDING), 'dxs': take(self.dx.get(), PADDING)}
        names = ['hy', 'dhx', *(('cy', 'dcx') if self.case.cell == 'lstm' else ())]
        out.update((name, getattr(self, name).get()) for name in names)
        parts = [part for layer in self.parts(self.dw) for part in layer]
        out['dws'] = [matrix.get() - 1 for matrix, _ in parts]
        out['dbs'] = [bias.get() - 1 for _, bias in parts]
        return out


@contextlib.contextmanager
def network(case):
    with contextlib.ExitStack() as stack:
        made = Network(case, stack, case.draw())
        made.fill_weights()
        yield made


def run(case):
    with network(case) as made:
        made.forward()
        made.backward()
        return made.results()


def reference(case):
    """What Chainer computes with NumPy, in float64, the longest sequence first."""
    drawn = case.draw()
    order = np.argsort([-length for length in case.lengths], kind='stable')

    def variable(array):
        return chainer.Variable(array.astype('d'))

    def in_order(name):
        return variable(drawn[name][:, order])

    xs = [variable(drawn['xs'][i]) for i in order]
    ws = [[variable(w) for w in layer] for layer in drawn['weights']]
    bs = [[variable(b) for b in layer] for layer in drawn['biases']]
    hx, cx = in_order('hx'), in_order('cx')
    states = (hx, cx) if case.cell == 'lstm' else (hx,)
    both = 'bi' * (case.directions - 1)
    kinds = {'lstm': f'n_step_{both}lstm', 'gru': f'n_step_{both}gru'}
    function = getattr(F, kinds.get(case.cell, f'n_step_{both}rnn'))
    activation = {} if case.cell in kinds else {'activation': case.cell}
    steps = F.transpose_sequence(xs)
    *ends, ys = function(LAYERS, 0.0, *states, ws, bs, steps, **activation)
    ys = F.transpose_sequence(ys)
    with chainer.using_config('dtype', np.dtype('d')):
        losses = [
            F.sum(y * drawn['dys'][i].astype('d'))
            for y, i in zip(ys, order, strict=True)
        ]
        losses += [
            F.sum(end * drawn[name][:, order].astype('d'))
            for end, name in zip(ends, ('dhy', 'dcy'), strict=False)
        ]
        sum(losses).backward()
    back = np.argsort(order)
    out = {
        'ys': [ys[i].array for i in back],
        'dxs': [xs[i].grad for i in back],
        'hy': ends[0].array[:, back],
        'dhx': hx.grad[:, back],
        'dws': [w.grad for layer in ws for w in layer],
        'dbs': [b.grad for layer in bs for b in layer],
    }
    if case.cell == 'lstm':
        out |= {'cy': ends[1].array[:, back], 'dcx': cx.grad[:, back]}
    return out


def compare(ours, plain, tolerance):
    assert ours.keys() == plain.keys()
    for name, values in ours.items():
        for a, b in zip(values, plain[name], strict=True):
            np.testing.assert_allclose(a, b, tolerance, tolerance, err_msg=name)


CASES = [
    Case(cell, directions, layout, lengths)
    for cell in CELLS
    for directions in (1, 2)
    for layout, lengths in (
        (STEPS_PACKED, (4, 3, 3, 1)),
        (STEPS_PADDED, (2, 4, 1, 3)),
        (SEQUENCES_PADDED, (2, 4, 1, 3)),
    )
]


@pytest.mark.matrix
@pytest.mark.parametrize('dtype, tolerance', [('d', 1e-11), ('f', 2e-5), ('e', 3e-2)])
@pytest.mark.parametrize('case', CASES, ids=str)
def test_recurrent_layers_give_what_numpy_gives(case, dtype, tolerance):
    case = dataclasses.replace(case, dtype=dtype)
    compare(run(case), reference(case), tolerance)


@pytest.mark.parametrize('cell', ['lstm', 'gru'])
def test_only_fma_keeps_float32(cell):
    exact = run(Case(cell, dtype='f'))
    rounded = run(Case(cell, dtype='f', math=DEFAULT_MATH))
    compare(exact, rounded, 2e-2)
    assert not (exact['hy'] == rounded['hy']).all()
    assert abs(exact['hy'] - rounded['hy']).max() > 1e-5


def test_another_algorithm_has_other_bits():
    one, other = (run(Case(dtype='f', algorithm=number)) for number in (0, 1))
    compare(one, other, 1e-5)
    assert not (one['hy'] == other['hy']).all()


def test_inference_needs_no_reserve_and_less_workspace():
    import cupy

    with network(Case()) as made:
        made.forward()
        trained = made.y.copy()
        room, reserve = made.temporary_sizes(training=0)
        assert reserve == 0 and room < made.sizes[0]
        made.y[...] = 0
        made.forward(0, cupy.empty(room, 'b'), cupy.empty(0, 'b'), made.lengths)
        assert (made.y == trained).all()


def test_without_states_they_are_zero():
    import cupy

    with network(Case()) as made:
        made.hx[...] = made.cx[...] = 0
        made.forward()
        y = made.y.copy()
        call(
            'RNNForward',
            *(made.handle, made.rnn, 1, None, made.x_data, made.x),
            *(made.y_data, made.y, made.states, None, None, made.states, None, None),
            *(size(made.weights.nbytes), made.weights),
            *(size(made.workspace.nbytes), made.workspace),
            *(size(made.reserve.nbytes), made.reserve),
        )
        assert (made.y == y).all() and cupy.isfinite(y).all()


def test_backward_uses_the_outputs_that_it_is_given():
    with network(Case('gru')) as made:
        made.forward()
        made.backward()
        before = made.results()['dhx']
        made.y *= 0.5
        made.backward()
        assert not (made.results()['dhx'] == before).all()


def test_masks_of_dropout_are_those_of_the_states():
    import cupy

    with network(Case()) as made:
        states = cupy.empty(ask('DropoutGetStatesSize', made.handle), 'b')

        def seed(ratio):
            call(
                'SetDropoutDescriptor',
                *(made.dropout, made.handle, ctypes.c_float(ratio), states),
                *(size(states.nbytes), ctypes.c_ulonglong(3)),
            )

        outputs = []
        for ratio in (0.5, 0.5, 0.0):
            seed(ratio)
            made.forward()
            outputs.append(made.y.get().tobytes())
        made.forward(0)
        assert outputs[0] == outputs[1] != outputs[2] == made.y.get().tobytes()


def test_a_projection_that_is_off_has_no_address():
    with network(Case()) as made:
        matrix, bias = ctypes.c_void_p(1), ctypes.c_void_p(1)
        call(
            'GetRNNWeightParams',
            *(made.handle, made.rnn, 0, size(made.weights.nbytes), made.weights, 8),
            *(made.matrix, ctypes.byref(matrix), made.bias, ctypes.byref(bias)),
        )
        assert matrix.value is None and bias.value is None
        assert cudnn9.tensor_shape(made.matrix) == ()


# The statuses are those that cuDNN 9.28 itself has given, where there was no GPU.
RNN_REFUSALS = [
    ({'projection': 0}, BAD_PARAM),
    ({'projection': UNITS + 1}, NOT_SUPPORTED),
    ({'algorithm': 4}, BAD_PARAM),
    ({'cell': 4}, BAD_PARAM),
    ({'bias': 4}, BAD_PARAM),
    ({'direction': 2}, BAD_PARAM),
    ({'input': 2}, BAD_PARAM),
    ({'type': 0, 'precision': 1}, NOT_SUPPORTED),
    ({'type': 1, 'precision': 0}, NOT_SUPPORTED),
    ({'type': 3}, NOT_SUPPORTED),
    ({'math': 4}, BAD_PARAM),
    ({'inputs': 0}, BAD_PARAM),
    ({'layers': 0}, BAD_PARAM),
    ({'flags': 2}, BAD_PARAM),
]
DATA_REFUSALS = [
    ({'lengths': (1, 3, 4)}, BAD_PARAM),
    ({'lengths': (4, 1, 3)}, BAD_PARAM),
    ({'lengths': (3, 3, 1)}, BAD_PARAM),  # none is as long as the longest
    ({'lengths': (5, 3, 1)}, BAD_PARAM),
    ({'lengths': (4, 3, 0)}, BAD_PARAM),
    ({'lengths': (4, 3, -1), 'layout': STEPS_PADDED}, BAD_PARAM),
    ({'layout': 3}, BAD_PARAM),
    ({'longest': 0}, BAD_PARAM),
    ({'wide': 0}, BAD_PARAM),
    ({'type': 3}, NOT_SUPPORTED),
]


@pytest.mark.parametrize('changed, status', RNN_REFUSALS, ids=str)
def test_networks_are_refused_as_by_the_library(changed, status):
    with network(Case()) as made:
        check_refusal(status, made.set_rnn, **changed)


@pytest.mark.parametrize('changed, status', DATA_REFUSALS, ids=str)
def test_sequences_are_refused_as_by_the_library(changed, status):
    with network(Case()) as made:
        check_refusal(status, made.set_data, made.x_data, INPUTS, **changed)


def test_sequences_may_be_empty_in_padding_only():
    with network(Case(layout=STEPS_PADDED)) as made:
        made.set_data(made.x_data, INPUTS, lengths=(4, 0, 3, 1))
        made.set_data(made.y_data, made.case.width, lengths=(4, 0, 3, 1))
        made.forward()
        assert (made.hy[:, 1] == made.hx[:, 1]).all()
        assert not (made.hy[:, 0] == made.hx[:, 0]).all()


def smaller(array):
    return array[: array.size - 1]


def other_outputs(made):
    made.set_data(made.y_data, made.case.width, lengths=(4, 3, 2, 1))


def other_width(made):
    made.set_data(made.x_data, INPUTS + 1)


def other_states(made):
    cudnn9.set_tensor(made.states, (LAYERS, 3, UNITS), 'd')


def padding_is_off(made):
    for data, wide in ((made.x_data, INPUTS), (made.y_data, made.case.width)):
        made.set_data(data, wide, layout=STEPS_PADDED)


def fewer_weights(made):
    made.weights = smaller(made.weights)


def lengths_of_the_host(made):
    made.kept = ints(4, 3, 3, 1)
    return {'lengths': made.kept}


CALL_REFUSALS = [
    lambda made: {'workspace': smaller(made.workspace)},
    lambda made: {'reserve': smaller(made.reserve)},
    *(other_outputs, other_width, other_states, padding_is_off, fewer_weights),
    lengths_of_the_host,
]


@pytest.mark.parametrize('change', CALL_REFUSALS)
def test_wrong_calls_of_recurrent_layers_are_refused(change):
    with network(Case()) as made:
        made.forward()
        check_refusal(BAD_PARAM, lambda: made.forward(**(change(made) or {})))


def test_gradients_are_added_only():
    with network(Case()) as made:
        made.forward()
        made.backward()
        spaces = (made.workspace, size(made.reserve.nbytes), made.reserve)
        check_refusal(
            NOT_SUPPORTED,
            *(call, 'RNNBackwardWeights_v8', made.handle, made.rnn, 1, None),
            *(made.x_data, made.x, made.states, made.hx, made.y_data, made.y),
            *(size(made.dw.nbytes), made.dw, size(made.workspace.nbytes), *spaces),
        )
