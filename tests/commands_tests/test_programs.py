"""Commands that ask about a program: each runs it in a process of its own."""

from __future__ import annotations

import json
import pathlib

import pytest
from support import forks

from chainer_hybridmem.commands import programs
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.units import format_bytes

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Trains as the words behind it say, far longer than is needed.
PROGRAM = """
import argparse
import pathlib

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument('--fails', action='store_true')
parser.add_argument('--batchsize', type=int, default=100)
args = parser.parse_args()
np.random.seed(0)
layers = [L.Linear(64, 64) for _ in range(8)]
for layer in layers:
    layer.W.array[...] = np.eye(64) / 2
model = chainer.ChainList(*layers)
optimizer = chainer.optimizers.SGD(0.1).setup(model)
for number in range(10**6):
    try:
        h = np.random.rand(args.batchsize, 64).astype(np.float32)
        for layer in model:
            h = F.tanh(layer(h))
        loss = F.average(h)
        del h
        model.cleargrads()
        loss.backward()
        optimizer.update()
        print(float(loss.array))
        if args.fails:
            {}['what the program lacks']
    except Exception:
        if args.fails:
            raise
    finally:
        pathlib.Path('closed').write_text(str(number))
"""
MORE = ('--memory-limit', '1GB', '-o', 'p.json', '--json', 'f.json')


