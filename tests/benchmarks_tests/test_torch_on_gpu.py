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


def test_no_rows_of_ours():
    assert torch_on_gpu.our_rows(9, 4) == {}
    assert torch_on_gpu.ratios([], {}) == []


def test_ratios_and_overheads():
    rows = [
        {'way': 'in-core', 'fits': True, 'iteration_seconds': 2.0},
        {'way': 'checkpoint', 'fits': True, 'iteration_seconds': 3.0},
        {'way': 'save_on_cpu', 'fits': False, 'why': 'out of memory'},
    ]
    ours = {'in-core': {'iteration_seconds': 4.0}, 'hybrid': {'iteration_seconds': 5.0}}
    base, pair = torch_on_gpu.ratios(rows, ours)
    assert (base['ours'], base['theirs'], base['speed_ratio']) == (
        'in-core',
        'in-core',
        0.5,
    )
    assert (pair['ours'], pair['theirs']) == ('hybrid', 'checkpoint')
    assert pair['speed_ratio'] == pytest.approx(0.6)
    assert pair['our_overhead'] == pytest.approx(0.25)
    assert pair['their_overhead'] == pytest.approx(0.5)
