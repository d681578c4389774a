"""What a GPU is asked about cuDNN first."""

from __future__ import annotations

import json
import os

import pytest
from support.marks import needs_emulated_cudnn

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
from chainer_hybridmem.training.chainer_access import compat

on_emulator = [
    pytest.mark.gpu,
    needs_emulated_cudnn,
    pytest.mark.skipif(compat.cupy_has_cudnn(), reason='this CuPy has cuDNN itself'),
]


def marked(function):
    for mark in on_emulator:
        function = mark(function)
    return function


@pytest.fixture
def called(monkeypatch):
    """Names of functions that are called while the test runs."""
    from benchmarks.gpu import cudnn_on_gpu
    from chainer_hybridmem.training.cudnn.functions import FUNCTIONS

    for name, function in list(FUNCTIONS.items()):
        monkeypatch.setitem(FUNCTIONS, name, function)
    return cudnn_on_gpu.record_calls()


def test_a_family_agrees_if_all_of_its_types_do():
    from benchmarks.gpu import cudnn_on_gpu

    rows = [
        {'family': 'relu', 'dtype': 'float32', 'agrees': True},
        {'family': 'relu', 'dtype': 'float16', 'agrees': True},
        {'family': 'tanh', 'dtype': 'float32', 'agrees': True},
        {'family': 'tanh', 'dtype': 'float16', 'agrees': False},
        {'case': 'float32/softmax', 'why': 'its process ended by SIGSEGV'},
    ]
    types = ('float32', 'float16')
    families = {'relu': types, 'tanh': types, 'softmax': ('float32',)}
    verdict = cudnn_on_gpu.judge(rows, families)
    assert (verdict['agree'], verdict['families']) == (1, 3)
    assert verdict['says'] == (
        '1 of 3 families agree; not: tanh (float16); softmax (float32)'
    )


@marked
def test_what_cudnn_computes_agrees(called):
    from benchmarks.gpu import cudnn_families

    row = cudnn_families.compare('convolution', 'float32', called)
    assert row['agrees'] and row['repeats'] and set(row['ways']) == {
        'default', 'deterministic', 'autotune', 'autotune, deterministic',
    }  # fmt: skip
    assert 'convolutionBackwardFilter' in row['functions']
    json.dumps(row)


@marked
def test_what_cudnn_computes_otherwise_does_not(called, monkeypatch):
    from cupy.cuda import cudnn

    from benchmarks.gpu import cudnn_families

    average = cudnn.CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING
    for name in ('CUDNN_POOLING_MAX', 'CUDNN_POOLING_MAX_DETERMINISTIC'):
        monkeypatch.setattr(cudnn, name, average)
    row = cudnn_families.compare('max pooling', 'float32', called)
    assert row['agrees'] is False and row['largest_difference'] > 0.01


@marked
def test_a_function_that_does_not_ask_cudnn_does_not_agree(called, monkeypatch):
    from benchmarks.gpu import cudnn_families

    family = cudnn_families.FAMILIES['relu']
    plain = family._replace(function=lambda v: v.x * 2)
    monkeypatch.setitem(cudnn_families.FAMILIES, 'relu', plain)
    row = cudnn_families.compare('relu', 'float32', called)
    assert row['agrees'] is False and row['why'] == 'cuDNN was not called'


@marked
@pytest.mark.skipif('EMU_ATOMICS' in os.environ, reason='others do not repeat, either')
def test_a_deterministic_algorithm_that_does_not_repeat_does_not_agree(
    called, monkeypatch
):
    from benchmarks.gpu import cudnn_families

    former, calls = cudnn_families._results, []

    def results(*args):
        found = former(*args)
        if chainer.config.cudnn_deterministic:
            calls.append(None)
            found['output 0'] = found['output 0'] + 1e-7 * (len(calls) % 2)
        return found

    import chainer

    monkeypatch.setattr(cudnn_families, '_results', results)
    row = cudnn_families.compare('convolution', 'float32', called)
    assert row['ways']['default']['repeats'] and row['agrees'] is False
    assert row['why'] == 'other bits when repeated with cudnn_deterministic'


@marked
def test_what_cudnn_refuses_is_told(called, monkeypatch):
    from benchmarks.gpu import cudnn_families

    row = cudnn_families.compare('spatial transformer', 'float64', called)
    assert row['agrees'] is False
    assert (
        row['why'].startswith('default: CuDNNError') and 'NOT_SUPPORTED' in row['why']
    )


@marked
def test_float32_is_told_from_tf32():
    from benchmarks.gpu import cudnn_on_gpu

    for row in cudnn_on_gpu.compare_arithmetics():
        assert row['agrees'] and row['float32_difference'] < 1e-5


@marked
def test_the_speed_of_a_network_says_what_was_chosen(monkeypatch):
    from benchmarks.gpu import cudnn_on_gpu

    monkeypatch.setattr(cudnn_on_gpu, 'ITERATIONS', 1)
    row = cudnn_on_gpu.speed('resnet50', 'mixed16', 'tuned', 0.005, 32)
    assert row['batchsize'] == 1 and row['iteration_seconds'] > 0
    assert sum(row['algorithms'].values()) == row['convolutions'] > 50
    assert row['fixed_bytes'] > 0 and len(row['choices']) == row['convolutions']
