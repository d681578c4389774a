"""The plugin of pytest, run by a pytest of its own as a user would run it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest

import chainer_hybridmem  # for tests that run in this process, as is what they need
from chainer_hybridmem.forecasting import batch_estimate
from chainer_hybridmem.training.recording import peak_meter

pytest_plugins = ['pytester']
LOADED = chainer_hybridmem, peak_meter, batch_estimate
ROOT = pathlib.Path(__file__).resolve().parents[2]
# The entry point may be installed or not: the plugin is loaded once, by its name.
OURS = ('-p', 'no:hybridmem', '-p', 'chainer_hybridmem.extras.memory_tests.plugin')
TRAINING = """
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

class Net(chainer.Chain):
    def __init__(self, width={width}):
        super().__init__()
        with self.init_scope():
            self.wide = L.Linear(64, width)
            self.narrow = L.Linear(width, 4)

    def forward(self, x):
        return self.narrow(F.relu(self.wide(x)))

@pytest.fixture
def model():
    return L.Classifier(Net())

def make_step(model):
    optimizer = chainer.optimizers.Adam().setup(model)
    x, t = np.ones((64, 64), 'f'), np.zeros(64, 'i')
    return lambda size: optimizer.update(model, x[:size], t[:size])

def train(model, size=32):
    step = make_step(model)
    for _ in range(3):
        step(size)
"""


class Runner:
    """Writes tests and runs them in a process."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.folder = pytester.path
        self._pytester = pytester

    def write(self, tests: str, width: int = 1000) -> None:
        self._pytester.makepyfile(
            test_it='import chainer_hybridmem\n' + TRAINING.format(width=width) + tests
        )

    def run(self, *args: str) -> pytest.RunResult:
        return self._pytester.runpytest_inprocess(*OURS, '-p', 'no:xdist', *args)

    def run_apart(self, *args: str, plugin: tuple[str, ...] = OURS) -> pytest.RunResult:
        return self._pytester.runpytest_subprocess(*plugin, *args)


@pytest.fixture
def runner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.delenv('PYTEST_ADDOPTS', raising=False)
    return Runner(pytester)


def test_peaks_compare_with_sizes_and_say_what_they_are_made_of(runner):
    runner.write("""
def test_small(model, hybridmem_peak):
    train(model)
    assert hybridmem_peak < '100MiB'
    assert '1KiB' < hybridmem_peak
    assert hybridmem_peak > 256 * 1000 + 64 * 1000 * 4

def test_too_large(hybridmem_peak, model):
    train(model)
    assert hybridmem_peak < '100KiB'

def test_no_size(hybridmem_peak):
    assert hybridmem_peak < 'much'

@pytest.mark.fits('100KiB')
def test_marked(model):
    train(model)

@pytest.mark.fits('100MiB')
class TestMarked:
    def test_fits(self, model):
        train(model)
""")
    result = runner.run('--junitxml', 'report.xml')
    result.assert_outcomes(passed=2, failed=3)
    text = result.stdout.str()
    assert "bytes) < '100KiB'" in text
    assert 'predictor/wide: parameters' in text
    assert 'predictor/wide: optimizer states' in text
    assert "'much' is not a size" in text
    result.stdout.fnmatch_lines(['The peak is * more than 100KiB.*'])
    properties = xml.etree.ElementTree.parse(runner.folder / 'report.xml').iter(
        'property'
    )
    peaks = [
        p.get('value') for p in properties if p.get('name') == 'hybridmem_peak_bytes'
    ]
    assert len(peaks) == 3 and all(int(peak) > 500_000 for peak in peaks)


BASELINES = """
@pytest.mark.memory_baseline
def test_one(model):
    train(model)

@pytest.mark.memory_baseline(tolerance='50%')
def test_tolerant(model):
    train(model)
"""


def test_base_lines_fail_on_growth_and_name_the_layer(runner):
    runner.write(BASELINES)
    missing = runner.run()
    missing.assert_outcomes(failed=2)
    missing.stdout.fnmatch_lines(['*no base line of this test*--hybridmem-update*'])
    runner.run_apart('--hybridmem-update', '-n', '1').assert_outcomes(passed=2)
    path = runner.folder / 'hybridmem_baselines.json'
    first = json.loads(path.read_text())
    assert sorted(first['tests']) == [
        'test_it.py::test_one',
        'test_it.py::test_tolerant',
    ]
    runner.run().assert_outcomes(passed=2)  # the same byte in another process

    runner.write(BASELINES, width=1001)
    grown = runner.run()
    grown.assert_outcomes(passed=1, failed=1)
    grown.stdout.fnmatch_lines(
        ['*The peak has grown by*', '*predictor/wide grew by * (*: *): *before*now']
    )
    assert json.loads(path.read_text()) == first

    runner.write(BASELINES, width=999)
    smaller = runner.run('-k', 'one')
    smaller.assert_outcomes(passed=1)
    smaller.stdout.fnmatch_lines(['hybridmem: *test_one needs * less than in *'])
    runner.run('-k', 'one', '--hybridmem-update').assert_outcomes(passed=1)
    second = json.loads(path.read_text())['tests']
    assert (
        second['test_it.py::test_tolerant']
        == first['tests']['test_it.py::test_tolerant']
    )
    assert (
        second['test_it.py::test_one']['peak_bytes']
        < first['tests']['test_it.py::test_one']['peak_bytes']
    )