@pytest.fixture
def program(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program in the current folder."""
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.setenv('PYTHONWARNINGS', 'ignore')
    (folder / 'train.py').write_text(PROGRAM)
    return 'train.py'


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs find imported what they need: one test shows that nothing else helps."""
    monkeypatch.setattr(
        programs,
        '_run_child',
        lambda folder: forks.run('-c', programs.CHILD, folder).returncode,
    )


def test_a_program_is_recorded_and_ended(hybridmem, program):
    """By an exception that ``except Exception`` does not catch."""
    status, out, err = hybridmem('profile', *MORE, '--', program, '--batchsize', '50')
    assert status == 0, err
    assert 'note' not in err
    assert out.splitlines()[0] == 'train.py --batchsize 50'
    profile = library.load_profile('p.json')
    assert len(profile.operations) == 17 + 17 + 1
    assert profile.operations[0].specs[0] == 'float32[50,64]'
    assert make_problem(profile).in_core_seconds > 0
    figures = json.loads(pathlib.Path('f.json').read_text())
    assert figures['program'] == ['train.py', '--batchsize', '50']
    assert int(pathlib.Path('closed').read_text()) < 10


@pytest.mark.usefixtures('forked')
def test_a_share_is_of_all_that_the_program_needs(hybridmem, program):
    """Also of the graph before, which its loss keeps; as under ``hybridmem run``."""
    arguments = ('--memory-limit', '90%', '--', program, '--batchsize', '400')
    status, _, err = hybridmem('profile', *MORE[2:], *arguments)
    assert status == 0, err
    assert 'of an older iteration' in ' '.join(err.split())
    peak = json.loads(pathlib.Path('f.json').read_text())['in_core_peak_bytes']
    assert peak > make_problem(library.load_profile('p.json')).in_core_peak_bytes
    status, out, err = hybridmem('plan', 'p.json', '--memory-limit', '90%')
    assert status == 0, err
    assert out.splitlines()[0].endswith(f'the in-core peak of {format_bytes(peak)}')


@pytest.mark.usefixtures('forked')
def test_any_batch_size_is_estimated(hybridmem, program):
    status, out, err = hybridmem(
        *('estimate', '--gpu', 'v100-16gb-pcie3', '--planner', 'swap-all'),
        *('--batch-arg=--batchsize', '--json', 'f.json'),
        *('--', program, '--batchsize', '5000'),
    )
    assert status == 0, err
    assert out.startswith('train.py --batchsize 5000 on Tesla V100')
    assert 'batch sizes 2 and 4' in out
    figures = json.loads(pathlib.Path('f.json').read_text())
    maps = 15 * 5000 * 64 * 4
    assert maps < figures['in_core_peak_bytes'] < 2 * maps
    assert figures['methods'][0]['images_per_second'] > 0


INFERS = """
import argparse, chainer, chainer.functions as F, chainer.links as L, numpy as np

class Net(chainer.Chain):
    def __init__(self):
        super().__init__(a=L.Linear(64, 256), b=L.Linear(256, 10))

    def forward(self, x):
        return self.b(F.relu(self.a(x)))

parser = argparse.ArgumentParser()
parser.add_argument('--size', type=int, default=50)
size = parser.parse_args().size
model, first = Net(), L.Linear(64, 64)
model(np.zeros((900, 64), 'f'))  # a backward could follow
with chainer.using_config('train', False), chainer.no_backprop_mode():
    while True:
        model(first(np.zeros((size, 64), 'f')))
"""


@pytest.mark.usefixtures('forked')
def test_a_program_that_infers(hybridmem, program, folder, refused):
    (folder / 'infers.py').write_text(INFERS)
    asked = ('inference', '--json', '-')
    status, out, _ = hybridmem(*asked, '--', 'infers.py')
    assert status == 0
    figures = json.loads(out)
    assert (figures['link'], figures['batchsize']) == ('Net', None)
    assert figures['blob_bytes'] == 50 * 4 * (64 + 256 + 256 + 10)
    asked += ('--batch-arg=--size', '--batchsize', '900')
    status, out, _ = hybridmem(*asked, '--', 'infers.py')
    assert status == 0
    assert json.loads(out)['blob_bytes'] == 18 * figures['blob_bytes']
    endless = refused('inference', '--batchsize', '8', '--', 'infers.py')
    assert 'name its argument with --batch-arg' in endless
    (folder / 'train.py').write_text(PROGRAM.replace('10**6', '3'))
    status, _, err = hybridmem('inference', '--', 'train.py')
    assert status == 1
    assert 'it has called no link under' in err


@pytest.mark.usefixtures('forked')
def test_two_runs_are_compared(hybridmem, program):
    status, out, err = hybridmem(
        *('verify', '--memory-limit', '3MB', '--planner', 'swap-all'),
        *('--', program, '--batchsize', '1000'),
    )
    assert status == 0, err
    assert out.startswith('train.py --batchsize 1000: swap-all in ')
    assert '10 iterations, ' in out and 'every bit the same' in out


@pytest.mark.usefixtures('forked')
@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (('train.py', '--fails'), 'train.py --fails has ended with status 1 before '),
        (('missing.py',), "There is no program 'missing.py'"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(hybridmem, program, words, message):
    status, out, err = hybridmem('profile', *MORE, '--', *words)
    assert (status, out) == (1, '')
    assert message in err.splitlines()[-1]


def test_the_batch_size_needs_its_argument(refused, program):
    gpu = ('--gpu', 'v100-16gb-pcie3')
    assert '--batch-arg' in refused('batch', *gpu, '--', program)
    assert '--batchsize' in refused('estimate', '--batch-arg=-b', '--', program)
    message = refused('estimate', '--batchsize', '8', '--', program)
    assert 'name its argument with --batch-arg' in message


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('--insize', '8', '--', 'train.py'), '--insize is for a network of --arch'),
        (('--device', 'cpu', '--', 'train.py'), '--device is for a network of --arch'),
        (('--', '-m'), '-m names no module'),
    ],
)
def test_what_goes_with_a_program(refused, arguments, message):
    assert message in refused('profile', *MORE, *arguments)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            (),
            'what is asked about? Name a network with --arch, or a program: hybridmem',
        ),
        (('--arch', 'resnet50'), 'how many pictures of resnet50? Give --batchsize'),
    ],
)
def test_something_has_to_be_asked_about(hybridmem, arguments, message):
    status, _, err = hybridmem('profile', *MORE, *arguments)
    assert status == 2
    assert message in err


@pytest.mark.parametrize(
    ('words', 'name', 'found', 'expected'),
    [
        ('a --size 8 -v', '--size', 8, 'a --size 3 -v'),
        ('a --size=8 x', '--size', 8, 'a --size=3 x'),
        ('a x', '-b', None, 'a x -b 3'),
        ('a train.batch=8', 'train.batch=', 8, 'a train.batch=3'),
        ('a', 'batch=', None, 'a batch=3'),
        ('a --size 8 --size 9', '--size', 9, 'a --size 3 --size 3'),
        ('a --size large', '--size', None, 'a --size 3'),
    ],
)
def test_the_batch_size_of_a_command_line(words, name, found, expected):
    program = programs.Program(tuple(words.split()), name)
    assert program.batchsize == found
    assert program.with_batchsize(3).words == tuple(expected.split())
