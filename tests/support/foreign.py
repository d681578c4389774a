"""Files as other programs write them, made small."""

import json
import pickle
import sys
import types
from unittest import mock

import numpy as np

_CLASSES = {
    'monet.graph': ('ComputeNode',),
    'monet.solver_info': ('SolverInfo', 'FwdNode', 'BwdNode'),
    'checkmate.checkmate_solver': ('CheckmateSolution',),
}


def _make_modules():
    """The modules whose classes a solution names, as far as pickle needs them."""
    made = {name: types.ModuleType(name) for name in ('monet', 'checkmate')}
    for module, names in _CLASSES.items():
        made[module] = types.ModuleType(module)
        for name in names:
            setattr(made[module], name, type(name, (), {'__module__': module}))
    return made


def _thing(cls, **state):
    thing = cls.__new__(cls)
    thing.__dict__.update(state)
    return thing


def solution(
    kib,
    units,
    edges,
    first_backward,
    runs=None,
    kept=None,
    fixed_kib=0,
    select_conv_algo=False,
):
    """A solution file of Checkmate's solver.

    Args:
        kib: Size of what each operation makes.
        units: Time of each, in 10 us.
        edges: Pairs of an operation and one that reads it.
        first_backward: The first operation that has a forward one.
        runs: R of its schedule; None for no schedule.
        kept: S of it.
        fixed_kib: What is there all the time.
        select_conv_algo: Whether MONeT was to choose kernels.
    """
    modules = _make_modules()
    info = modules['monet.solver_info']
    sources = [[u for u, v in edges if v == i] for i in range(len(kib))]
    nodes = {}
    for i, (size, time) in enumerate(zip(kib, units, strict=True)):
        backward = i >= first_backward
        nodes[i] = _thing(
            info.BwdNode if backward else info.FwdNode,
            mem=np.int64(size * 1024),
            fixed_mem=np.int64(fixed_kib * 1024),
            args=[sources[i]],
            local_tensors=set(sources[i]),
            local_memory=np.int64(sum(1024 * kib[u] for u in sources[i])),
            **{
                f'{run}workspace_{what}': [np.float64(figure)]
                for run in ('', 'recompute_', 'inplace_')
                for what, figure in (('mem', 0.5), ('compute', time / 100))
            },
            op='aten::relu_',
            **({'fwd_id': 2 * first_backward - 1 - i} if backward else {}),
        )
    edge_list = [(u, v, 0) for u, v in edges]
    graph = _thing(
        info.SolverInfo,
        nodes=nodes,
        edge_list=edge_list,
        loss=first_backward - 1,
        inplace_list={1: 0},
        select_conv_algo=select_conv_algo,
        data_path='net_1_mode',
    )
    schedule = modules['checkmate.checkmate_solver'].CheckmateSolution
    found = _thing(schedule)
    if runs is not None:
        found.__dict__.update(
            r=np.array(runs, np.int64),
            s=np.array(kept, np.int64),
            f=[],
            fwd_init=np.int64(1),
            runtime_expected=np.int64(np.dot(np.sum(runs, axis=0), units)),
        )
    with mock.patch.dict(sys.modules, modules):
        data = pickle.dumps([graph, found], protocol=3)
    # Old and new versions of NumPy call the same functions by other names.
    return data.replace(b'numpy._core', b'numpy.core')


def log(*instructions):
    """A log of simrd."""
    return '\n'.join(json.dumps(i) for i in instructions).encode()


def tensor(number, nbytes, device='cuda:0'):
    """A tensor of a storage, as execution traces have it."""
    return [100 + number, number, 0, nbytes // 4, 4, device]


def trace(*calls, version='1.1.0-chakra.0.0.4'):
    """An execution trace of PyTorch.

    Args:
        calls: Number, parent, name, schema, tensors read, tensors given.
        version: Of the format.
    """
    nodes = []
    for number, parent, name, schema, reads, gives in calls:
        kinds = [['Tensor(float)'] * len(t) for t in (reads, gives)]
        if version.startswith('1.0.1'):
            more = {'parent': parent, 'rf_id': number, 'op_schema': schema}
            more |= {'inputs': reads, 'input_types': kinds[0]}
            more |= {'outputs': gives, 'output_types': kinds[1]}
        else:
            attributes = {'rf_id': number, 'op_schema': schema}
            more = {'ctrl_deps': parent}
            more['attrs'] = [{'name': k, 'value': v} for k, v in attributes.items()]
            more |= {'inputs': {'values': reads, 'types': kinds[0]}}
            more |= {'outputs': {'values': gives, 'types': kinds[1]}}
        nodes.append({'id': number, 'name': name, **more})
    return json.dumps({'schema': version, 'nodes': nodes}).encode()


def small_log():
    """A log of two operations, forward and backward."""
    made = [{'INSTRUCTION': 'CONSTANT', 'NAME': 'x'}]
    made += [{'INSTRUCTION': 'MEMORY', 'NAME': 'x', 'MEMORY': '64'}]
    for name, argument, result in (('f', 'x', 'y'), ('f_backward', 'y', 'g')):
        call = {'INSTRUCTION': 'CALL', 'NAME': name, 'TIME': '1000'}
        made += [
            {**call, 'ARGS': [argument], 'RESULT': [result]},
            {'INSTRUCTION': 'MEMORY', 'NAME': result, 'MEMORY': '64'},
            {'INSTRUCTION': 'ALIAS', 'NAME': result, 'ALIAS': '-1'},
        ]
    return log(*made)
