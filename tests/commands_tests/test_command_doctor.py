"""``hybridmem doctor``."""

import json
import re
import subprocess
import sys
import types

import numpy as np
import pytest

from chainer_hybridmem.commands import doctor, machine, self_check, training
from chainer_hybridmem.commands.doctor import Check, Status
from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.training.cudnn import functions

TRAINING = 'training on the CPU'


def examined(hybridmem):
    """Runs the command; returns its status, its figures and its checks by name."""
    status, out, err = hybridmem('doctor', '--json', '-')
    assert all(line.startswith('hybridmem: ') for line in err.splitlines())
    figures = json.loads(out)
    return status, figures, {check['name']: check for check in figures['checks']}


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(doctor, 'train', lambda device: f'trained on {device}')


def test_everything_works_here(hybridmem):
    status, figures, checks = examined(hybridmem)
    assert status == 0 and figures['healthy']
    assert figures['installed']['numpy'] == np.__version__
    assert figures['installed']['chainer'] == '7.8.1'
    for name in ('memory is counted', 'chainer imports', TRAINING):
        assert checks[name]['status'] == 'works', checks[name]
    assert 'every bit equal' in checks[TRAINING]['detail']
    cuda = 'works' if compat.cuda_available() else 'absent'
    assert checks['training on CUDA']['status'] == cuda


# Plans by annealing and by trying everything, and a session with an exact layout.
AFTER_DOCTOR = """
from chainer_hybridmem import jit
from chainer_hybridmem.commands import main, self_check

assert main(['doctor']) == 0
made, late = jit._Compiled.compile, []

def note(function, signature):
    before = len(function.overloads)
    entry = made(function, signature)
    if len(function.overloads) > before:
        late.append((function.py_func.__qualname__, signature))
    return entry

jit._Compiled.compile = note
for name, limit in (('resnet50-b8-host', '60%'), ('alexnet-b32-host', '90%')):
    assert main(['plan', 'shipped:' + name, '--memory-limit', limit]) == 0
self_check.training_is_the_same('cpu')
assert not late, late
"""


def test_after_doctor_neither_plans_nor_sessions_compile():
    """Nor do they look for what another process has compiled."""
    done = subprocess.run(
        [sys.executable, '-c', AFTER_DOCTOR], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r'[1-9]\d+ functions (found )?compiled', done.stdout)


def test_as_text(no_training, folder, hybridmem):
    status, out, _ = hybridmem('doctor', '--json', 'd.json')
    assert status == 0
    assert 'works: trained on cpu' in out
    for check in json.loads((folder / 'd.json').read_text())['checks']:
        assert check['detail'] in out


def test_chainer_is_missing(hybridmem, monkeypatch):
    def absent():
        raise ImportError('No module named\nchainer')

    monkeypatch.setattr(doctor.compat, 'import_chainer', absent)
    status, figures, checks = examined(hybridmem)
    assert status == 1 and not figures['healthy']
    assert checks['chainer imports']['detail'] == (
        'ImportError: No module named chainer'
    )
    assert doctor.CHAINER_HINT in figures['hints']
    assert TRAINING not in checks


def test_training_differs(hybridmem, monkeypatch):
    right = training.Training.step

    def wrong(self):
        loss = right(self)
        if self.model.xp is np and _session_is_active():
            self.model.last.b.array[0] += 1
        return loss

    monkeypatch.setattr(training.Training, 'step', wrong)
    status, _, checks = examined(hybridmem)
    assert status == 1
    assert checks[TRAINING]['status'] == 'fails'
    assert 'differs from plain Chainer' in checks[TRAINING]['detail']


def _session_is_active():
    from chainer_hybridmem.training.session import session

    return getattr(session._active, 'session', None) is not None


def test_memory_is_not_counted(monkeypatch):
    from chainer_hybridmem.training.devices.host.memory import HostMemory

    monkeypatch.setattr(HostMemory, 'install', lambda self, reclaim: None)
    monkeypatch.setattr(HostMemory, 'uninstall', lambda self: None)
    check = doctor.attempt('memory is counted', doctor.count_memory)
    assert check.status is Status.FAILS
    assert '0 of 1048576 bytes' in check.detail


@pytest.mark.parametrize(
    'cupy, driver, status',
    [
        (machine.ABSENT, False, Status.ABSENT),
        (machine.ABSENT, True, Status.ABSENT),
        ('cupy-cuda12x 13.6.0', False, Status.ABSENT),
        ('cupy-cuda12x 13.6.0', True, Status.FAILS),
    ],
)
def test_cuda_that_cannot_be_used(cupy, driver, status, monkeypatch):
    monkeypatch.setattr(machine, 'cupy_version', lambda: cupy)
    monkeypatch.setattr(machine, 'has_nvidia_driver', lambda: driver)
    monkeypatch.setattr(compat, 'cuda_available', lambda: False)
    check = doctor.examine_cuda()
    assert check.status is status
    assert 'CuPy is' in check.detail and check.detail.endswith('.')
    assert 'cuda12' in check.hint


