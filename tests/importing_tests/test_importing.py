"""Files of other programs become profiles that plan and compare take."""

import gzip
import json
import pickle

import pytest
from support.foreign import log, solution, tensor, trace

from chainer_hybridmem import commands
from chainer_hybridmem.errors import FormatError, OptionError, UnknownNameError
from chainer_hybridmem.lab.importing import KINDS, checkmate, import_profile
from chainer_hybridmem.planning.layouts import in_core_trace
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.profile import Category, Link
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.reporting import memory_viz

LINK = Link(1e-5, 12e9, 12e9)
# Forward 0 > 1 > 2 (the loss); backward 3, 4, 5 of 2, 1, 0.
EDGES = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (4, 5)]
CHAIN = solution([64, 32, 8, 8, 32, 0], [10, 20, 0, 5, 40, 30], EDGES, 3, fixed_kib=100)


def constant(name, nbytes):
    return (
        {'INSTRUCTION': 'CONSTANT', 'NAME': name},
        {'INSTRUCTION': 'MEMORY', 'NAME': name, 'MEMORY': str(nbytes)},
    )


def call(function, arguments, result, nbytes, time=1000, alias=-1):
    return (
        {
            'INSTRUCTION': 'CALL',
            'NAME': function,
            'ARGS': arguments,
            'RESULT': [result],
            'TIME': str(time),
        },
        {'INSTRUCTION': 'MEMORY', 'NAME': result, 'MEMORY': str(nbytes)},
        {'INSTRUCTION': 'ALIAS', 'NAME': result, 'ALIAS': str(alias)},
    )


LOG = log(
    *constant('ignored', 5),
    {'INSTRUCTION': 'ANNOTATE', 'ANNOTATION': 'START'},
    *constant('w', 4096),
    *call('conv', ['w'], 'a', 8192),
    {
        'INSTRUCTION': 'MUTATE',
        'NAME': 'relu_',
        'ARGS': ['a'],
        'MUTATE': [0],
        'TIME': '7',
    },
    *call('view', ['a'], 'v', 8192, 1, alias=0),
    *call('mm', ['v', 'w'], 'b', 4096),
    {'INSTRUCTION': 'RELEASE', 'NAME': 'a'},
    {'INSTRUCTION': 'RELEASE', 'NAME': 'v'},
    {'INSTRUCTION': 'ANNOTATE', 'ANNOTATION': 'BACKWARD'},
    *call('mm_backward', ['b', 'v2'], 'g', 4096),
    {'INSTRUCTION': 'RELEASE', 'NAME': 'b'},
)

