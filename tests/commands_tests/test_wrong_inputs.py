"""What a user may get wrong: one sentence, with the values and what to do next."""

import gzip
import json
import sys

import pytest

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library

GPU = ('--gpu', 'v100-16gb-pcie3')
LIMIT = ('--memory-limit', '70%')
NET = ('--arch', 'own_networks:Tiny', '--n-class', '10')
IN_4 = (*NET, '--batchsize', '4')
RUN = ('run', *LIMIT)
PLAN = ('plan', 'p.json', *LIMIT)


@pytest.fixture
def files(profile, folder, network, monkeypatch):
    """Files that are not what they should be."""
    monkeypatch.delitem(sys.modules, 'no_imports', raising=False)
    plan = make_plan(profile, profile.initial_bytes + 2**30, 'swap-all')
    library.save(plan, str(folder / 'plan.json'))
    short = json.loads((folder / 'plan.json').read_text())
    short['maps'] = short['maps'][:1]
    for name, text in {
        'empty.json': '',
        'list.json': '[]',
        'none.json': '{}',
        'other.json': '{"format": "x"}',
        'short.json': '{"format": "chainer_hybridmem/profile", "version": 1}',
        'few.json': json.dumps(short),
        'no_imports.py': 'import there_is_no_such_module',
        'no_syntax.py': 'def (',
        'p.py': 'raise AssertionError("it must not run")',
        'ok.csv': 'id,lower,upper,size\n0,0,1,4\n',
    }.items():
        (folder / name).write_text(text)
    (folder / 'text.json').write_bytes(b'\xa6\xff')
    (folder / 'p.json.gz').write_bytes(gzip.compress(b'{}'))
    (folder / 'dir').mkdir()


