"""The methods' table: one method must not cost the others their rows."""

from __future__ import annotations

import chainer_hybridmem  # noqa: F401  before chainer

# isort: split
import chainer
import pytest
from support import networks

from benchmarks import __main__ as cli
from benchmarks import methods, saving
from benchmarks.gpu import summarize
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.planners import PLANNERS


class Training:
    """A small network in the place of ResNet-50."""

    def __init__(self, arch, batchsize, insize=224, gpu=False):
        self.model = networks.Everything()
        (self.batch,) = networks.batches(1, size=batchsize)
        self.optimizer = chainer.optimizers.MomentumSGD(0.01).setup(self.model)
        self.losses = []

    def step(self):
        self.losses.append(networks.iterate(self.model, self.optimizer, *self.batch))


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.setattr(methods.common, 'Training', Training)

    def run(*planners, **options):
        return methods.out_of_core(
            'resnet50', 8, 1 << 30, None, False, 1, planners, **options
        )

    return run


def test_a_method_that_asks_for_options_has_a_row(measure, monkeypatch):
    def refuse(problem, limit_bytes):
        raise OptionError('manual needs actions')

    monkeypatch.setitem(PLANNERS, 'manual', refuse)
    kept = []
    rows = measure('hybrid', 'manual', 'swap-all', keep=kept.append)
    assert rows == kept
    first, manual, last = rows
    assert first['fits'] and last['fits']
    assert not manual['fits'] and 'actions' in manual['why']
    assert last['swap'] > 0 and last['evictions'] == 0
    table = methods.show(rows, first['iteration_seconds'])
    assert 'manual: no plan' in table


def test_a_method_that_does_not_settle_has_a_row(measure, monkeypatch):
    settle = methods.settle

    def settle_once(session, training):
        if session.plan is not None and session.plan.planner == 'swap-all':
            raise RuntimeError('not settled')
        return settle(session, training)

    monkeypatch.setattr(methods, 'settle', settle_once)
    rows = measure('swap-all', 'hybrid')
    assert [row['fits'] for row in rows] == [False, True]
    assert 'not settled' in rows[0]['why']


def test_times_of_nothing_are_shown():
    row = {'arch': 'resnet50', 'batchsize': 2, 'planner': 'hybrid'}
    row |= {'iteration_seconds': 0.0, 'predicted_seconds': float('nan')}
    row |= {'predicted_peak_bytes': 0, 'peak_bytes': 0}
    assert 'hybrid' in methods.show([row], 0.0)


@pytest.mark.parametrize('rows', [[], [{'planner': 'hybrid', 'fits': False}]])
def test_the_summary_of_half_a_run(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(summarize, 'RESULTS', str(tmp_path))
    monkeypatch.setattr(saving, 'RESULTS', str(tmp_path))
    saving.save('gpu_methods', {'rows': rows})
    (tmp_path / 'gpu_smoke.json').write_text('{"rows": [')
    (tmp_path / 'gpu_tests.txt').write_text(
        'collected 3 items\n\ntests/test_a.py::test_one PASSED [ 30%]\n'
        'tests/test_a.py::test_two FAILED [ 60%]\ntests/test_a.py::test_three '
    )
    steps = tmp_path / 'steps.tsv'
    steps.write_text('smoke\tout of time\t124\t60\n')
    assert cli.main(['run', 'gpu.summarize', str(steps)]) == 0
    text = (tmp_path / 'gpu.md').read_text()
    assert 'out of time' in text and 'Speeds under the limit' in text
    assert '1 passed, 1 failed' in text
    assert '`tests/test_a.py::test_two` failed' in text
    assert '`tests/test_a.py::test_three` did not end' in text


def test_the_summary_of_tests_in_several_processes():
    printed = (
        'tests/test_a.py::test_one[a b] \ntests/test_a.py::test_two \n'
        '[gw1] [ 30%] PASSED tests/test_a.py::test_one[a b] \n'
        'tests/test_a.py::test_three[on the other] \n'
        '[gw0] [ 60%] FAILED tests/test_a.py::test_two \n'
    )
    text = summarize.tests(summarize.read_tests(printed.splitlines(True)))
    assert text.startswith('1 passed, 1 failed')
    assert '`tests/test_a.py::test_two` failed' in text
    assert '`tests/test_a.py::test_three[on the other]` did not end' in text
    assert summarize.read_tests(['no tests ran']) is None