X, W, A, B, T, G = (tensor(n, 4096 * n) for n in range(1, 7))
ENGINE = 'autograd::engine::evaluate_function: MulBackward0'
CALLS = (
    (1, 1, 'root', '', [], []),
    (2, 1, 'aten::mul', 'mul(Tensor)', [X, W], [A]),
    (3, 2, 'aten::empty', 'empty()', [], [T]),  # lives while mul runs
    (4, 2, 'aten::mul.inner', 'mul(Tensor)', [X, W, T], [A]),
    (5, 1, 'aten::relu_', 'relu_(Tensor(a!) self) -> Tensor(a!)', [A], [A]),
    (6, 1, 'aten::view', 'view(Tensor(a)) -> Tensor(a)', [A], [A]),
    (7, 1, 'aten::tanh', 'tanh(Tensor)', [A], [B]),
    (8, 1, ENGINE, '', [], []),
    (9, 8, 'aten::tanh_backward', 'tanh_backward(Tensor)', [B], [G]),
    (10, 8, 'aten::mul', 'mul(Tensor)', [G, A], [B]),  # B's number for a new storage
    (11, 1, 'Optimizer.step#SGD.step', '', [], []),
    (12, 11, 'aten::add_', 'add_(Tensor(a!)) -> Tensor(a!)', [W, B], [W]),
)
TRACE = trace(*CALLS)
SNAPSHOT = {
    'segments': [
        {
            'address': 0,
            'device': 0,
            'blocks': [
                {'size': 512, 'state': 'active_allocated', 'requested_size': 500},
                {'size': 512, 'state': 'inactive'},
                {'size': 512, 'state': 'active_allocated'},
            ],
        }
    ],
    'device_traces': [
        [
            {'action': 'segment_alloc', 'addr': 0, 'size': 2048},
            {'action': 'free_completed', 'addr': 512, 'size': 400},
            {'action': 'alloc', 'addr': 512, 'size': 300},
            {'action': 'free_requested', 'addr': 512, 'size': 300},
            {'action': 'free_completed', 'addr': 512, 'size': 300},
            {'action': 'alloc', 'addr': 1024, 'size': 512},
        ],
        [],
    ],
}
GRAPH = """5 6
4 16 _
7 4096 0
8 1024 /l/W
9 8192 _
3 4096 _
forward
2 1
7 _
8 _
9
Linear
{"rank": 0}
forward
1 1
9 _
3
Tanh
{"rank": 1}
forward
2 1
3 _
9 _
4
Add
{"rank": 2}
backward
4 2
4 gradient
9 input
3 output
9 output
9
3
Add
{"rank": 2}
backward
2 1
3 gradient
9 output
9
Tanh
{"rank": 1}
backward
3 2
9 gradient
7 input
8 input
7
8
Linear
{"rank": 0}
"""
# Forward 0 > 1 > 2 (the loss, which the file has in backward); backward 3 and 4.
NETWORK = {
    'nodes': [
        {'id': 0, 'name': 'a', 'backward': False, 'cost_cpu': 10, 'cost_ram': 65536},
        {'id': 1, 'name': 'b', 'backward': False, 'cost_cpu': 20, 'cost_ram': 32768},
        {'id': 2, 'name': 'Loss', 'backward': True, 'cost_cpu': 5, 'cost_ram': 128},
        {'id': 3, 'name': 'b_backward', 'backward': True, 'cost_cpu': 40}
        | {'cost_ram': 32768},
        {'id': 4, 'name': 'a_backward', 'backward': True, 'cost_cpu': 30}
        | {'cost_ram': 65536},
    ],
    'links': [
        {'source': source, 'target': target}
        for source, target in [(0, 1), (1, 2), (2, 3), (0, 3), (1, 3), (3, 4), (0, 4)]
    ],
}


def network(**nodes):
    """The network's file, of whose nodes something is another value."""
    changed = [node | nodes.get(node['name'], {}) for node in NETWORK['nodes']]
    return json.dumps(NETWORK | {'nodes': changed}).encode()


FILES = {
    'checkmate': CHAIN,
    'moccasin': network(),
    'monet': CHAIN,
    'simrd': LOG.replace(b'"v2"', b'"b"'),
    'execution-trace': TRACE,
    'kusumoto': GRAPH.encode(),
    'snapshot': pickle.dumps(SNAPSHOT),
}


def written(folder, name, data):
    path = folder / name
    path.write_bytes(data)
    return str(path)


