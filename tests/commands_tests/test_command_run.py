"""``hybridmem run``: programs in processes of their own."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest
from support import forks
from support.matrices import several

from chainer_hybridmem import commands
from chainer_hybridmem.commands.run import read_options
from chainer_hybridmem.training.chainer_access.compat import switch
from chainer_hybridmem.training.session.setting.options import OPTIONS

METHODS = ['fork', 'spawn', 'forkserver']
ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
import gc
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
    print(float(loss.array).hex(), flush=True)
print(__name__, sys.argv[1:], sys.path[0], gc.get_freeze_count() > 0)
assert __name__ != '__main__' or __builtins__.__name__ == 'builtins'
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
    found = forks.run(
        *('-m', 'chainer_hybridmem', 'run', *args),
        cwd=folder,
        env=environment_in(folder),
    )
    return found.returncode, found.stdout.splitlines(), found.stderr.splitlines()


def execute(
    folder: pathlib.Path, *args: str, **environment: str
) -> tuple[int, list[str], list[str]]:
    """The same of any command of a Python that has imported nothing."""
    found = subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env={**environment_in(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout.splitlines(), found.stderr.splitlines()


def environment_in(folder: pathlib.Path) -> dict[str, str]:
    """With what installing puts beside the package.

    Python imports ``sitecustomize`` as it starts, as it reads the installed file.
    """
    (folder / 'site').mkdir(exist_ok=True)
    shutil.copy(ROOT / switch.CHILDREN, folder / 'site' / 'sitecustomize.py')
    path = os.pathsep.join([str(ROOT), str(folder / 'site')])
    return {**os.environ, 'PYTHONPATH': path, 'PYTHONWARNINGS': 'ignore'}


def test_a_program_runs_as_without_it(folder):
    status, out, err = run(folder, 'program.py', '--epoch', '3')
    assert (status, err) == (7, [])
    assert out[-1] == f"__main__ ['--epoch', '3'] {folder} False"
    limited = run(folder, '--memory-limit', '1.5MB', '-m', 'program', 'raise')
    assert limited[0] == 1
    assert limited[1] == [*out[:-1], f"__main__ ['raise'] {folder} True"]
    *trace, peak, limit, time = limited[2]
    assert trace[0] == 'Traceback (most recent call last):'
    assert trace[-1] == "KeyError: 'what the program lacks'"
    assert [line for line in trace if 'File' in line] == [trace[1]]
    assert 'program.py' in trace[1]
    assert re.match(r'hybridmem: peak 1\.\d+ MiB', peak)
    assert re.match(r'hybridmem: limit 1\.4\d* MiB; 5 iterations, ', limit)
    assert re.match(r'hybridmem: time [\d.]+ m?s / iteration', time)


AGAIN = """
import os, sys
if 'AGAIN' not in os.environ:
    os.environ['AGAIN'] = 'yes'
    os.execv(sys.executable, [sys.executable, *sys.argv])
exec(open('program.py').read())
"""


def test_a_program_that_starts_itself_anew(folder):
    """As those do that set variables which are read when Python starts."""
    (folder / 'again.py').write_text(AGAIN)
    (folder / 'files').mkdir()
    command = ['-m', 'chainer_hybridmem', 'run', '--memory-limit', '1.5MB', 'again.py']
    status, out, err = execute(folder, *command, TMPDIR=str(folder / 'files'))
    assert (status, len(out)) == (7, 7)
    assert [line.split()[1] for line in err] == ['peak', 'limit', 'time']
    assert not list((folder / 'files').iterdir())


@pytest.mark.parametrize(
    ('program', 'named'),
    [
        (('program.py',), 'Raise --memory-limit or'),
        (('children.py', 'fork'), 'Raise --memory-limit or'),
        (('own.py',), 'Raise memory_limit or'),
    ],
)
def test_errors_name_what_their_reader_can_change(folder, program, named):
    (folder / 'children.py').write_text(CHILDREN)
    own = 'import chainer_hybridmem as h; h.optimize(model, 400000).__enter__()'
    source = (folder / 'program.py').read_text()
    (folder / 'own.py').write_text(source.replace('x = np', f'{own}\nx = np'))
    _, _, err = run(folder, '--memory-limit', '400kB', *program)
    assert any(named in line for line in err), err


TRAINER = """
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

class Net(chainer.ChainList):
    def __init__(self):
        super().__init__(*[L.Linear(64, 64) for _ in range(8)])

    def forward(self, x):
        for layer in self:
            x = F.tanh(layer(x))
        return F.average(x)

