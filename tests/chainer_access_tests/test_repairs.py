"""The table of repairs, names that are put back, and wrappers of one import."""

from __future__ import annotations

import ast
import os
import pathlib
import textwrap
import warnings

import pytest
from chainer_access_tests.test_compat import run_fork, run_python

from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.training.chainer_access.compat import (
    old_names,
    patches,
    repair,
    table,
)

chainer = compat.import_chainer()

TESTS = pathlib.Path(__file__).resolve().parents[1]
FOLDER = pathlib.Path(compat.__file__).parent


def functions_of(path: pathlib.Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_repair_is_in_the_table():
    made = {f'patches.{name}' for name in vars(patches) if name.startswith('_patch_')}
    stand_ins = functions_of(FOLDER / 'stand_ins.py')
    made |= {f'stand_ins.{n}' for n in stand_ins if n.startswith('stand_in_')}
    assert made <= {one.by for one in table.REPAIRS}


@pytest.mark.parametrize('one', table.REPAIRS, ids=lambda one: one.by)
def test_every_repair_exists_and_has_a_test(one):
    file, _, name = one.by.partition('.')
    assert name in functions_of(FOLDER / f'{file}.py')
    path, _, test = one.test.partition('::')
    assert test.rpartition('::')[2] in functions_of(TESTS / path)


OLD = """
import collections, collections.abc, inspect, numpy
from chainer_hybridmem.training.chainer_access.compat import old_names
before = {id(group): set(group.instead) & set(vars(
    __import__(group.module))) for group in old_names.TABLE}
there = {name: getattr(numpy, name) for name in before[id(old_names.TABLE[-3])]}
old_names.put_back()
for group in old_names.TABLE:
    for name in group.instead:
        assert hasattr(__import__(group.module), name), (group.module, name)
assert all(getattr(numpy, name) is there[name] for name in there)
assert numpy.asscalar(numpy.ones(1)) == 1.0 and numpy.int is int
assert numpy.product([2, 3]) == 6 and numpy.in1d([1], [1]).all()
assert numpy.cast['int32'](1.5).dtype == 'int32' and numpy.NINF == -numpy.inf
assert numpy.asfarray([1]).dtype == float and (numpy.msort([2, 1]) == [1, 2]).all()
assert numpy.find_common_type(['f4'], ['f8']) == 'f8'
assert collections.Iterable is collections.abc.Iterable
assert inspect.getargspec(lambda a, b=1, *c, **d: 0) == (['a', 'b'], 'c', 'd', (1,))
"""


def test_old_names_are_put_back_where_they_are_asked_for():
    run_python(OLD)


WRAPPERS = """
import contextlib, importlib.machinery, sys
import chainer_hybridmem
from chainer_hybridmem.training.chainer_access.compat import import_wrapper

class Another:  # as others write them: it knows nothing of the first
    def find_spec(self, name, path, target=None):
        if name != 'wrapped':
            return None
        for finder in [f for f in sys.meta_path if f is not self]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                execute = spec.loader.exec_module
                def exec_module(module):
                    execute(module)
                    print('another')
                spec.loader.exec_module = exec_module
                return spec

@contextlib.contextmanager
def around():
    print('before')
    yield
    print('after')

kind = import_wrapper.ImportWrapper
kind.install('wrapped', around)
sys.meta_path.insert({place}, Another())
import wrapped
print(sum(isinstance(f, kind) for f in sys.meta_path))
"""


@pytest.mark.parametrize('place', [0, 1])
def test_two_wrappers_of_one_import(place, tmp_path):
    (tmp_path / 'wrapped.py').write_text('print("module")')
    path = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
    printed = run_python(WRAPPERS.format(place=place), PYTHONPATH=path).split()
    assert printed.count('module') == printed.count('1') == 1
    assert printed.index('before') < printed.index('module') < printed.index('after')
    assert 'another' in printed


def test_what_waits_for_an_import_is_called_behind_it(tmp_path):
    (tmp_path / 'awaited.py').write_text('value = 1')
    path = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
    code = """
    from chainer_hybridmem.training.chainer_access import compat
    import sys
    tell = lambda: print(sys.modules['awaited'].value)
    compat.after_import(tell, 'awaited')
    print('not yet')
    import awaited
    compat.after_import(tell, 'awaited')
    """
    assert run_python(code, PYTHONPATH=path).split() == ['not', 'yet', '1', '1']


ONNX = {
    '__init__.py': """
        from unittest import mock
        __version__ = '1.19'
        TensorProto = mock.MagicMock()
    """,
    'helper.py': """
        import numpy
        NUMBERS = {'float32': 1, 'int64': 7}
        def np_dtype_to_tensor_dtype(kind):
            return NUMBERS.get(kind.name, 100 + kind.num)
        def tensor_dtype_to_field(number):
            return {1: 'float_data', 7: 'int64_data'}.get(number, 'other')
    """,
    'checker.py': '',
    'numpy_helper.py': '',
}


def test_the_exporter_finds_its_tables(tmp_path):
    """With an onnx that has no ``mapping``; the real one is not needed here."""
    (tmp_path / 'onnx').mkdir()
    for name, text in ONNX.items():
        (tmp_path / 'onnx' / name).write_text(textwrap.dedent(text))
    path = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
    code = """
    import sys, numpy
    import chainer_hybridmem, onnx_chainer
    from onnx_chainer import context
    numbers = sys.modules['onnx_chainer.export'].NP_TYPE_TO_TENSOR_TYPE
    assert numbers[numpy.dtype('float32')] == 1
    assert context.onnx.mapping.STORAGE_TENSOR_TYPE_TO_FIELD[7] == 'int64_data'
    import onnx
    print('onnx.mapping' in sys.modules, hasattr(onnx, 'mapping'))
    """
    assert run_fork(code, PYTHONPATH=path) == 'False False'


def test_pooling_dies_with_its_graph():
    module = patches._chainer_module('functions.pooling.pooling_nd')

    class Function:
        pass

    function = Function()
    helper = module._CudnnPoolingNDImpl.__new__(module._CudnnPoolingNDImpl)
    helper.func = function
    assert helper.func is function
    del function
    assert helper.func is None


@pytest.mark.parametrize('found', [False, True])
def test_chainer_that_came_first_says_what_it_lacks(monkeypatch, found):
    monkeypatch.setattr(chainer.backends.cuda, 'available', True)
    monkeypatch.setattr(chainer.backends.cuda, 'cudnn_enabled', found)
    monkeypatch.setattr(repair, 'cupy_can_use_cudnn', lambda: True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        repair._tell_what_comes_too_late()
    assert [str(one.message)[-31:] for one in caught] == [
        'import chainer_hybridmem first.'
    ] * (not found)


def test_names_are_in_the_page():
    page = (TESTS.parent / 'docs' / 'reference' / 'repairs.md').read_text()
    for group in old_names.TABLE:
        assert all(f'`{group.module}.{name}`' in page for name in group.instead)
