"""Our rows beside a rival's."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import __main__ as cli
from benchmarks import saving
from benchmarks.gpu import torch_on_gpu


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, 'RESULTS', str(tmp_path))
    return tmp_path


def test_without_pytorch_it_is_left_out_and_says_why(results, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    assert cli.main(['run', 'gpu.torch_on_gpu']) == 0
    body = json.loads((results / 'gpu_torch.json').read_text())
    assert 'PyTorch cannot be imported' in body['skipped'] and body['rows'] == []


def test_only_rows_of_the_same_batch_and_limit(results):
    same = {'arch': 'resnet50', 'batchsize': 4, 'iteration_seconds': 1.0}
    saving.save(
        'gpu_methods',
        {
            'rows': [
                {**same, 'planner': 'in-core'},
                {**same, 'planner': 'hybrid', 'limit_bytes': 9},
                {**same, 'planner': 'pooch', 'limit_bytes': 8},
                {**same, 'planner': 'swap-all', 'batchsize': 5, 'limit_bytes': 9},
                {'arch': 'resnet50', 'batchsize': 4, 'planner': 'vdnn-all'},
            ]
        },
    )
    assert list(torch_on_gpu.our_rows(9, 4)) == ['in-core', 'hybrid']
    assert torch_on_gpu.our_rows(9, 4, 'tf32') == {}


def test_mixed16_has_half_the_limit(results):
    row = {'arch': 'resnet50', 'batchsize': 4, 'iteration_seconds': 1.0}
    row |= {'arithmetic': 'mixed16', 'planner': 'hybrid', 'limit_bytes': 4}
    saving.save('gpu_methods', {'rows': [row]})
    assert list(torch_on_gpu.our_rows(8, 4, 'mixed16')) == ['hybrid']


def test_no_rows_of_ours():
    assert torch_on_gpu.our_rows(9, 4) == {}
    assert torch_on_gpu.ratios([], {}, []) == []


def test_ratios_and_overheads():
    rows = [
        {'way': 'in-core', 'fits': True, 'iteration_seconds': 2.0},
        {'way': 'checkpoint', 'fits': True, 'iteration_seconds': 3.0},
        {'way': 'save_on_cpu', 'fits': False, 'why': 'out of memory'},
    ]
    ours = {'in-core': {'iteration_seconds': 4.0}, 'hybrid': {'iteration_seconds': 5.0}}
    base, pair = torch_on_gpu.ratios(rows, ours, rows)
    assert (base['ours'], base['theirs'], base['speed_ratio']) == (
        'in-core',
        'in-core',
        0.5,
    )
    assert (pair['ours'], pair['theirs']) == ('hybrid', 'checkpoint')
    assert pair['speed_ratio'] == pytest.approx(0.6)
    assert pair['our_overhead'] == pytest.approx(0.25)
    assert pair['their_overhead'] == pytest.approx(0.5)


def test_only_equal_arithmetics_are_paired(results):
    """And layouts have their own in-core time, also of another step's rows."""
    ours = {'arch': 'resnet50', 'batchsize': 4, 'planner': 'hybrid'}
    ours |= {'iteration_seconds': 1.0, 'limit_bytes': 8}
    halves = {**ours, 'arithmetic': 'mixed16', 'limit_bytes': 4}
    saving.save('gpu_methods', {'rows': [ours, halves]})
    theirs = {'way': 'in-core', 'arithmetic': 'mixed16', 'fits': True}
    theirs |= {'channels_last': True, 'iteration_seconds': 0.5}
    other = {**theirs, 'channels_last': False, 'iteration_seconds': 9.0}
    saving.save('gpu_torch', {'rows': [theirs, other]})
    compiled = {**theirs, 'way': 'compile, budget', 'name': 'compiled'}
    compiled |= {'iteration_seconds': 0.75}
    (pair,) = torch_on_gpu.all_ratios([compiled], 8, 4)
    assert (pair['arithmetic'], pair['theirs']) == ('mixed16', 'compiled')
    assert pair['speed_ratio'] == 0.75
    assert pair['their_overhead'] == 0.5


def test_every_case_has_a_name_of_its_own():
    for cases in torch_on_gpu.CASES.values():
        assert len({(case.name, case.arithmetic) for case in cases}) == len(cases)
