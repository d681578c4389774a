"""Blocks of README, guide and reference run, and the examples of docstrings.

Those of a page run in its order, in a folder of their own; those of a docstring as they
stand there, and print what follows them, if anything does.

What follows ``` says what a block is:

- ``python``: runs with a small model that fits, and the names of ``names()``;
- ``sh``: commands of a shell; ``console``: those after ``$``, with what they print:
  each line shown has to be printed so, every figure of it. ``...`` stands for what may
  differ, and alone in a line for other lines;
- ``json FILE``, ``python FILE``, ``ini FILE``, ``toml FILE``: a file for the blocks
  below;
- ``text``: no code;
- ``slow`` behind it: runs only with HYBRIDMEM_MATRICES=full (``make test-all``);
- ``no-run: REASON``: never runs, and the site shows the reason.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
from support import forks
from support.matrices import FULL

import chainer_hybridmem as hybridmem
from chainer_hybridmem.extras.memory_tests.plugin import MeasuredPeak
from chainer_hybridmem.training.recording.peak_meter import PeakMeter

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.training import StandardUpdater, Trainer

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / 'README.md',
    *sorted((ROOT / 'docs' / 'guide').glob('*.md')),
    *sorted((ROOT / 'docs' / 'reference').glob('*.md')),
]
CODE = sorted(
    path
    for path in (ROOT / 'chainer_hybridmem').rglob('*.py')
    if '>>> ' in path.read_text(encoding='utf-8')
)
FENCE = re.compile(r'^```([^\n]*)\n(.*?)^```$', re.DOTALL | re.MULTILINE)
FILES = {'json', 'ini', 'toml'}  # nothing but files
LANGUAGES = {'python', 'sh', 'console', 'text', *FILES}
TIMEOUT_SECONDS = 1800
BATCH, EXAMPLES = 4, 64
# A network and an allocation trace of the user's.
MODULE = """
import chainer.functions as F
import chainer.links as L
from chainer_hybridmem.architectures.classifier import PictureClassifier


class MyNet(PictureClassifier):
    insize = 16

    def __init__(self, n_class):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 8, 3)
            self.fc = L.Linear(None, n_class)

    def logits(self, x):
        return self.fc(F.relu(self.conv(x)))
