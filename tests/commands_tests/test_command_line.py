"""What all commands share: exit codes, one-line errors, broken pipes, imports."""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import forks, toys

import chainer_hybridmem
from chainer_hybridmem import commands, version
from chainer_hybridmem.commands import arguments
from chainer_hybridmem.errors import (
    InfeasibleError,
    OptionError,
    OutOfMemoryError,
    use_flags,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.profile_file import serialise_profile
from chainer_hybridmem.planning.simulation import make_problem

HALF = ('--memory-limit', '50%')
SIMPLE = ('--memory-limit', '45MiB', '--planner', 'swap-all')
READERS = [
    ('plan', 'p.json', *HALF),
    ('compare', 'p.json', *HALF),
    ('trace', 'p.json', 'plan.json', '-o', 't.json'),
]


def start(*arguments):
    """Runs a program that finds the package, installed or not."""
    root = str(Path(chainer_hybridmem.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH')]))
    return subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, 'PYTHONPATH': path},
    )


def python(*arguments):
    return start(sys.executable, *arguments)


USUAL = {
    *('--arch', '--batchsize', '--batch-arg', '--gpu', '--memory-limit'),
    *('--output', '--json'),
}


def test_the_help_of_estimate_begins_with_seven_flags(hybridmem):
    _, out, _ = hybridmem('estimate', '--help')

    usage, _, text = out.partition('\n\n')
    assert len(usage.splitlines()) == 1
    assert text.splitlines()[2].startswith('Two tiny')  # not indented
    options = text.partition('\noptions:')[2]
    first, _, rest = options.partition('\n\n')
    listed = set(re.findall(r'^ .*?(--[a-z-]+)', first, re.MULTILINE)) - {'--help'}
    assert listed == USUAL
    assert rest.startswith('another network or plan:\n')
    assert re.findall(r'^[a-zA-Z ]+:$', rest, re.MULTILINE)[1:] == [
        'several GPUs:',
        'for research:',
    ]


def test_version_and_help(hybridmem):
    assert hybridmem('--version') == (0, f'hybridmem {version.describe()}\n', '')
    status, out, _ = hybridmem('--help')
    assert status == 0
    for command in commands.COMMANDS:
        assert len(re.findall(rf'^  {command.name}  +{command.help}$', out, re.M)) == 1
        assert hybridmem(command.name, '--help')[0] == 0
    assert max(map(len, out.splitlines())) <= 80
    assert out.endswith(f'\n  {commands.EXAMPLE}\n')
    program, *example = commands.EXAMPLE.split()
    assert program == 'hybridmem'
    assert commands.make_parser(example).parse_args(example)


@pytest.mark.parametrize('command', ['estimate', 'batch'])
def test_flags_for_research_have_a_heading_of_their_own(command, hybridmem):
    _, out, _ = hybridmem(command, '--help')
    before, _, below = out.partition('\nfor research:\n')
    told = {line.split()[0] for line in below.splitlines() if line.startswith('  --')}
    assert told == {
        '--convolution',
        '--images-per-second',
        '--calibrate-batch',
        '--record-on',
        '--sample-batches',
        '--samples',
    }
    described = before.partition('\n\n')[2]  # behind the line of usage
    assert not [flag for flag in told if f'\n  {flag} ' in described]


def test_runs_as_a_module():
    result = python('-m', 'chainer_hybridmem', '--version')
    assert result.stdout == f'hybridmem {version.describe()}\n'


@pytest.mark.parametrize(
    'arguments',
    [
        (),
        ('fly',),
        ('plan', 'p.json'),
        ('plan', 'p.json', '--memory-limit', 'much'),
        ('plan', 'p.json', '--memory-limit', '-1GB'),
        ('plan', 'p.json', '--memory-limit', '0'),
        ('plan', 'p.json', '--memory-limit', '1GB', '--time-budget', '0'),
        ('compare', 'p.json', '--memory-limit', '1GB', '--time-budget', 'nan'),
        ('plan', 'p.json', '--memory-limit', '0%'),
        ('plan', 'p.json', '--memory-limit', 'nan%'),
        ('plan', 'p.json', '--memory-limit', '1GB', '--option', 'node_budget'),
        ('trace', 'p.json', 'plan.json'),
        ('compare', '--memory-limit', '1GB'),
    ],
)
def test_usage_errors(arguments, hybridmem):
    status, out, err = hybridmem(*arguments)
    assert status == 2
    assert out == ''
    assert 'error: ' in err.splitlines()[-1]


@pytest.mark.parametrize('arguments', READERS)
@pytest.mark.parametrize(
    'text, expected',
    [
        (None, 'cannot be read'),
        ('', 'not JSON'),
        ('[1, 2]', "'chainer_hybridmem/profile' was expected"),
        ('{"format": "chainer_hybridmem/plan", "version": 1}', 'was expected'),
        ('{"format": "chainer_hybridmem/profile", "version": 99}', '99'),
        ('{"format": "chainer_hybridmem/profile", "version": 1}', 'cannot be used'),
    ],
)
def test_profile_is_not_one(arguments, text, expected, folder, refused):
    if text is not None:
        (folder / 'p.json').write_text(text)
    message = refused(*arguments)
    assert expected in message and message.startswith('hybridmem: error: p.json')


def slow(body):
    body['operations'][0][3] = -1.0


def cyclic(body):
    body['recipes'][0][1] = [2]


def linkless(body):
    del body['link']['d2h_bytes_per_second']


@pytest.mark.parametrize('arguments', READERS)
@pytest.mark.parametrize(
    'damage, expected',
    [
        (slow, 'operation 0 takes -1.0 seconds'),
        (cyclic, 'the dependencies have a cycle'),
        (linkless, 'its link lacks d2h_bytes_per_second'),
    ],
)
def test_profile_contradicts_itself(arguments, damage, expected, profile, refused):
    body = json.loads(serialise_profile(profile))
    damage(body)
    with open('p.json', 'w') as file:
        json.dump(body, file)
    message = refused(*arguments)
    assert expected in message and 'p.json: ' in message


def test_profile_is_not_text(folder, refused):
    (folder / 'p.json').write_bytes(bytes(range(256)))
    assert 'cannot be read' in refused('compare', 'p.json', '--memory-limit', '50%')
    assert 'cannot be read' in refused('compare', '.', '--memory-limit', '50%')


@pytest.mark.parametrize(
    'output, expected',
    [('missing/x.json', 'there is no folder missing'), ('taken', 'not a file')],
)
@pytest.mark.parametrize('argument', ['-o', '--json'])
def test_output_cannot_be_written(output, expected, argument, folder, profile, refused):
    (folder / 'taken').mkdir()
    limit = ('--memory-limit', '50%')
    assert expected in refused('plan', 'p.json', *limit, argument, output)
    assert sorted(p.name for p in folder.iterdir()) == ['p.json', 'taken']


@pytest.mark.parametrize(
    'arguments, expected',
    [
        (('plan', 'p.json', *HALF, '-o', './p.json'), 'what the command reads'),
        (('plan', 'p.json', *HALF, '--json', 'p.json'), 'what the command reads'),
        (('compare', 'p.json', *HALF, '--json', 'p.json'), 'what the command reads'),
        (('trace', 'p.json', 'q.json', '-o', 'q.json'), 'what the command reads'),
        (('show', 'p.json', 'q.json', '-o', 'p.json'), 'what the command reads'),
        (('plan', 'p.json', *HALF, '-o', 'x', '--json', 'x'), 'another output'),
        (('plan', 'p.json', *HALF, '-o', '-'), 'name a file'),
        (('plan', 'p.json', *HALF, '-o', ''), 'name one'),
        (('show', 'p.json', 'q.json', '-o', '-'), 'name a file'),
    ],
)
def test_no_output_takes_the_place_of_another_file(
    arguments, expected, folder, profile, refused
):
    before = (folder / 'p.json').read_text()
    assert expected in refused(*arguments)
    assert (folder / 'p.json').read_text() == before
    assert [path.name for path in folder.iterdir()] == ['p.json']


def test_output_replaces_a_file_whole(folder, profile, hybridmem):
    (folder / 'plan.json').write_text('x' * 10**6)
    status, _, _ = hybridmem(
        'plan', 'p.json', '--memory-limit', '60%', '-o', 'plan.json'
    )
    assert status == 0
    assert hybridmem('trace', 'p.json', 'plan.json', '-o', 't.json')[0] == 0
    assert sorted(p.name for p in folder.iterdir()) == ['p.json', 'plan.json', 't.json']


@pytest.mark.parametrize(
    'error, status, expected',
    [
        (KeyboardInterrupt(), 130, 'interrupted'),
        (MemoryError('lots'), 1, 'out of memory: lots'),
        (OSError(28, 'No space left on device'), 1, 'No space left'),
    ],
)
def test_exit_status(error, status, expected, profile, hybridmem, monkeypatch):
    def interrupt(self, args):
        raise error

    monkeypatch.setattr(commands.CompareCommand, 'run', interrupt)
    found, _, err = hybridmem('compare', 'p.json', '--memory-limit', '50%')
    assert found == status
    assert err.startswith('hybridmem: error: ') and expected in err


@pytest.mark.parametrize('command', commands.COMMANDS)
def test_errors_name_options_as_they_are_typed(command):
    parser = argparse.ArgumentParser()
    command().add_arguments(parser)
    flags = arguments.find_flags(parser)
    assert all(flag in parser.format_help() for flag in flags.values())
    python = use_flags(flags)
    try:
        for name, flag in flags.items():
            told = str(
                OutOfMemoryError(f'{name} is 3; use {name}=4, or {name}={"ab"!r}.')
            )
            assert told == f'{flag} is 3; use {flag} 4, or {flag} ab.'
            for other in (
                f'/{name}/{name}.py',
                f'of({name})',
                f'x_{name}',
                f'{name!r}',
            ):
                assert str(OptionError(other)) == other
    finally:
        use_flags(python)
    assert str(OptionError('Raise memory_limit.')) == 'Raise memory_limit.'


@pytest.mark.parametrize('command', commands.COMMANDS)
def test_a_missing_value_is_told_with_flags_of_the_command(command, hybridmem):
    parser = argparse.ArgumentParser()
    command().add_arguments(parser)
    for action in parser._actions:
        if action.option_strings and action.nargs is None:
            status, _, err = hybridmem(command.name, action.option_strings[-1])
            assert (status, err.count('\n')) == (2, 1)
            told = set(re.findall(r'--[a-z][\w-]+', err))
            assert told == {o for o in action.option_strings if o[:2] == '--'} & told
            assert told or len(action.option_strings[-1]) == 2


@pytest.mark.parametrize('command', ['run', 'verify', 'profile'])
def test_what_trains_in_a_limit_has_the_options_that_its_errors_name(command):
    """See ``OutOfMemoryExplainer`` and the planners."""
    line = [command]
    subparsers = commands.make_parser(line)._subparsers._group_actions[0].choices
    flags = arguments.find_flags(subparsers[command])
    named = {'splitting', 'cross_iteration', 'host_limit', 'swap_dir', 'memory_limit'}
    assert named <= set(flags)


def test_a_command_says_its_own_flags_only(profile, hybridmem):
    most = ('p.json', '--memory-limit', '90%', '--planner', 'swap-all')
    _, _, err = hybridmem('plan', *most, '--time-budget', '3')
    assert "'swap-all' has no option --time-budget; it has" in err
    _, _, err = hybridmem('plan', *most, '--host-limit', '1MiB')
    assert '--host-limit is ' in err and 'give swap_dir' in err
    assert 'use --planner hybrid, which' in err
    with pytest.raises(InfeasibleError, match='host_limit is'):
        problem = make_problem(profile, host_limit_bytes=2**20)
        make_plan(problem, problem.in_core_peak_bytes, 'swap-all')


def test_a_bug_is_not_hidden(profile, hybridmem, monkeypatch):
    def fail(self, args):
        raise ZeroDivisionError

    monkeypatch.setattr(commands.CompareCommand, 'run', fail)
    with pytest.raises(ZeroDivisionError):
        hybridmem('compare', 'p.json', '--memory-limit', '50%')


SHELL = (
    '"{python}" -m chainer_hybridmem compare p.json --memory-limit 60% '
    '--planner swap-all --json -{end}'
)


@pytest.mark.skipif(sys.platform != 'linux', reason='needs bash and /dev/full')
@pytest.mark.parametrize(
    'end, status, message',
    [
        (' | true; exit ${PIPESTATUS[0]}', 141, ''),
        (' > /dev/full', 1, 'hybridmem: error: [Errno 28] No space left on device\n'),
    ],
)
def test_standard_output_is_gone(end, status, message, folder, profile):
    # A slow start gives `true` the time to end first.
    script = SHELL.format(python=sys.executable, end=end)
    result = start('bash', '-c', script)
    assert result.returncode == status
    assert result.stderr == message


PURE = """
import sys
from chainer_hybridmem.commands import main
limit = ['--memory-limit', '60%']
assert main(['plan', 'p.json', *limit, '-o', 'plan.json']) == 0
assert main(['compare', 'p.json', *limit]) == 0
assert main(['trace', 'p.json', 'plan.json', '-o', 't.json']) == 0
assert 'chainer' not in sys.modules and 'cupy' not in sys.modules
"""


def test_planning_needs_no_chainer(folder, profile):
    result = python('-c', PURE)
    assert result.returncode == 0, result.stderr


def test_help_is_quick():
    script = 'import sys; from chainer_hybridmem import commands as c; c.make_parser'
    result = python('-c', f"{script}(); sys.exit('numba' in sys.modules)")
    assert result.returncode == 0, result.stderr
    result = python('-c', f"{script}(['--help']); sys.exit('numpy' in sys.modules)")
    assert result.returncode == 0, result.stderr


class Problem:
    whole_bytes = 200


@pytest.mark.parametrize(
    'text, nbytes',
    [('50%', 100), ('12.5 %', 25), ('700', 700), ('2 kB', 2000), ('1KiB', 1024)],
)
def test_limit(text, nbytes):
    assert arguments.Limit(text).bytes_for(Problem()) == nbytes


@pytest.mark.parametrize('text', ['50', '100', '7'])
def test_a_percentage_without_its_sign_is_asked_for(text):
    with pytest.raises(OptionError, match=f'write {text}%.*{text}GB'):
        arguments.Limit(text)


def test_limit_is_never_zero():
    assert arguments.Limit('0.001%').bytes_for(Problem()) == 1


def test_positive():
    assert arguments.positive('3') == 3
    for text in ('0', '-2', '1.5', 'x', ''):
        with pytest.raises(argparse.ArgumentTypeError, match='above zero'):
            arguments.positive(text)


EVIL = 'a\x1b[2J\u202eb\x9b\u2066c\u2028d\re\nf'
EVIL_FILE = 'x\x1b[31m\u202e\udc80\n'


def clean(text):
    """Whether nothing in it steers a terminal."""
    return all(line.isprintable() for line in text.split('\n'))


@pytest.fixture
def evil(folder):
    """A profile of a stranger and a plan for it, in files with names like that."""
    profile = toys.chain()
    storages = [
        dataclasses.replace(storage, label=EVIL + storage.label)
        for storage in profile.storages
    ]
    operations = [
        dataclasses.replace(op, label=EVIL + op.label) for op in profile.operations
    ]
    profile = dataclasses.replace(
        profile, storages=tuple(storages), operations=tuple(operations)
    )
    plan = make_plan(profile, '45MiB')
    paths = EVIL_FILE + 'p.json', EVIL_FILE + 'plan.json'
    for value, path in zip((profile, plan), paths, strict=True):
        library.save(value, path)
    return paths


@pytest.mark.parametrize(
    'command',
    [
        'plan PROFILE --memory-limit 45MiB --maps',
        'plan PROFILE --memory-limit 1B',
        'compare PROFILE PROFILE --memory-limit 45MiB 1B',
        'layout PROFILE --plan PLAN',
        'layout PROFILE.csv',
        'trace PROFILE PLAN -o PROFILE.trace.json --snapshot PROFILE.pickle',
        'show PROFILE PLAN -o PROFILE.png',
        'plan PLAN --memory-limit 45MiB',
        'plan PROFILE.missing --memory-limit 45MiB',
        'plan PROFILE --memory-limit 45MiB PROFILE',
    ],
)
def test_names_of_strangers_do_not_steer_the_terminal(
    command, evil, hybridmem, monkeypatch
):
    monkeypatch.setattr('chainer_hybridmem.commands.progress.EVERY_SECONDS', 0)
    profile, plan = evil
    words = [
        w.replace('PROFILE', profile).replace('PLAN', plan) for w in command.split()
    ]
    _, out, err = hybridmem(*words)
    assert (out or err) and clean(out) and clean(err), out + err


def redirected(redirection, *arguments):
    words = ['"$@"', redirection]
    return start(
        'bash', '-c', ' '.join(words), 'bash', sys.executable, '-m',
        'chainer_hybridmem', *arguments,
    )  # fmt: skip


@pytest.mark.parametrize(
    'arguments',
    [
        ('plan', 'p.json', *SIMPLE),
        ('plan', 'p.json', *SIMPLE, '-o', 'plan.json'),
    ],
)
def test_standard_output_is_closed(arguments, folder, profile):
    """The work is done, nothing is complained about, and the status tells."""
    result = redirected('>&-', *arguments)
    assert (result.returncode, result.stderr) == (141, '')
    assert '-o' not in arguments or (folder / 'plan.json').exists()


def test_standard_error_is_closed(folder, profile):
    result = redirected('2>&-', 'plan', 'missing.json', *HALF)
    assert (result.returncode, result.stdout, result.stderr) == (1, '', '')


def test_letters_that_the_terminal_does_not_have(folder, profile, monkeypatch):
    storages = [
        dataclasses.replace(storage, label='Gr\u00f6\u00dfe')
        for storage in profile.storages
    ]
    library.save(dataclasses.replace(profile, storages=tuple(storages)), 'g.json')
    monkeypatch.setenv('PYTHONIOENCODING', 'ascii')
    arguments = ('plan', 'g.json', *SIMPLE, '--maps')
    result = python('-m', 'chainer_hybridmem', *arguments)
    assert result.returncode == 0, result.stderr
    assert r'Gr\xf6\xdfe' in result.stdout


CHATTY_SOLVER = """
import ctypes, sys
from scipy import optimize
from chainer_hybridmem import commands

printf = ctypes.CDLL(None).printf

def chatty(solve):
    def solver(*args, **options):
        printf(b'HighsMipSolverData: a line that nobody asked for\\n')
        return solve(*args, **options)
    return solver

optimize.milp, optimize.linprog = chatty(optimize.milp), chatty(optimize.linprog)
status = commands.main(sys.argv[1:])
printf(b'solved\\n')
sys.exit(status)
"""


@pytest.mark.parametrize('command', ['plan', 'compare'])
def test_nobody_sees_what_a_solver_prints(command, folder):
    """HiGHS prints some lines from C, with every option that turns output off."""
    library.save(toys.chain(8, bandwidth=3.0 * toys.MIB), 'p.json')
    words = (command, 'p.json', '--memory-limit', '75%', '--planner', 'exact')
    done = forks.run('-c', CHATTY_SOLVER, *words, '--json', '-')
    assert done.returncode == 0, done.stderr
    found, _, rest = done.stdout.rpartition('solved')
    assert json.loads(found) and not rest.strip(), 'C prints again afterwards'
    assert 'a line that nobody asked for' not in done.stdout + done.stderr