model = Net()
optimizer = chainer.optimizers.Adam().setup(model)
rows = np.ones((4000, 64), np.float32)
iterator = chainer.iterators.SerialIterator(rows, 1000)
updater = chainer.training.StandardUpdater(iterator, optimizer, loss_func=model)
chainer.training.Trainer(updater, (8, 'iteration'), out='out').run()
"""
# The limit holds from the beginning, so that NumPy's error is explained.
HOLDING = """
from chainer_hybridmem.training.devices.host.memory import HostMemory
HostMemory.raise_limit = lambda self, nbytes: False
"""
IN_THREAD = """
import runpy, threading
thread = threading.Thread(target=lambda: runpy.run_path('program.py'))
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ('kind', 'before'),
    [
        ('program', ''),
        ('program', HOLDING),
        ('trainer', ''),
        ('trainer', HOLDING),
        ('in_thread', HOLDING),
        ('children', HOLDING),
    ],
)
def test_a_limit_that_is_too_small_is_told_once(folder, kind, before):
    (folder / 'trainer.py').write_text(before + TRAINER)
    (folder / 'program.py').write_text(before + PROGRAM)
    (folder / 'in_thread.py').write_text(IN_THREAD)
    (folder / 'children.py').write_text(CHILDREN)
    program = [f'{kind}.py', *(['fork'] if kind == 'children' else [])]
    _, _, err = run(folder, '--memory-limit', '800kB', *program)
    processes = 2 if kind == 'children' else 1
    assert sum(line.startswith('Traceback') for line in err) == processes
    own = [line for line in err if 'File' in line and '/chainer_hybridmem/' in line]
    assert len(own) <= (processes if kind == 'children' else 0)  # that raises it
    assert any(line.startswith('  File') and 'function_node.py' in line for line in err)
    last = err if kind == 'children' else err[-1:]  # which write as they like
    told = re.compile(r'[\d.]+ [KM]iB .*: --memory-limit [\d.]+[KM]iB$')
    assert any(map(told.search, last))


def test_all_frames_are_shown_if_they_are_asked_for(folder):
    _, _, err = run(folder, '--all-frames', '--memory-limit', '800kB', 'program.py')
    assert any('/chainer_hybridmem/training/session/' in line for line in err)


def test_the_limit_of_the_last_line_is_one_to_run_with(folder):
    (folder / 'trainer.py').write_text(TRAINER)
    status, _, err = run(folder, '--memory-limit', '600kB', 'trainer.py')
    assert status == 1
    named = err[-1].rpartition(': ')[2]
    status, _, err = run(folder, *named.split(), 'trainer.py')
    assert (status, len(err)) == (0, 3)


def test_errors_that_are_not_of_memory_keep_their_frames(folder):
    (folder / 'bug.py').write_text(
        'from chainer_hybridmem.training.session.session import Session\n'
        'Session.statistics = lambda self: {}["a fault of ours"]\n' + PROGRAM
    )
    _, _, err = run(folder, '--memory-limit', '3MB', 'bug.py')
    assert any('/chainer_hybridmem/running/follower.py' in line for line in err)


def test_options_behind_the_program_are_told_of(folder):
    given = ['program.py', '--epoch', '3', '--memory-limit=1GB', '--planner', 'x']
    status, out, err = run(folder, *given)
    assert (status, str(given[1:]) in out[-1]) == (7, True)
    assert err == [
        'hybridmem: program.py has got --memory-limit and --planner: what is for '
        'hybridmem stands before the program: hybridmem run --memory-limit ... '
        '--planner ... program.py'
    ]


@pytest.mark.parametrize('kind', ['folder goes', 'file is too large'])
def test_a_report_that_cannot_be_written_leaves_the_exit_status(folder, kind):
    (folder / 'pages').mkdir()
    last = "import os; os.rmdir('pages')"
    if kind == 'file is too large':  # as on a full disk
        last = (
            'import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); '
            'resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))'
        )
    source = PROGRAM.replace('sys.exit(7)', f'{last}\nsys.exit(7)')
    (folder / 'program.py').write_text(source)
    command = ['--memory-limit', '1.5MB', '--report', 'pages/run.html', 'program.py']
    status, _, err = run(folder, *command)
    assert (status, len(err)) == (7, 4)
    assert re.match(r'hybridmem: no report: .*run.html cannot be written: ', err[-1])