PAGE = ROOT / 'docs' / 'guide' / 'memory_tests.md'


def shown_blocks() -> list[list[str]]:
    """What the page shows of pytest's output."""
    return [
        block.splitlines()
        for block in re.findall(r'```text\n(.*?)```', PAGE.read_text(), re.S)
    ]


def test_the_page_shows_what_pytest_prints(runner):
    """A layer of 1,000 units, and then of 1,200."""
    assertion, growth = shown_blocks()
    asserts = '\ndef test_train(hybridmem_peak, model):\n    train(model)\n'
    runner.write(BASELINES + asserts + "    assert hybridmem_peak < '1MiB'\n")
    result = runner.run('-k', 'train')
    result.stdout.fnmatch_lines(
        [re.sub(r'([*?[])', '[\\1]', line) for line in assertion]
    )
    runner.run('-k', 'one', '--hybridmem-update').assert_outcomes(passed=1)
    runner.write(BASELINES, width=1200)
    result = runner.run('-k', 'one')
    result.stdout.fnmatch_lines([re.sub(r'([*?[])', '[\\1]', line) for line in growth])


@pytest.mark.parametrize(
    ('tolerance', 'why'),
    [("'lots'", "'lots' is not a size"), ("'x%'", 'percentage'), ('1, 2', 'takes one')],
)
def test_tolerances_that_make_no_sense(runner, tolerance, why):
    runner.write(f'@pytest.mark.memory_baseline({tolerance})\ndef test_it(): 1 / 0\n')
    result = runner.run('--hybridmem-update')
    result.assert_outcomes(errors=1)
    assert why in result.stdout.str()


HEADER = '{"format": "chainer_hybridmem/memory-baselines", "version": 1'
REPAIR = 'Restore the file, or remove it and run pytest --hybridmem-update.'


@pytest.mark.parametrize(
    ('text', 'why'),
    [
        ('nonsense', 'not JSON'),
        (HEADER + '}', "no object 'tests'"),
        (HEADER + ', "tests": {"test_it.py::test_one": {}}}', 'test_it.py::test_one'),
        (
            HEADER + ', "tests": {"a": {"peak_bytes": -5, "functions": {}}}}',
            '-5 is no number of bytes',
        ),
    ],
)
def test_damaged_base_lines_are_an_error(runner, text, why):
    runner.write('@pytest.mark.memory_baseline\ndef test_one(model): train(model)\n')
    path = runner.folder / 'hybridmem_baselines.json'
    path.write_text(text)
    checked = runner.run()
    checked.assert_outcomes(failed=1)
    checked.stdout.fnmatch_lines([f'{path}: *{why}*{REPAIR}'])
    updated = runner.run_apart('--hybridmem-update')
    assert updated.ret == pytest.ExitCode.USAGE_ERROR
    assert 'test_it.py' not in updated.stdout.str()  # no test ran for nothing
    updated.stderr.fnmatch_lines([f'ERROR: {path}: *{why}*{REPAIR}'])
    assert path.read_text() == text


def test_base_lines_that_cannot_be_written_stand_on_their_own(runner):
    runner.write("""
@pytest.mark.memory_baseline
def test_one(model, request):
    train(model)
    (request.config.rootpath / 'hybridmem_baselines.json').mkdir()
""")
    result = runner.run_apart('--hybridmem-update')
    path = runner.folder / 'hybridmem_baselines.json'
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(
        ['=* base lines not written *=', f'ERROR: {path} cannot be read: *{REPAIR}']
    )
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ('arguments', 'why'),
    [
        ("'16GiB', planner='swap-al', batchsize=64", "Did you mean 'swap-all'"),
        ("'16GiB', planner=3, batchsize=64", 'There is no planner 3'),
        ("'16GiB', planner='manual', batchsize=64", 'does nothing without options'),
        ("'16 lots'", "'16 lots' is not a size"),
        ("'0GiB'", 'must be a size above zero'),
        ('None', 'needs a memory limit'),
        ("'16GiB', gpu='v100-16gb-pcie', batchsize=64", "mean 'v100-16gb-pcie3'"),
        ("'16GiB', gpu=3, batchsize=64", 'gpu is 3; the name of a device model'),
        ("'16GiB', batchsize='64'", "Batch size '64' is out of range"),
        ("'16GiB', batchsize=0", 'Batch size 0 is out of range'),
        (
            "'16GiB', batchsize=64, batchsizes=(4, 2)",
            'batchsizes is (4, 2); two ascending',
        ),
        ("'16GiB', batchsize=64, batchsizes=4", 'batchsizes is 4; two ascending'),
        ("'16GiB', batchsize=64, batchsizes=()", 'batchsizes is (); two ascending'),
        ("'16GiB', batchsizes=(2, 4)", 'needs a batchsize'),
    ],
)
def test_arguments_of_fits_are_checked_before_anything_is_recorded(
    runner, arguments, why
):
    runner.write(f"""
@pytest.mark.fits({arguments})
def test_it(hybridmem_step):
    raise AssertionError('the test ran')
""")
    result = runner.run()
    result.assert_outcomes(errors=1)
    text = result.stdout.str()
    assert 'The marker fits cannot be used: ' in text and why in text
    assert 'the test ran' not in text


