"""Data parallel training with ChainerMN, each process inside its own limit."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types

import pytest
from support import networks

import chainer_hybridmem  # before chainer

# isort: split
import chainer
import chainer.functions as F

from chainer_hybridmem.planning.records.plan import Action

FOLDER = os.path.dirname(os.path.abspath(__file__))
PROCESSES = 2
TIMEOUT_SECONDS = 900


def find_mpiexec() -> str | None:
    """Beside this Python if an MPI was installed as a package, else on the path."""
    own = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    return own if os.access(own, os.X_OK) else shutil.which('mpiexec')


needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec('mpi4py') is None or find_mpiexec() is None,
    reason='needs mpi4py and an MPI with mpiexec (pip install mpi4py mpich)',
)


@needs_mpi
def test_two_processes_train_as_without_us(tmp_path):
    mpiexec = find_mpiexec()
    assert mpiexec is not None
    path = os.pathsep.join(p for p in sys.path if p)
    result = subprocess.run(
        [
            mpiexec,
            '-n',
            str(PROCESSES),
            sys.executable,
            os.path.join(FOLDER, 'data_parallel.py'),
            str(tmp_path),
        ],
        env={**os.environ, 'PYTHONPATH': path, 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    files = [tmp_path / f'{rank}.json' for rank in range(PROCESSES)]
    bodies = [json.loads(file.read_text(encoding='utf-8')) for file in files]
    assert [body['size'] for body in bodies] == [PROCESSES] * PROCESSES
    for body in bodies:
        assert body['kept'] == body['plain']
        assert body['small'] == body['plain']
        assert body['peak_bytes'] <= body['limit_bytes'] < body['in_core_peak_bytes']
        assert body['guided_iterations'] > 0
        assert body['moved'] > 0
    # They exchange gradients, not pictures.
    first, second = (body['plain'] for body in bodies)
    assert first[1] == second[1]
    assert first[0] != second[0]


@chainer_hybridmem.recomputable
class Exchange(chainer.Function):
    """Stands for a function that talks to other processes; counts how often."""

    calls = 0

    def __init__(self) -> None:
        kind = types.new_class('Communicator')
        kind.__module__ = 'chainermn.communicators.naive_communicator'
        self.comm = kind()

    def forward(self, inputs):
        Exchange.calls += 1
        return (inputs[0] * 2,)

    def backward(self, inputs, grads):
        return (grads[0] * 2,)


class Exchanging(networks.Everything):
    def forward(self, x, t):
        h = F.tanh(Exchange()(F.relu(self.first(x))))
        return F.softmax_cross_entropy(self.last(F.reshape(h, (len(x), -1))), t)


def test_what_talks_to_others_is_never_run_again():
    """Not even to see whether it could be: the others would not answer."""
    data = networks.batches(6, size=2)
    Exchange.calls = 0
    _, session = networks.train(
        Exchanging,
        data,
        memory_limit='64MiB',
        planner='manual',
        actions={'*': 'swap', '*ReLU': 'recompute'},
    )
    assert session.statistics()['guided_iterations'] > 0
    assert session.plan.count(Action.RECOMPUTE) > 0
    assert Exchange.calls == len(data)