def test_what_a_child_could_not_write_leaves_the_exit_status(folder):
    source = PROGRAM.replace(
        'sys.exit(7)',
        "import json, os\nfolder = json.loads(os.environ['HYBRIDMEM_RUN'])['folder']\n"
        "open(os.path.join(folder, '1.2.told'), 'w').write('[1')\nsys.exit(7)",
    )
    (folder / 'program.py').write_text(source)
    status, _, err = run(folder, '--memory-limit', '1.5MB', 'program.py')
    assert (status, len(err)) == (7, 3)


def test_a_profile_that_cannot_be_written_ends_nothing(folder):
    (folder / 'files').mkdir()
    source = PROGRAM.replace('import gc', "import gc, os\nos.rmdir('files')")
    (folder / 'program.py').write_text(source.replace('range(6)', 'range(16)'))
    status, out, err = run(folder, '--profile', 'files/p.json', 'program.py')
    assert (status, len(out)) == (7, 17)
    assert len(err) == 1
    assert re.match(r'hybridmem: no profile: .*p.json cannot be written: ', err[0])


def test_ctrl_c_while_importing_is_one_line(folder):
    (folder / 'models.py').write_text(
        'import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n'
        'signal.raise_signal(signal.SIGINT)\nimport chainer'
    )
    (folder / 'program.py').write_text('import models')
    for limit in ((), ('--memory-limit', '1GB')):
        status, _, err = run(folder, *limit, 'program.py')
        assert err == ['hybridmem: interrupted while importing models']
        assert status == -signal.SIGINT


def test_what_cannot_be_run_or_limited(folder):
    limited = ('-m', 'chainer_hybridmem', 'run', '--memory-limit', '1GB')
    status, out, err = execute(folder, *limited, 'infers.py')
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


CHILDREN = """
import multiprocessing, os, runpy, subprocess, sys, threading

def train(fails=False):
    sys.argv[1:] = ['raise'] if fails else []
    runpy.run_path('program.py')

if __name__ == '__main__':
    kind = sys.argv[1]
    if kind == 'subprocess':
        print(subprocess.call([sys.executable, 'program.py']))
    elif kind == 'thread':
        threading.Thread(target=train).start()
    elif kind == 'exit':
        try:
            train()
        finally:
            os._exit(3)
    else:
        context = multiprocessing.get_context(kind)
        children = [context.Process(target=train, args=(n,)) for n in (False, True)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print([child.exitcode for child in children])
"""


@pytest.mark.parametrize('kind', METHODS[: several(2, all_of_them=3)])
def test_children_share_the_limit_and_are_told_of(folder, kind):
    """One of two fails; the program does not care."""
    (folder / 'children.py').write_text(CHILDREN)
    status, out, err = run(folder, '--memory-limit', '4MB', 'children.py', kind)
    assert (status, out[-1]) == (0, '[7, 1]')
    told = [line for line in err if line.startswith('hybridmem: process')]
    (failed,) = (line for line in told if 'has ended with' in line)
    peaks = [line for line in told if line is not failed]
    assert len(peaks) == 2
    for told in peaks:
        assert re.search(r'limit 1.9\d* MiB \(of 3.8 MiB, shared by 2 ', told)
    assert failed.endswith("has ended with KeyError: 'what the program lacks'")


@pytest.mark.parametrize(
    ('kind', 'status'), [('subprocess', 0), ('thread', 0), ('exit', 3)]
)
def test_what_trains_elsewhere_or_ends_at_once(folder, kind, status):
    (folder / 'children.py').write_text(CHILDREN)
    found, out, err = run(folder, '--memory-limit', '1.5MB', 'children.py', kind)
    assert found == status
    assert [line for line in out if line.startswith('0x') or line.startswith('-0x')]
    told = ' '.join(line for line in err if line.startswith('hybridmem'))
    assert re.search(r'peak 1\.\d+ MiB.* limit 1\.43\d* MiB; [56] iterations', told)
    assert ('process' in told) == (kind == 'subprocess')


def test_a_program_is_repaired_by_a_variable(folder):
    (folder / 'imports.py').write_text(
        'import chainer, numpy, sys; print(numpy.asscalar, "numba" in sys.modules)'
    )
    status, _, err = execute(folder, 'imports.py', HYBRIDMEM_RUN='1')
    assert status == 1
    assert 'asscalar' in err[-1]
    command = ('-m', 'chainer_hybridmem', 'run', '--old-names', 'imports.py')
    status, out, err = execute(folder, *command)
    assert (status, err) == (0, [])
    assert out[-1].endswith(' False')  # what the repair does not need