@pytest.mark.parametrize(
    ('arguments', 'why'),
    [
        ('3, model', 'the step is 3; a function of the number of examples'),
        ('lambda size: 1 / 0, 3', 'model is a int; a chainer.Link'),
    ],
)
def test_what_cannot_be_recorded_is_refused_before(runner, arguments, why):
    runner.write(f"""
@pytest.mark.fits('16GiB', batchsize=64)
def test_it(model, hybridmem_step):
    hybridmem_step({arguments})
""")
    result = runner.run()
    result.assert_outcomes(failed=1)
    assert why in result.stdout.str() and 'ZeroDivision' not in result.stdout.str()


def test_estimates_for_a_gpu(runner):
    runner.write("""
V100 = 'v100-16gb-pcie3'

@pytest.mark.fits('16GiB', gpu=V100, batchsize=64)
def test_fits(model, hybridmem_step):
    hybridmem_step(make_step(model), model)

@pytest.mark.fits('1MiB', gpu=V100, batchsize=6400)
def test_does_not(model, hybridmem_step):
    hybridmem_step(make_step(model), model)

class Deep(chainer.Sequential):
    def __init__(self):
        super().__init__(*[f for _ in range(6) for f in (L.Linear(64, 64), F.relu)])

@pytest.mark.parametrize('planner', [None, 'swap-all'])
def test_deep(request, planner, hybridmem_step):
    mark = pytest.mark.fits('10MiB', gpu=V100, batchsize=6400, planner=planner)
    request.node.add_marker(mark)
    model = L.Classifier(Deep())
    hybridmem_step(make_step(model), model)

@pytest.mark.fits(gpu=V100, batchsize=64)
def test_trains_by_itself(model):
    train(model)

@pytest.mark.fits('1GiB', gpu=V100)
def test_without_a_batchsize(): pass

@pytest.mark.fits('1GiB', gpu='abacus', batchsize=3)
def test_unknown(model, hybridmem_step):
    hybridmem_step(make_step(model), model)

@pytest.mark.fits('1GiB', batch=3)
def test_mistyped(): pass
""")
    result = runner.run()
    result.assert_outcomes(passed=2, failed=3, errors=3)
    result.stdout.fnmatch_lines_random(
        [
            'Batch size 6400 needs * on v100-16gb-pcie3 without a plan*more than 1MiB*',
            '*needs the training: take the fixture hybridmem_step*',
            '*needs a batchsize*',
            '*abacus*',
            "*cannot be used*unexpected keyword argument 'batch'*",
        ]
    )


def test_a_start_of_pytest_imports_nothing_heavy(runner):
    """Neither with tests that measure nothing, nor where the plugin is off."""
    (runner.folder / 'test_light.py').write_text(
        'import sys\n\ndef test_light():\n'
        "    assert not {'chainer', 'numba', 'scipy', 'cupy'} & set(sys.modules)\n"
    )
    runner.run_apart().assert_outcomes(passed=1)
    off = runner.run_apart('--fixtures', '-q', plugin=('-p', 'no:hybridmem'))
    assert 'hybridmem_peak' not in off.stdout.str()
    on = runner.run('--markers')
    on.stdout.fnmatch_lines(['@pytest.mark.fits(*', '@pytest.mark.memory_baseline(*'])


def test_the_entry_point_names_the_plugin():
    done = subprocess.run(
        [sys.executable, '-c', 'import configparser\n'
         'c = configparser.ConfigParser(); c.read("setup.cfg")\n'
         'print(c["options.entry_points"]["pytest11"].strip())'],
        cwd=ROOT, capture_output=True, text=True, check=True, env=dict(os.environ),
    )  # fmt: skip
    name, module = done.stdout.strip().split(' = ')
    assert (name, module) == (
        'hybridmem',
        'chainer_hybridmem.extras.memory_tests.plugin',
    )
