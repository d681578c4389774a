"""What a run on a GPU is summed up to, also half a run."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import saving
from benchmarks.gpu import summarize

SPEED = {
    'case': 'speed/resnet50/tf32/tuned',
    'batchsize': 4,
    'iteration_seconds': 0.5,
    'pictures_per_second': 8.0,
    'all_seconds': [2.0, 0.5],
    'losses': [7.0, 6.0],
}


def rows(text):
    cells = [line.strip('| ').split(' | ') for line in text.split('\n') if '|' in line]
    return {line[0]: line[1:] for line in cells}


def test_a_family_has_a_row_with_all_of_its_types():
    good = {'agrees': True, 'largest_difference': 1e-7, 'repeats': True}
    bad = {'agrees': False, 'largest_difference': 0.5, 'repeats': False}
    ended = 'its process ended by SIGSEGV'
    body = {
        'says': '0 of 1 families agree',
        'cudnn': 92800,
        'rows': [
            {'case': 'float32/relu', **good},
            {'case': 'float16/relu', **bad},
            {'case': 'float64/relu', 'why': ended},
            SPEED,
        ],
    }
    text = summarize.cudnn(body)
    assert text.startswith('0 of 1 families agree; cuDNN 92800.')
    found = rows(text)
    assert found['relu'][:3] == ['1.0e-07', '5.0e-01: does not agree', 'failed']
    assert ended in found['relu'][-1]
    assert found['resnet50, tf32, tuned'][:4] == ['4', '0.500', '8', '2.0 s']


def test_half_a_run_is_shown():
    text = summarize.cudnn({'cudnn': None, 'rows': []})
    assert text.startswith('Not judged yet')


def test_each_arithmetic_is_beside_its_own_in_core_time():
    first = {'arch': 'resnet50', 'batchsize': 4, 'planner': 'in-core'}
    body = {
        'rows': [
            {**first, 'iteration_seconds': 1.0},
            {**first, 'arithmetic': 'tf32', 'iteration_seconds': 0.5},
            {**first, 'planner': 'hybrid', 'iteration_seconds': 1.5},
            {
                **first,
                'arithmetic': 'tf32',
                'planner': 'hybrid',
                'iteration_seconds': 0.6,
            },
        ]
    }
    text = summarize.methods(body)
    over = [line.split(' | ')[8] for line in text.split('\n')[2:]]
    assert over == ['+0.0%', '+0.0%', '+50.0%', '+20.0%']


@pytest.fixture
def tables(tmp_path, monkeypatch):
    from benchmarks.tables import gpu

    monkeypatch.setattr(saving, 'RESULTS', str(tmp_path))
    yield gpu
    monkeypatch.undo()
    importlib.reload(gpu)


def test_a_table_is_there_with_its_result(tables):
    def titles():
        return {section.title for section in importlib.reload(tables).SECTIONS}

    assert 'cuDNN on a GPU' not in titles()
    saving.save('gpu_cudnn', {'rows': []})
    assert 'cuDNN on a GPU' in titles()