def test_the_repair_of_every_program(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(switch, 'find_folder', lambda: str(tmp_path))
    for flags, last in (
        ((), 'run, not in its children: chainer_hybridmem.pth is not in site-packages'),
        (('--enable',), 'in every program'),
        ((), 'in every program'),
        (('--disable',), 'site-packages'),
        (('--disable',), 'site-packages'),
    ):
        assert commands.main(['repair', *flags]) == 0
        assert capsys.readouterr().out.strip().endswith(last)
    monkeypatch.setattr(switch, 'find_folder', lambda: str(tmp_path / 'missing'))
    assert commands.main(['repair', '--enable']) == 1
    assert 'may install packages there' in capsys.readouterr().err


def test_the_line_for_every_program_repairs(folder):
    site = folder / 'site'
    site.mkdir()
    (site / 'sitecustomize.py').write_text(switch.LINE)
    (folder / 'imports.py').write_text('import chainer; print(chainer.__version__)')
    path = os.pathsep.join([str(ROOT), str(site)])
    command = [sys.executable, 'imports.py']
    environment = {**os.environ, 'PYTHONPATH': path, 'PYTHONWARNINGS': 'ignore'}
    assert subprocess.check_output(command, cwd=folder, env=environment) == b'7.8.1\n'


@pytest.mark.skipif(os.name != 'posix', reason='there are no signals')
@pytest.mark.parametrize('limit', [(), ('--memory-limit', '1.5MB')])
def test_ctrl_c_ends_a_program_as_without_it(folder, limit):
    """By the signal: a loop of a shell ends, too."""
    source = (folder / 'program.py').read_text()
    endless = source.replace('range(6)', 'iter(int, 1)')
    (folder / 'program.py').write_text(
        "import atexit\natexit.register(print, 'end')\n" + endless
    )
    command = ('-m', 'chainer_hybridmem', 'run', *limit, 'program.py')
    with open(folder / 'errors', 'w+') as errors:
        options = {'env': environment_in(folder), 'stderr': errors.fileno()}
        process = forks.Fork(*command, cwd=folder, **options)
        for _ in range(8):  # a plan is followed
            assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, status = process.stdout.read(), process.wait()
        process.stdout.close()
        errors.seek(0)
        err = errors.read()
    assert status == -signal.SIGINT, err
    assert out.splitlines()[-1] == 'end'
    *trace, last = err.splitlines()
    told = [line for line in (*trace, last) if line.startswith('hybridmem')]
    assert len(told) == (3 if limit else 0)
    assert [*trace, last][-1 - len(told)].startswith('KeyboardInterrupt')


@pytest.mark.parametrize(
    ('given', 'options'),
    [
        ([], {}),
        (  # all of it goes to the disk
            ['--host-limit', '0', '--swap-dir', os.curdir],
            {'host_limit': 0, 'swap_dir': os.getcwd()},
        ),
        (['--splitting', 'false'], {'splitting': False}),
        (['--verify'], {'verify': True}),
    ],
)
def test_a_session_is_told_what_was_given(given, options):
    line = ['run', '--memory-limit', '1GiB', *given, 'program.py']
    assert read_options(commands.make_parser(line).parse_args(line)) == options


VALUES = {
    'FOLDER': (os.curdir, None),
    'RATE': ('2GB/s', 2e9),
    'NAME': (f'flags-{os.getpid()}', f'flags-{os.getpid()}'),  # of the whole machine
    'SIZE': ('1MiB', 2**20),
    'PATTERN=RULE': ('*/conv1/*=keep', [('*/conv1/*', 'keep')]),
    '{states,all}': ('states', 'states'),
    '{exact,true,false}': ('true', True),
    None: (None, True),
}


def test_every_flag_of_an_option_reaches_the_session(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {name: option.metadata['flag'] for name, option in OPTIONS.items()}
    flags = {name: flag for name, flag in flags.items() if flag is not None}
    words, options = [], {}
    for name, flag in flags.items():
        assert flag.metavar in VALUES, f'{flag.metavar} of {name}: name a value of it'
        text, value = VALUES[flag.metavar]
        options[name] = str(tmp_path) if flag.metavar == 'FOLDER' else value
        words += [flag.spelling or f'--{name.replace("_", "-")}']
        words += [] if text is None else [text]
    line = ['run', '--memory-limit', '1GiB', *words, 'program.py']
    assert read_options(commands.make_parser(line).parse_args(line)) == options


def test_what_is_about_a_limit_is_named_as_it_was_given(hybridmem):
    _, _, err = hybridmem('run', '--rule', '*=keep', 'program.py')
    assert 'error: --rule is about a memory limit' in err
