"""``hybridmem run``: programs in processes of their own."""

from __future__ import annotations

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

model = chainer.ChainList(*[L.Linear(64, 64) for _ in range(8)])
for layer in model:
    layer.W.array[...] = np.eye(64) / 2
optimizer = chainer.optimizers.SGD(0.1).setup(model)
x = np.linspace(0, 1, 64000, dtype=np.float32).reshape(1000, 64)
for _ in range(6):
    h = x
    for layer in model:
        h = F.tanh(layer(h))
    loss = F.average(h)
    model.cleargrads()
    loss.backward()
    optimizer.update()
    del h
    print(float(loss.array).hex())
print(__name__, sys.argv[1:], sys.path[0])
if 'raise' in sys.argv:
    {}['what the program lacks']
sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / 'program.py').write_text(PROGRAM)
    (tmp_path / 'infers.py').write_text('print("no Chainer")')
    return tmp_path


def run(folder: pathlib.Path, *args: str) -> tuple[int, list[str], list[str]]:
    """Exit status, and the lines of both streams."""
    found = subprocess.run(
        [sys.executable, '-m', 'chainer_hybridmem', 'run', *args],
        cwd=folder,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore'},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout.splitlines(), found.stderr.splitlines()


def test_a_program_runs_as_without_it(folder):
    status, out, err = run(folder, 'program.py', '--epoch', '3')
    assert (status, err) == (7, [])
    assert out[-1] == f"__main__ ['--epoch', '3'] {folder}"
    limited = run(folder, '--memory-limit', '1.5MB', '-m', 'program', 'raise')
    assert limited[0] == 1
    assert limited[1] == [*out[:-1], f"__main__ ['raise'] {folder}"]
    *trace, peak, limit, time = limited[2]
    assert trace[0] == 'Traceback (most recent call last):'
    assert trace[-1] == "KeyError: 'what the program lacks'"
    assert [line for line in trace if 'File' in line] == [trace[1]]
    assert 'program.py' in trace[1]
    assert re.match(r'hybridmem: peak 1\.\d+ MiB', peak)
    assert re.match(r'hybridmem: limit 1\.4\d* MiB; 5 iterations, ', limit)
    assert re.match(r'hybridmem: time [\d.]+ m?s / iteration', time)


def test_what_cannot_be_run_or_limited(folder):
    status, out, err = run(folder, '--memory-limit', '1GB', 'infers.py')
    assert (status, out) == (0, ['no Chainer'])
    assert err == [
        'hybridmem: the limit was not applied: the program has not imported Chainer'
    ]
    status, _, err = run(folder, 'missing.py')
    assert status == 1
    assert "There is no program 'missing.py'" in err[0]
    status, _, err = run(folder, '--planner', 'pooch', 'infers.py')
    assert status == 1
    assert '--planner is about a memory limit' in err[0]


@pytest.mark.skipif(os.name != 'posix', reason='there are no signals')
@pytest.mark.parametrize('limit', [(), ('--memory-limit', '1.5MB')])
def test_ctrl_c_ends_a_program_as_without_it(folder, limit):
    """By the signal: a loop of a shell ends, too."""
    source = (folder / 'program.py').read_text()
    endless = source.replace('range(6)', 'iter(int, 1)').replace(
        '.hex())', '.hex(), flush=True)'
    )
    (folder / 'program.py').write_text(
        "import atexit\natexit.register(print, 'end')\n" + endless
    )
    command = [sys.executable, '-m', 'chainer_hybridmem', 'run', *limit, 'program.py']
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore'},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        for _ in range(random.randrange(1, 9)):
            assert process.stdout.readline()
        time.sleep(random.uniform(0, 0.02))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == -signal.SIGINT, err
    assert out.splitlines()[-1] == 'end'
    *trace, last = err.splitlines()
    told = [line for line in (*trace, last) if line.startswith('hybridmem')]
    assert len(told) == (3 if limit else 0)
    assert [*trace, last][-1 - len(told)].startswith('KeyboardInterrupt')