@pytest.mark.parametrize(
    ('arguments', 'status', 'message'),
    [
        (('plan', '', *LIMIT), 1, "'' cannot be read"),
        (('plan', 'dir', *LIMIT), 1, 'Is a directory. Name a file in it.'),
        (('plan', 'q.json', *LIMIT), 1, 'Did you mean p.json?'),
        (('plan', 'none/q.json', *LIMIT), 1, 'Name a file that is there.'),
        (('plan', 'empty.json', *LIMIT), 1, 'as `hybridmem profile -o` writes it.'),
        (('plan', 'list.json', *LIMIT), 1, 'The file is list, not an object; '),
        (('plan', 'none.json', *LIMIT), 1, 'The file has no format; '),
        (('plan', 'other.json', *LIMIT), 1, "The file has format 'x'; "),
        (('plan', 'plan.json', *LIMIT), 1, "format 'chainer_hybridmem/plan'; "),
        (('plan', 'short.json', *LIMIT), 1, "it lacks 'operations'. Record or plan"),
        (('plan', 'text.json', *LIMIT), 1, 'it is no text, byte 0 is 0xa6. Name '),
        (('plan', 'p.json.gz', *LIMIT), 1, 'it is compressed. Unpack it with gunzip.'),
        (('plan', 'p.json', '--memory-limit', '-1GB'), 2, "'-1GB'; it must be a size"),
        (('plan', 'p.json', '--memory-limit', '50%%'), 2, 'above zero, such as 50%'),
        (('plan', 'p.json', '--memory-limit', '-50%'), 2, "'-50%' is not a percent"),
        ((*PLAN, '--host-limit', '-3GB'), 2, "'-3GB'; it must be a size of zero or"),
        ((*PLAN, '--planner', ''), 1, "There is no planner ''."),
        ((*PLAN, '--planner', 'manual'), 1, 'does nothing without options; give it'),
        ((*PLAN, '--manual', 'empty.json'), 1, 'an object with an action for each'),
        ((*PLAN, '--manual', ''), 1, "'' cannot be read"),
        ((*PLAN, '-o', 'dir'), 1, 'has this name. Name another file.'),
        ((*PLAN, '-o', 'none/x'), 1, 'no folder none. Name another file.'),
        (('compare', 'p.json', '--memory-limit', '-3GB'), 2, "size is '-3GB'; it must"),
        (('layout', 'p.json', '--plan', 'q.json'), 1, 'error: q.json cannot be read'),
        (('layout', 'p.json', '--plan', 'few.json'), 1, 'decides about 1 feature'),
        (('layout', 'ok.csv', '--plan', 'plan.json'), 1, '--plan needs one'),
        (('report',), 2, 'are required: PROFILE, -o/--output'),
        (('report', 'p.json', 'q.json', '-o', 'r'), 1, 'q.json cannot be read'),
        (('estimate', *IN_4, '--planner', '', *GPU), 1, "There is no planner ''."),
        (('estimate', *IN_4, '--gpu', ''), 1, "no device model ''. Models: "),
        (('estimate', *IN_4, '--gpu', 'q.json'), 1, 'q.json cannot be read'),
        (('estimate', *IN_4, '--sample-batches', '4', '2'), 1, '--sample-batches is'),
        (
            ('estimate', '--arch', 'no_imports:Net', '--batchsize', '4', *GPU),
            1,
            'no_imports:Net cannot be imported: ModuleNotFoundError: ',
        ),
        (
            ('estimate', '--arch', 'no_syntax:Net', '--batchsize', '4', *GPU),
            1,
            'no_syntax:Net cannot be imported: SyntaxError',
        ),
        (
            ('estimate', '--arch', 'own_networks.py:Tiny', '--batchsize', '4', *GPU),
            1,
            'leave out .py: own_networks:Tiny.',
        ),
        (('batch', *NET, '--planner', '', *GPU), 1, "There is no planner ''."),
        (('batch', *NET, '--memory-limit', '12'), 2, 'would be 12 bytes; name a unit'),
        (
            ('batch', *NET, *GPU, '--profile', 'x.json', '-o', 'x.json'),
            1,
            'another output has this name',
        ),
        (('verify', *IN_4, '--memory-limit', '-1GB'), 2, "size is '-1GB'; it must"),
        (('verify', *IN_4, '--memory-limit', '50'), 2, 'name a unit: 50GB'),
        (
            ('verify', *IN_4, '--memory-limit', '1GB', '--planner', ''),
            1,
            "There is no planner ''.",
        ),
        (
            ('inference', '--arch', 'no_imports:Net', '--batchsize', '4'),
            1,
            'cannot be imported',
        ),
        ((*RUN, '--swap-dir', 'none', 'p.py'), 1, "--swap-dir 'none' cannot"),
        ((*RUN, '--cache-dir', 'none/x', 'p.py'), 1, 'which cannot be made: '),
        ((*RUN, '--host-limit', '1kB', 'p.py'), 1, '--host-limit is 1000 and there is'),
        ((*RUN, '--disk-bandwidth', '1MB/s', 'p.py'), 1, 'there is no --swap-dir; '),
        ((*RUN, '--shared-link', 'bus', 'p.py'), 1, 'there is no --link-bandwidth to'),
        ((*RUN, '-m', 'no_such.p'), 1, "There is no module 'no_such.p': "),
        ((*RUN, '-m', '.p'), 1, "There is no module '.p': "),
        (RUN, 2, 'the following arguments are required: PROGRAM'),
        (('estimate', '--batch-arg', '--size'), 2, 'has = before it: --batch-arg='),
        (
            ('verify', *LIMIT, '--shared-link', 'bus', '--', 'p.py'),
            1,
            'there is no --link-bandwidth to',
        ),
        (('doctor', '--json', 'dir'), 1, 'Name another file.'),
        (('doctor', 'x'), 2, 'unrecognized arguments: x'),
        (('rum', 'p.py'), 2, "no command 'rum'. Did you mean run?"),
        (('p.py', 'x'), 2, 'p.py is no command. Did you mean: hybridmem run p.py'),
        (('nothing',), 2, "no command 'nothing'. There are run, estimate, "),
        ((), 2, 'required: COMMAND; hybridmem --help says more'),
        (('run', '--memorylimit', '8GiB', 'p.py'), 2, 'Did you mean --memory-limit?'),
        (('plan', '--memory_limit=8GiB'), 2, 'Did you mean --memory-limit?'),
        (('plan', 'p.json', '--zzz'), 2, '--zzz; hybridmem plan --help names them'),
        (('verify', *LIMIT, 'p.py', '--epoch', '3'), 2, '... -- PROGRAM --epoch'),
        (('run', '--memory-limit', 'Auto', 'p.py'), 2, 'Did you mean auto?'),
        (('run', '--memory-limit', 'fre', 'p.py'), 2, 'Did you mean free?'),
        (('run', '--memory-limit', '8,5GiB', 'p.py'), 2, "Did you mean '8.5GiB'?"),
        (('run', '--memory-limit', '8000', 'p.py'), 2, "Did you mean '8000MiB'?"),
    ],
)
def test_is_told_in_one_sentence(arguments, status, message, files, hybridmem):
    found, out, err = hybridmem(*arguments)
    assert (found, out) == (status, '')
    assert 'error: ' in err and message in err
    assert err.count('\n') == 1  # nothing was recorded before


def test_a_device_that_is_not_there_is_told_before_anything_is_recorded(
    files, hybridmem, monkeypatch
):
    from chainer_hybridmem.training.chainer_access import compat

    monkeypatch.setattr(compat, 'cuda_available', lambda: False)
    for command in ('estimate', 'inference'):
        status, _, err = hybridmem(command, *IN_4, '--record-on', 'cuda')
        assert status == 1 and err.count('\n') == 1
        assert 'use the CPU' in err