@pytest.fixture
def cudnn(monkeypatch):
    """CuPy's module for cuDNN, which is there."""
    name = 'cupy_backends.cuda.libs.cudnn'
    module = types.SimpleNamespace(getVersion=lambda: 8907)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(machine, 'cupy_version', lambda: 'cupy-cuda12x 13.6.0')
    monkeypatch.setattr(compat, 'cupy_has_cudnn', lambda: True)
    monkeypatch.setattr(compat, 'load_libraries', lambda: None)
    monkeypatch.delenv('CHAINER_CUDNN', raising=False)
    return name


def test_convolutions_use_cudnn(cudnn):
    check = doctor.examine_convolutions()
    assert check == Check('cuDNN convolutions', Status.WORKS, 'cuDNN 8907')


def test_convolutions_of_a_cupy_without_cudnn(cudnn, monkeypatch):
    def refuse():
        raise functions.LibraryError('libcudnn.so.9 was not found: install it.')

    monkeypatch.setattr(compat, 'cupy_has_cudnn', lambda: False)
    monkeypatch.setattr(functions, 'check_names', refuse)
    check = doctor.examine_convolutions()
    assert check.status is Status.ABSENT
    assert check.detail.endswith('instead: libcudnn.so.9 was not found: install it.')
    assert 'more time on a GPU' in check.hint


def test_convolutions_without_the_library(cudnn, monkeypatch):
    monkeypatch.setitem(sys.modules, cudnn, None)
    check = doctor.examine_convolutions()
    assert check.status is Status.ABSENT
    assert 'cannot be loaded' in check.detail and 'cu12==8.9' in check.hint


def test_convolutions_where_the_user_wants_no_cudnn(cudnn, monkeypatch):
    monkeypatch.setenv('CHAINER_CUDNN', '0')
    check = doctor.examine_convolutions()
    assert check.status is Status.ABSENT and 'CHAINER_CUDNN=0' in check.detail
    assert not check.hint


def test_convolutions_are_told_where_there_is_a_cupy(no_training, monkeypatch, cudnn):
    monkeypatch.setattr(doctor, 'looks', dict)
    assert 'cuDNN convolutions' in [check.name for check in doctor.examine()]
    monkeypatch.setattr(machine, 'cupy_version', lambda: machine.ABSENT)
    assert 'cuDNN convolutions' not in [check.name for check in doctor.examine()]


def test_cuda_that_can_be_used(no_training, monkeypatch):
    monkeypatch.setattr(machine, 'cuda_problem', lambda: None)
    assert doctor.examine_cuda() == Check(
        'training on CUDA', Status.WORKS, 'trained on cuda'
    )


def test_a_library_that_is_missing(monkeypatch):
    def look():
        raise OSError('libcublas.so.12: cannot open shared object file')

    monkeypatch.setattr(machine, 'has_nvidia_driver', lambda: True)
    check = doctor.examine_library('cuBLAS', look)
    assert check.status is Status.FAILS and 'libcublas.so.12' in check.detail
    assert 'cuda12' in check.hint
    monkeypatch.setattr(machine, 'has_nvidia_driver', lambda: False)
    check = doctor.examine_library('cuBLAS', look)
    assert check.status is Status.ABSENT and not check.hint


@pytest.mark.gpu
@pytest.mark.parametrize('name', doctor.looks())
def test_every_part_of_cuda(name):
    assert doctor.examine_library(name, doctor.looks()[name]).status is Status.WORKS


@pytest.mark.gpu
def test_training_on_cuda():
    assert 'every bit equal' in self_check.training_is_the_same('cuda')


@pytest.mark.parametrize(
    'threads, cores, expected',
    [
        (None, 4, None),
        (1, 1, None),
        (2, 4, None),
        (4, 4, 'OPENBLAS_NUM_THREADS=3'),
        (8, 4, 'OPENBLAS_NUM_THREADS=4'),
    ],
)
def test_hints_about_threads(threads, cores, expected, monkeypatch):
    monkeypatch.setattr(machine, 'blas_threads', lambda: threads)
    monkeypatch.setattr(machine, 'usable_cores', lambda: cores)
    hints = doctor.thread_hints()
    assert len(hints) == (expected is not None)
    assert expected is None or expected in hints[0]