"""
PROBLEM = 'id,lower,upper,size\n0,0,3,4\n1,1,5,8\n'


class Trained(L.Classifier):
    """Predicts of pictures, and has a loss of pictures and labels."""

    def forward(self, *args: object) -> object:
        return super().forward(*args) if len(args) > 1 else self.predictor(*args)


class Block(NamedTuple):
    """A fenced block: its language, what else stands behind ``` and its text."""

    language: str
    mark: str
    text: str


def blocks_of(page: pathlib.Path) -> list[Block]:
    found = FENCE.findall(page.read_text(encoding='utf-8'))
    return [Block(*(*head.split(' ', 1), '')[:2], text) for head, text in found]


def runs(block: Block) -> bool:
    if block.language == 'text' or block.mark.startswith('no-run'):
        return False
    return FULL or block.mark != 'slow'


def names() -> dict[str, object]:
    """What the examples take for granted."""
    model = Trained(
        chainer.Sequential(L.Linear(6, 8), F.relu, L.Linear(8, 3)), label_key=-1
    )
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    rng = np.random.RandomState(0)
    x = rng.rand(EXAMPLES, 6).astype(np.float32)
    t = rng.randint(0, 3, EXAMPLES).astype(np.int32)
    dataset = chainer.datasets.TupleDataset(x, t)
    iterator = chainer.iterators.SerialIterator(dataset, BATCH)
    updater = StandardUpdater(iterator, optimizer)

    def train(count: int) -> None:
        for _ in range(count):
            updater.update()

    return {
        'hybridmem': hybridmem,
        'chainer': chainer,
        'model': model.predictor,
        'optimizer': optimizer,
        'trainer': Trainer(updater, (3, 'iteration')),
        'train': train,
        'profile': hybridmem.load_profile('shipped:transformer-b8-host'),
        'x': x,
        't': t,
        'classifier': model,
    }


def write(block: Block) -> None:
    pathlib.Path(block.mark).write_text(block.text, encoding='utf-8')


def run_python(block: Block) -> None:
    if block.mark.endswith('.py'):
        write(block)
        return
    exec(compile(block.text, 'example', 'exec'), names())


def run_json(block: Block) -> None:
    json.loads(block.text)
    write(block)


def run_shell(block: Block) -> str:
    """Runs commands that stop at the first failure; returns what they print."""
    own = pathlib.Path.cwd() / 'bin'
    own.mkdir(exist_ok=True)
    server = forks.command_in(own)
    folders = [str(own), str(pathlib.Path(sys.executable).parent), os.environ['PATH']]
    result = subprocess.run(
        ['bash', '-ec', block.text],
        env={
            **os.environ,
            'PATH': os.pathsep.join(folders),
            'PYTHONPATH': os.pathsep.join([str(ROOT), str(pathlib.Path.cwd())]),
        },
        pass_fds=[server],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, block.text + result.stdout + result.stderr
    return result.stdout


def run_console(block: Block) -> None:
    for part in re.split(r'^\$ ', block.text, flags=re.MULTILINE)[1:]:
        command, shown = re.match(r'((?:[^\n]*\\\n)*[^\n]*\n)(.*)', part, re.S).groups()
        printed = run_shell(block._replace(text=command))
        missing = missing_lines(shown, printed)
        assert not missing, f'{missing} of {command!r}:\n{printed}'


def missing_lines(shown: str, printed: str) -> list[str]:
    """Lines of a block that are not printed; how far columns are apart is no matter."""
    lines = [' '.join(line.split()) for line in printed.splitlines()]
    missing = []
    for line in filter(None, map(str.strip, shown.splitlines())):
        words = map(re.escape, line.split())
        pattern = ' '.join(words).replace(re.escape('...'), '.*')
        if not any(re.fullmatch(pattern, other) for other in lines):
            missing.append(line)
    return missing


RUNNERS: dict[str, Callable[[Block], object]] = {
    'python': run_python,
    'json': run_json,
    'ini': write,
    'toml': write,
    'sh': run_shell,
    'console': run_console,
}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # files of the page are modules
    (tmp_path / 'mymodels.py').write_text(MODULE)
    (tmp_path / 'problem.csv').write_text(PROBLEM)
    (tmp_path / 'examples').symlink_to(ROOT / 'examples')
    for block in filter(runs, blocks_of(page)):
        RUNNERS[block.language](block)


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_blocks_say_what_they_are(page):
    for block in blocks_of(page):
        assert block.language in LANGUAGES, block
        if block.language in FILES or block.mark.endswith('.py'):
            assert re.fullmatch(r'\w+\.\w+', block.mark), block
        else:
            assert re.fullmatch(r'(slow|no-run: .{9,})?', block.mark), block


def test_a_block_that_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match='required: PROFILE'):
        run_shell(Block('sh', '', 'hybridmem plan --memory-limit 1GB\n'))
    with pytest.raises(AssertionError, match="'nonsense shown'"):
        run_console(
            Block(
                'console', '', '$ echo word \\\n  other\nword other\nnonsense shown\n'
            )
        )


@pytest.mark.parametrize(
    ('shown', 'missing'),
    [
        ('peak  1.5 GiB', []),
        ('peak  1.6 GiB', ['peak  1.6 GiB']),
        ('peak  1.5', ['peak  1.5']),
        ('peak ... GiB\n...\n', []),
        ('peak  1.5 GiB\n\ngap  3%\n', ['gap  3%']),
    ],
)
def test_every_figure_of_a_block_is_compared(shown, missing):
    assert missing_lines(shown, 'peak   1.5 GiB\n') == missing


# -- docstrings ----------------------------------------------------------------------
class Checker(doctest.OutputChecker):
    """An example that shows nothing may print anything."""

    def check_output(self, want: str, got: str, flags: int) -> bool:
        return not want or super().check_output(want, got, flags)


def run_docstrings(path: pathlib.Path, known: dict[str, object]) -> str:
    """Runs the examples of a module; returns what is wrong with them."""
    name = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    module = importlib.import_module(name.removesuffix('.__init__'))
    runner = doctest.DocTestRunner(Checker(), verbose=False)
    failures: list[str] = []
    tests = doctest.DocTestFinder().find(module)
    for test in filter(lambda test: test.examples, tests):
        test.globs = {**vars(module), **known}
        runner.run(test, out=failures.append)
    assert runner.tries
    return ''.join(failures)


@pytest.mark.parametrize('path', CODE, ids=lambda path: path.parent.name + path.stem)
def test_examples_of_docstrings_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = names()
    known['model'] = known['classifier']
    with contextlib.ExitStack() as measured:
        if path.parent.name == 'memory_tests':
            meter = measured.enter_context(PeakMeter())
            known['hybridmem_peak'] = MeasuredPeak(meter)
        assert not run_docstrings(path, known)


def test_a_docstring_that_is_wrong_is_told(tmp_path, monkeypatch):
    (tmp_path / 'wrong_docstring.py').write_text('"""\n>>> 1 + 1\n3\n>>> 1 / 0\n"""\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(globals(), 'ROOT', tmp_path)
    told = run_docstrings(tmp_path / 'wrong_docstring.py', {})
    assert 'Expected:\n    3\nGot:\n    2' in told and 'ZeroDivisionError' in told