def test_a_solution_is_accounted_as_checkmate_does(tmp_path):
    path = written(tmp_path, 's.pkl', CHAIN)
    profile = import_profile('checkmate', path, LINK)
    assert [op.phase.value for op in profile.operations] == (
        ['forward'] * 3 + ['backward'] * 3 + ['update']
    )
    assert profile.initial_bytes == 100 * 1024
    assert profile.compute_seconds == pytest.approx(105e-5)
    assert [s.nbytes // 1024 for s in profile.storages] == [64, 32, 8, 8, 32, 0]
    maps = [s.id for s in profile.storages if s.plannable]
    assert maps == [0, 2]  # backward reads them
    assert profile.storages[1].category is Category.WORKSPACE
    assert profile.storages[4].category is Category.GRADIENT


def test_a_file_of_costs_has_other_times(tmp_path):
    tables = [{}, {i: [i / 100] for i in range(6)}, {}, {}, {}, {}]
    costs = written(tmp_path, 'c.pkl', pickle.dumps(tables))
    path = written(tmp_path, 's.pkl', CHAIN)
    profile = import_profile('checkmate', path, LINK, costs)
    assert [round(op.device_seconds * 1e5) for op in profile.operations[:6]] == [
        *range(6)
    ]
    short = written(tmp_path, 'd.pkl', pickle.dumps([{}, {0: [1.0]}]))
    with pytest.raises(FormatError, match='about 1 operations, the solution about 6'):
        import_profile('checkmate', path, LINK, short)
    with pytest.raises(OptionError, match="'simrd' has no file of times"):
        import_profile('simrd', path, LINK, costs)


def test_a_log_is_accounted_as_simrd_does(tmp_path):
    data = LOG.replace(b'"v2"', b'"b"')
    path = tmp_path / 'l.log.gz'
    path.write_bytes(gzip.compress(data))
    profile = import_profile('simrd', str(path), LINK)
    labels = [op.function for op in profile.operations]
    assert labels == ['conv', 'relu_', 'view', 'mm', 'mm_backward', 'update']
    sizes = {s.label.rsplit('/', 1)[-1]: s.nbytes for s in profile.storages if s.nbytes}
    assert sizes == {
        '': 4096,
        'conv': 8192,
        'relu_': 8192,
        'mm': 4096,
        'mm_backward': 4096,
    }
    assert profile.initial_bytes == 4096
    mm = profile.operations[3]
    assert profile.storages[mm.reads[0]].label == '/1/relu_'  # through the view
    assert (
        profile.storages[profile.operations[4].writes[0]].freed_at < 0
    )  # held to the end


@pytest.mark.parametrize('version', ['1.0.1', '1.1.0-chakra.0.0.4'])
def test_a_trace_is_accounted_by_storages(version, tmp_path):
    path = written(tmp_path, 't.json', trace(*CALLS, version=version))
    profile = import_profile('execution-trace', path, LINK)
    assert [(op.label, op.phase.value) for op in profile.operations] == [
        ('/0/mul+relu_', 'forward'),  # relu_ writes right behind mul
        ('/1/view', 'forward'),
        ('/2/tanh', 'forward'),
        ('/3/tanh_backward', 'backward'),
        ('/4/mul', 'backward'),
        ('update', 'update'),
    ]
    assert profile.initial_bytes == X[3] * 4 + W[3] * 4
    plannable = {s.nbytes: s.backward_uses for s in profile.storages if s.plannable}
    assert plannable == {3 * 4096: (4,), 4 * 4096: (3,)}
    assert sorted(s.nbytes for s in profile.storages if s.producer == 4) == [4 * 4096]
    temporary = profile.storages[profile.operations[0].writes[0]]
    assert temporary.nbytes == 5 * 4096 and not temporary.backward_uses
    assert [r.operation for r in profile.recipes] == [0, 2]


def test_what_is_written_over_later_is_not_made_again(tmp_path):
    calls = [(1, 1, 'root', '', [], []), *_renumbered()]
    path = written(tmp_path, 't.json', trace(*calls))
    profile = import_profile('execution-trace', path, LINK)
    assert [op.function for op in profile.operations[:3]] == ['mul', 'tanh', 'relu_']
    assert [r.operation for r in profile.recipes] == [1]


def _renumbered():
    """The calls with ``relu_`` behind ``tanh``."""
    by = {c[2].rpartition('::')[2]: c for c in CALLS if c[0] < 8}
    yield (2, *by['mul'][1:])
    yield (3, *by['tanh'][1:])
    yield (4, *by['relu_'][1:])
    yield from CALLS[7:]


def test_kernels_have_their_times(tmp_path):
    events = [
        {'cat': 'cpu_op', 'args': {'External id': 70, 'Record function id': 4}},
        {'cat': 'cpu_op', 'args': {'External id': 71, 'Record function id': 5}},
        {'cat': 'kernel', 'dur': 30, 'args': {'External id': 70}},
        {'cat': 'kernel', 'dur': 10, 'args': {'External id': 70}},
        {'cat': 'kernel', 'dur': 2, 'args': {'External id': 71}},
    ]
    path = written(tmp_path, 't.json', TRACE)
    kineto = tmp_path / 'k.json'
    kineto.write_text(json.dumps({'traceEvents': events}))
    profile = import_profile('execution-trace', path, LINK, str(kineto))
    assert profile.operations[0].device_seconds == pytest.approx(42e-6)
    kineto.write_text(json.dumps({'traceEvents': events[2:]}))
    seconds = import_profile('execution-trace', path, LINK, str(kineto))
    assert seconds.operations[0].device_seconds == 0


def kineto_without_numbers(*names):
    """Calls one after the other, each with a kernel that takes as long as its place."""
    events = []
    for place, name in enumerate(names):
        start = 100 * place
        events += [
            {'cat': 'cpu_op', 'name': name, 'ts': start, 'dur': 90},
            {'cat': 'cuda_runtime', 'name': 'launch', 'ts': start + 80, 'dur': 5},
            {'cat': 'kernel', 'name': 'k', 'ts': start + 500, 'dur': place + 1},
        ]
        for event in events[-3:]:
            event |= {'tid': 7, 'args': {'External id': 5, 'correlation': place}}
    return json.dumps({'traceEvents': events})


def test_calls_are_found_by_their_order_in_the_last_iteration(tmp_path):
    names = [c[2] for c in CALLS if not c[2].startswith('root')]
    path = written(tmp_path, 't.json', TRACE)
    kineto = tmp_path / 'k.json'
    kineto.write_text(kineto_without_numbers(*names, 'x', *names, *names[:3]))
    profile = import_profile('execution-trace', path, LINK, str(kineto))
    shift = len(names) + 2  # of the last whole iteration
    first = sum(shift + names.index(name) for name in names[:4])
    assert profile.operations[0].device_seconds == pytest.approx(1e-6 * first)
    kineto.write_text(kineto_without_numbers(*names[:2], 'x', *names[2:]))
    with pytest.raises(FormatError, match='is of another program'):
        import_profile('execution-trace', path, LINK, str(kineto))


def test_a_graph_adds_gradients_in_place(tmp_path):
    path = written(tmp_path, 'g.txt', GRAPH.encode())
    profile = import_profile('kusumoto', path, LINK)
    labels = [op.function for op in profile.operations]
    assert labels == ['Linear', 'Tanh', 'Add', 'Add', 'Tanh', 'Linear', 'update']
    made = [
        sorted(profile.storages[s].nbytes for s in op.writes)
        for op in profile.operations
    ]
    # Backward of Add makes both gradients, that of Tanh adds to one of them; nothing
    # makes the gradient of the input, and that of W stays.
    assert made == [[8192], [4096], [16], [4096, 8192], [], [1024], []]
    assert profile.initial_bytes >= 4096 + 1024
    last = profile.operations[5].writes[0]
    assert profile.storages[last].freed_at < 0


def test_a_network_of_moccasin_is_accounted_as_checkmate_does(tmp_path):
    profile = import_profile('moccasin', written(tmp_path, 'n.json', network()), LINK)
    assert [op.forward for op in profile.operations] == [-1, -1, -1, 1, 0, -1]
    assert profile.first_backward == 3 and profile.initial_bytes == 0
    assert [s.nbytes for s in profile.storages[:3]] == [65536, 32768, 1024]
    seconds = [op.device_seconds for op in profile.operations[:3]]
    assert seconds == pytest.approx([1e-4, 2e-4, 5e-5])


def test_a_snapshot_has_mallocs_and_frees(tmp_path):
    path = written(tmp_path, 's.pickle', FILES['snapshot'])
    profile = import_profile('snapshot', path, LINK)
    sizes = [s.nbytes for s in profile.storages]
    assert sizes == [400, 300, 512, 500]
    assert profile.events == (-1, 2, -2, 3)
    assert profile.initial_bytes == 900
    assert in_core_trace(profile).peak_load_bytes == 1012


def test_a_snapshot_of_our_own_comes_back(tmp_path):
    profile = import_profile('checkmate', written(tmp_path, 's.pkl', CHAIN), LINK)
    plan = make_plan(profile, '100%')
    data = memory_viz.dumps(memory_viz.planned_snapshot(profile, plan))
    again = import_profile('snapshot', written(tmp_path, 's.pickle', data), LINK)
    assert in_core_trace(again).peak_load_bytes == plan.predicted_peak_bytes


@pytest.mark.parametrize(
    'kind',
    ['checkmate', 'moccasin', 'monet', 'simrd', 'execution-trace', 'kusumoto'],
)
def test_what_comes_out_can_be_planned(kind, tmp_path):
    profile = import_profile(kind, written(tmp_path, 'f', FILES[kind]), LINK)
    problem = make_problem(profile)
    for limit in (problem.in_core_peak_bytes, least_memory(problem)[0]):
        plan = make_plan(problem, limit)
        check_plan(profile, plan)


WRONG = {
    'checkmate': [b'', b'text', pickle.dumps([]), pickle.dumps({'a': 1}), CHAIN[:-40]],
    'moccasin': [
        b'',
        b'[]',
        b'{"nodes": [], "links": []}',
        b'{"nodes": [3], "links": []}',
        network(a={'id': 1}),
        network(a={'name': 'b'}),
        network(a={'cost_ram': -5000}),
        network(a={'cost_ram': 2**70}),
        network(b={'cost_cpu': -1}),
        network(b={'cost_cpu': float('inf')}),
        network(b_backward={'name': 'c_backward'}),
        json.dumps(NETWORK | {'links': [{'source': 0, 'target': -1}]}).encode(),
        json.dumps(NETWORK | {'links': [{'source': 3, 'target': 1}]}).encode(),
    ],
    'monet': [
        b'',
        pickle.dumps([]),
        CHAIN[:-40],
        solution([1, 1], [1, 1], [(1, 0)], 1),
        solution([-1, 1], [1, 1], [(0, 1)], 1),
        solution([1, 1], [1, 1], [(0, 1)], 3),
        solution([1, 1], [1, 1], [(0, 1)], 1, fixed_kib=-1),
        solution([1, 1], [1, 1], [(0, 1)], 1, select_conv_algo=True),
    ],
    'simrd': [
        b'',
        b'{',
        b'[]',
        b'[' * 100_000,
        log({'INSTRUCTION': 'JUMP'}),
        log({'INSTRUCTION': 'CALL'}),
        log(*call('f', ['x'], 'y', 4)),
        log(*constant('x', -5), *call('f', ['x'], 'y', 4)),
        log(*constant('x', 2**70), *call('f', ['x'], 'y', 4)),
        log(*call('f', [], 'y', 4, time=-1)),
        log(*call('f', [], 'y', 4, alias=3)),
        LOG,
    ],
    'execution-trace': [
        b'',
        b'[]',
        b'{"nodes": 3}',
        b'{"nodes": [3]}',
        b'{"nodes": [{}]}',
        b'{"nodes": []}',
        b'{"nodes": ' + b'[' * 100_000,
        trace(*CALLS[:7]),  # no backward
        trace(*CALLS[7:]),  # no forward
        trace(*CALLS[:5], (5, 4, 'x', 's', [[1, 2]], []), *CALLS[7:]),
        trace(*CALLS[:5], (5, 4, 'x', 's', [tensor(1, 2**70)], []), *CALLS[7:]),
        trace(
            *CALLS[:2],
            *((n, n - 1, 'x', 's', [], []) for n in range(3, 2000)),
            *CALLS[7:],
        ),
    ],
    'kusumoto': [
        b'',
        b'1',
        b'99999999 1',
        b'1 1\n0 4 _\nforward\n1 1\n0 _\n0\nf\n{"rank": 0}\n',
        b'1 1\n0 4 _\nforward\n1 9999999999',
        GRAPH.encode()[:-20],
        GRAPH.replace('8 1024', '8 -1').encode(),
        GRAPH.replace('"rank": 1', '"rank": 3').encode(),
        b'\xff',
    ],
    'snapshot': [
        b'',
        pickle.dumps([]),
        pickle.dumps({'segments': [], 'device_traces': []}),
        pickle.dumps({'segments': [], 'device_traces': [[]]}),
        pickle.dumps({'segments': [], 'device_traces': [[{'action': 'alloc'}]]}),
        pickle.dumps({**SNAPSHOT, 'segments': [3]}),
        pickle.dumps({**SNAPSHOT, 'other': Category.INPUT}),
        CHAIN,
    ],
}


@pytest.mark.parametrize(
    ('kind', 'number'), [(kind, n) for kind in WRONG for n in range(len(WRONG[kind]))]
)
def test_what_is_no_such_file_ends_in_a_line(kind, number, tmp_path, capsys):
    path = written(tmp_path, 'f', WRONG[kind][number])
    out = str(tmp_path / 'p.json')
    assert commands.main(['import', kind, path, '-o', out]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f'hybridmem: error: {path}') and told.count('\n') == 1


def test_every_kind_has_files_that_are_wrong():
    assert set(WRONG) == set(KINDS)


def test_a_wrong_edge_is_refused():
    wrong = solution([1, 1], [1, 1], [(1, 0)], 1)
    with pytest.raises(FormatError, match='which do not precede it'):
        checkmate.read_solution(wrong)


def test_the_command_saves_a_profile(tmp_path, capsys):
    path = written(tmp_path, 's.pkl', CHAIN)
    out = str(tmp_path / 'p.json')
    assert commands.main(['import', 'checkmate', path, '-o', out]) == 0
    assert 'feature maps' in capsys.readouterr().out
    assert library.load_profile(out).initial_bytes == 100 * 1024
    with pytest.raises(UnknownNameError, match="Did you mean 'checkmate'"):
        import_profile('checkmat', path, LINK)


def test_a_mode_in_which_kernels_are_chosen_is_refused(tmp_path):
    chosen = solution([1, 1], [1, 1], [(0, 1)], 1, select_conv_algo=True)
    with pytest.raises(FormatError, match='net_1_mode, in which kernels are chosen'):
        import_profile('monet', written(tmp_path, 's.pkl', chosen), LINK)


def test_what_is_packed_is_bounded_and_checked(tmp_path, monkeypatch):
    from chainer_hybridmem import files

    monkeypatch.setattr(files, 'MAXIMUM_FILE_BYTES', 10_000)
    bomb = written(tmp_path, 'bomb.gz', gzip.compress(bytes(10**6)))
    with pytest.raises(FormatError, match='more than 10000 bytes, unpacked'):
        import_profile('simrd', bomb, LINK)
    cut = written(tmp_path, 'cut.gz', gzip.compress(LOG)[:-20])
    with pytest.raises(FormatError, match='is damaged'):
        import_profile('simrd', cut, LINK)
    with pytest.raises(FormatError, match='cannot be read'):
        import_profile('simrd', str(tmp_path / 'none'), LINK)


@pytest.mark.filterwarnings('ignore:invalid escape')
@pytest.mark.parametrize('kind', FILES)
def test_a_file_with_wrong_bytes_is_refused_or_read(kind, tmp_path):
    data, refused = FILES[kind], 0
    for place in range(0, len(data), max(len(data) // 300, 1)):
        for byte in (0, 0x2E, 0x52, 0x62, 0xFF):
            damaged = data[:place] + bytes([byte]) + data[place + 1 :]
            try:
                KINDS[kind].read(damaged, None, LINK)
            except FormatError:
                refused += 1
    assert refused
