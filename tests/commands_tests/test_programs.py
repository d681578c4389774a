"""Commands that ask about a program: each runs it in a process of its own."""

from __future__ import annotations

import json
import pathlib

import pytest

from chainer_hybridmem.commands import programs
from chainer_hybridmem.records import library
from chainer_hybridmem.simulation import make_problem

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Trains as the words behind it say, far longer than is needed.
PROGRAM = """
import argparse
import os
import pathlib
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument('--how', default='once')
parser.add_argument('--batchsize', type=int, default=100)
parser.add_argument('--iterations', type=int, default=10**6)
args = parser.parse_args()
np.random.seed(0)


def make():
    layers = [L.Linear(64, 64) for _ in range(4)]
    for layer in layers:
        layer.W.array[...] = np.eye(64) / 2
    return chainer.ChainList(*layers)


def loss(model, x, times=1):
    h = x
    for layer in model:
        for _ in range(times):
            h = F.tanh(layer(h))
    return F.average(h)


def train(model, optimizer, times=1):
    x = np.random.rand(args.batchsize, 64).astype(np.float32)
    value = loss(model, x, times)
    model.cleargrads()
    value.backward()
    optimizer.update()
    print(float(value.array))


one, two = make(), make()
if args.how != 'never':
    first = chainer.optimizers.Adam().setup(one)
    second = chainer.optimizers.Adam().setup(two) if args.how == 'step' else None
for number in range(args.iterations):
    try:
        if args.how == 'never':
            with chainer.no_backprop_mode():
                loss(one, np.zeros((2, 64), np.float32))
            break
        if args.how == 'error':
            {}['what the program lacks']
        if args.how == 'other':
            train(one, first, 1 + number % 8 + number // 8)
        elif args.how == 'step':  # as with a critic that is trained more often
            train(one, first)
            train(one, first)
            train(two, second, 2)
        else:
            train(one, first)
    except Exception:
        if args.how == 'error':
            raise
    finally:
        if args.how == 'swallows':
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


def test_a_program_is_recorded_and_ended(hybridmem, program):
    """It is asked by way of an exception that ``except Exception`` does not catch."""
    status, out, err = hybridmem('profile', *MORE, '--', program, '--how', 'swallows')
    assert status == 0, err
    assert 'note' not in err
    assert out.splitlines()[0] == 'train.py --how swallows'
    profile = library.load_profile('p.json')
    assert len(profile.operations) == 9 + 9 + 1
    assert profile.operations[0].specs[0] == 'float32[100,64]'
    assert make_problem(profile).in_core_seconds > 0
    figures = json.loads(pathlib.Path('f.json').read_text())
    assert figures['program'] == ['train.py', '--how', 'swallows']
    assert int(pathlib.Path('closed').read_text()) < 10


def test_a_step_of_several_iterations(hybridmem, program):
    status, _, err = hybridmem('profile', *MORE, '--', program, '--how', 'step')
    assert status == 0, err
    assert 'A step has 3 iterations' in err
    assert '(it comes 1 x)' in err and 'of the others: 2 x ' in err
    assert len(library.load_profile('p.json').operations) == 17 + 17 + 1


def test_a_limit_in_percent_is_that_of_the_program(hybridmem, program):
    status, _, err = hybridmem(
        'profile', '--memory-limit', '90%', '-o', 'p.json', '--', '-m', 'train'
    )
    assert status == 0, err


@pytest.mark.parametrize(
    ('how', 'message'),
    [
        ('never', 'Nothing of the program could be recorded: no optimizer of Chainer '),
        ('other', 'be recorded in 12 iterations: a few of them have to compute the '),
        ('error', 'train.py --how error has ended with status 1 before enough of it '),
        ('missing.py', "There is no program 'missing.py'"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(refused, program, how, message):
    words = (program, '--how', how) if how != 'missing.py' else (how,)
    assert message in refused('profile', *MORE, '--iterations', '12', '--', *words)


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
