"""The rooms of the package: what touches Chainer's own fields, and names of classes.

Which room may import which is checked by ``make lint``.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest

import chainer_hybridmem

PACKAGE = pathlib.Path(chainer_hybridmem.__file__).parent
ROOM = 'training/chainer_access'
_PRIVATE = re.compile(r'_[a-zA-Z]\w*')
_GIVEN = re.compile(
    r'self\.(_[a-zA-Z]\w*)'
    r'|^\s*(?:def|class) +(_[a-zA-Z]\w*)'
    r'|^\s*(_[a-zA-Z]\w*) *(?::[^=]+)?=[^=]',
    re.MULTILINE,
)
# Names of Python, NumPy, numba and CuPy that Chainer happens to use as well.
_OF_OTHERS = frozenset({'_cache', '_getframe'})
# Names that classes of several files share, and why they do.
SHARED = {
    'Sample': 'The reference names both, of Measured and of MemoryProfiler.',
}


def names_given(source: str) -> set[str]:
    """Names with an underscore that a source gives to its objects."""
    names = {name for found in _GIVEN.findall(source) for name in found}
    return {name for name in names if _PRIVATE.fullmatch(name)}


@pytest.fixture(scope='module')
def chainers() -> set[str]:
    """Names with an underscore of Chainer's modules, classes and objects."""
    folder = pathlib.Path(importlib.import_module('chainer').__file__ or '').parent
    names: set[str] = set()
    for path in folder.rglob('*.py'):
        names |= names_given(path.read_text(encoding='utf-8'))
        names |= {path.stem} if _PRIVATE.fullmatch(path.stem) else set()
    return names - _OF_OTHERS


def touched(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every private name of others that a source reads or writes.

    What it gives to its own objects does not count.
    """
    own = names_given(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module:
            others = node.module.partition('.')[0] != chainer_hybridmem.__name__
            names = [alias.name for alias in node.names] if others else []
            names += node.module.split('.') if others else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]  # as in getattr, or a key of vars
        else:
            continue
        for name in names:
            if _PRIVATE.fullmatch(name) and name not in own:
                yield node.lineno, name


def found_in(source: str, chainers: set[str]) -> list[str]:
    return [f'{line}: {name}' for line, name in touched(source) if name in chainers]


def test_only_one_room_touches_private_fields_of_chainer(chainers: set[str]) -> None:
    found = [
        f'{path.relative_to(PACKAGE)}:{text}'
        for path in sorted(PACKAGE.rglob('*.py'))
        if PACKAGE / ROOM not in path.parents
        for text in found_in(path.read_text(encoding='utf-8'), chainers)
    ]
    assert not found, f'move it into a function of {ROOM}/'


@pytest.mark.parametrize(
    'source',
    [
        'def clear(node): node._data = None',
        "getattr(function, '_input_indexes_to_retain', None)",
        'from chainer import _backprop_utils',
        'import chainer\nchainer._backprop_utils',
        "vars(holder)['_grad']",
        'rule._state.clear()',
    ],
)
def test_such_an_access_is_found(source: str, chainers: set[str]) -> None:
    assert found_in(source, chainers)


def shared_classes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Files by the name of a class that several of them define.

    A class inside another one or inside a function does not count.
    """
    files: dict[str, set[str]] = defaultdict(set)
    for file, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                files[node.name].add(file)
    return {name: sorted(where) for name, where in files.items() if len(where) > 1}


def test_the_name_of_a_class_has_one_meaning() -> None:
    found = shared_classes(
        {
            str(path.relative_to(PACKAGE)): path.read_text(encoding='utf-8')
            for path in PACKAGE.rglob('*.py')
        }
    )
    new = {name: files for name, files in found.items() if name not in SHARED}
    assert not new, 'give the less central class a longer, more exact name'
    assert not SHARED.keys() - found.keys(), 'these have one meaning by now'


@pytest.mark.parametrize('name', ['Slab', '_Slab'])
def test_a_second_class_of_one_name_is_found(name: str) -> None:
    own = f'class {name}: pass'
    inside = f'class Store:\n    class {name}: pass'
    assert shared_classes({'a.py': own, 'b.py': own}) == {name: ['a.py', 'b.py']}
    assert not shared_classes({'a.py': own, 'b.py': inside})
    assert not shared_classes({'a.py': f'{own}\n{own}', 'b.py': ''})
