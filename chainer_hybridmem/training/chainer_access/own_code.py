"""Whether what a function of Chainer runs is still Chainer's own code.

Note: [own code]
    Programs and libraries put other code in the place of Chainer's: a forward, or a
    helper that a forward calls. A name proves nothing, for ``functools.wraps`` copies
    it; the file that code has been compiled from does. So the code of a class is
    followed from its forward: to what it closes over, to methods of the class, and to
    whatever its names mean in its module and in the modules that these name. Code of
    Chainer, and of our repairs, is followed; of other libraries, what Chainer names is
    looked at; all else is foreign. Names are taken without what they stand behind, so
    rather too much is looked at than too little.

    What has been looked at is remembered, place by place, and looked at once more in
    each iteration: a program may replace code at any time.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import os
import sysconfig
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chainer
import numpy as np
import scipy
from chainer.function import FunctionAdapter

from chainer_hybridmem.training.chainer_access import compat

FORWARDS = frozenset({'forward', 'forward_cpu', 'forward_gpu'})
# Run without a name in the code, when a function is copied or read.
_SILENT = (
    '__init__',  # which has what forward reads as attributes
    *('__copy__', '__reduce_ex__', '__reduce__', '__getstate__', '__setstate__'),
    *('__getattribute__', '__getattr__', '__setattr__', '__del__', '__call__'),
)
_LIBRARIES = 'chainer', 'chainer_hybridmem', 'numpy', 'scipy', 'cupy', 'cupyx', 'six'
# What makes graphs and goes back: no forward calls it, only names like it.
_OF_GRAPHS = frozenset({'apply', 'backward', 'backward_accumulate', 'grad'})
# Of these classes, forwards name what is no part of a replay, as Variable.backward.
_OF_FUNCTIONS = *FORWARDS, 'retain_inputs', 'retain_outputs'
_WIDE = chainer.Variable, chainer.Link, chainer.FunctionNode, chainer.Function


def _folder(module: Any) -> str:
    return os.path.join(os.path.dirname(str(module.__file__)), '')


_CHAINER = _folder(chainer)
_FOLLOWED = _CHAINER, _folder(compat)
_OWN = (
    os.path.dirname(os.path.dirname(os.path.dirname(_folder(compat)))) + os.sep,
    *(_folder(np), _folder(scipy)),
)
_PYTHON = os.path.join(sysconfig.get_path('stdlib'), '')
_SITE = 'site-packages', 'dist-packages'


_is_same = operator.is_
_code_of = operator.attrgetter('__code__')


class _Scope(NamedTuple):
    """Values that have been found among the names of a module or a class.

    Attributes:
        owner (object): The module's dictionary, or the class.
        names (mapping): What it has.
        found (dict): Values that have been found, by name.
        absent (set of str): Names that it does not have.
    """

    owner: Any
    names: Mapping[str, Any]
    found: dict[str, Any]
    absent: set[str]

    def holds(self) -> bool:
        """Whether everything is where it was."""
        # No loop of Python's: each iteration looks at some thousand names.
        now = map(self.names.get, self.found)
        same = all(map(_is_same, now, self.found.values()))
        return same and self.absent.isdisjoint(self.names)


class _Places:
    """Where values have been found that answers depend on.

    Attributes:
        scopes (dict): By the identity of what has the names.
        codes (dict): Functions, and their code.
    """

    def __init__(self) -> None:
        self.scopes: dict[int, _Scope] = {}
        self.codes: dict[types.FunctionType, types.CodeType] = {}

    def hold(self) -> bool:
        """Whether everything is where it was."""
        now = map(_code_of, self.codes)
        return all(map(_is_same, now, self.codes.values())) and all(
            [scope.holds() for scope in self.scopes.values()]
        )

    def note(self, owner: Any, name: str) -> None:
        """Something depends on what a class or a dictionary has under a name."""
        scope = self.scopes.get(id(owner))
        if scope is None:
            names = vars(owner) if isinstance(owner, type) else owner
            scope = self.scopes[id(owner)] = _Scope(owner, names, {}, set())
        if name in scope.names:  # what an earlier answer depends on counts
            scope.found.setdefault(name, scope.names[name])
        else:
            scope.absent.add(name)

    def note_code(self, function: types.FunctionType) -> None:
        """Something depends on the code of a function."""
        self.codes.setdefault(function, function.__code__)


class _ClassLook:
    """What has been found of one class.

    Args:
        kind: The class.
        places: Gets what it depends on.

    Attributes:
        foreign (str): The first code that is foreign, with its place; empty if none is.
    """

    def __init__(self, kind: type, places: _Places) -> None:
        self.foreign = ''
        self._places = places
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # else identities would come again
        self._names: set[str] = set()
        self._kinds = kind.__mro__
        self._waiting: list[tuple[str, Any]] = []
        for name in (*FORWARDS, *_SILENT):
            self._look_up_in_classes(name)
        if issubclass(kind, chainer.Function):
            self.visit('forward', FunctionAdapter.forward)
        self.finish()

    # -- values ---------------------------------------------------------------
    def visit(self, name: str, value: Any) -> None:
        """Has something looked at, under a name to tell."""
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._kept.append(value)
            self._waiting.append((name, value))

    def finish(self) -> None:
        """Looks at all that waits, until something is foreign."""
        while self._waiting and not self.foreign:
            self._look_at(*self._waiting.pop())

    def _look_at(self, name: str, value: Any) -> None:
        """Looks at something that is perhaps called."""
        if isinstance(value, types.FunctionType):
            self._places.note_code(value)
            if not _is_of_library(value):
                self.foreign = _describe(name, value)
                return
            self._visit_parts(name, value)
            if value.__code__.co_filename.startswith(_FOLLOWED):
                self._follow(value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                self.visit(name, part)
        elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
            self.visit(name, value.__func__)
        elif callable(value) or hasattr(type(value), '__get__'):
            if not _is_of_known_type(value):
                self.foreign = f'{name} is {type(value).__name__}'
            self._visit_parts(name, value)

    def _visit_parts(self, name: str, value: Any) -> None:
        """Looks at what a function closes over, and at what other callables hold."""
        parts: list[Any] = []
        if isinstance(value, types.FunctionType):
            parts += value.__defaults__ or ()
            parts += (value.__kwdefaults__ or {}).values()
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # it is empty as yet
                    parts.append(cell.cell_contents)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            parts += [value.func, *value.args, *value.keywords.values()]
        else:
            with contextlib.suppress(AttributeError):
                parts += object.__getattribute__(value, '__dict__').values()
        for part in parts:
            if isinstance(part, (list, tuple)):
                parts += part
            elif isinstance(part, dict):
                parts += part.values()
            elif callable(part):
                self.visit(name, part)

    def _visit_class(self, kind: type) -> None:
        """Looks at all that a helper class of Chainer has."""
        if not is_of_chainer(kind):
            if kind.__module__.partition('.')[0] == '__main__':
                self.foreign = f'{kind.__qualname__} is a class of the program'
            return
        if issubclass(kind, _WIDE):
            return
        for base in kind.__mro__:
            if is_of_chainer(base):
                for name, value in vars(base).items():
                    self._places.note(base, name)
                    self.visit(f'{base.__name__}.{name}', value)

    # -- names ----------------------------------------------------------------
    def _follow(self, function: types.FunctionType) -> None:
        """Looks up what the code of a function names."""
        globals_, attributes = _names_of(function.__code__)
        scopes = [vars(np)]
        for name in attributes:
            self._look_up_in_classes(name)
        for name in globals_ & function.__globals__.keys():
            self._look_up(name, function.__globals__, scopes)
        seen: set[int] = set()
        while scopes:  # of modules, and of modules in these
            scope = scopes.pop()
            if id(scope) not in seen:
                seen.add(id(scope))
                for name in attributes & scope.keys():
                    self._look_up(name, scope, scopes)

    def _look_up(
        self, name: str, scope: dict[str, Any], scopes: list[dict[str, Any]]
    ) -> None:
        value = scope[name]
        if isinstance(value, types.ModuleType):
            if value.__name__.partition('.')[0] in _LIBRARIES:
                scopes.append(vars(value))
        elif isinstance(value, type) and issubclass(value, _WIDE):
            scopes.append(_methods(value))
        elif not callable(value):
            return
        self._places.note(scope, name)
        self.visit(f'{scope.get("__name__", "")}.{name}', value)

    def _look_up_in_classes(self, name: str) -> None:
        if name in self._names:
            return
        self._names.add(name)
        above: list[type] = []
        for base in self._kinds:
            value = vars(base).get(name)
            if value is not None and (base not in _WIDE or name in _OF_FUNCTIONS):
                for other in (*above, base):
                    self._places.note(other, name)
                if base is not object:
                    self.visit(f'{base.__name__}.{name}', value)
                return
            above.append(base)


def _methods(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if is_of_chainer(base):
            found.update(vars(base))
    return found


@functools.cache
def _names_of(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The global names and the attributes that code reads."""
    read_globals, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ('LOAD_GLOBAL', 'LOAD_NAME'):
            read_globals.add(instruction.argval)
        elif instruction.opcode in dis.hasname:
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_globals, inner = _names_of(constant)
            read_globals |= inner_globals
            attributes |= inner
    return read_globals, attributes - _OF_GRAPHS


def is_of_chainer(kind: type) -> bool:
    """Whether a class says that it is Chainer's."""
    return kind.__module__.partition('.')[0] == 'chainer'


def _is_of_library(function: types.FunctionType) -> bool:
    """Whether the code of a function is Chainer's, ours, Python's or NumPy's."""
    name = function.__code__.co_filename
    if name.startswith((*_FOLLOWED, *_OWN)):
        return True
    package = str(function.__globals__.get('__name__', '')).partition('.')[0]
    if name.startswith('<'):  # made by exec, as by NumPy
        return package in _LIBRARIES and package != 'chainer'
    if name.startswith(_PYTHON):
        return not any(site in name for site in _SITE)
    return package in ('cupy', 'cupyx', 'six')


def _is_of_known_type(value: Any) -> bool:
    """Whether what can be called, and is no function of Python, is of a library."""
    kind = type(value)
    if isinstance(value, np.ufunc):  # those of numpy.frompyfunc take objects alone
        return any('O' not in name for name in value.types)
    package = kind.__module__.partition('.')[0]
    if package in ('builtins', 'functools', 'operator'):
        # Compiled code says where it is from, and no one can wrap that.
        return True
    return package in _LIBRARIES or kind.__name__ == 'cython_function_or_method'


def _describe(name: str, function: types.FunctionType) -> str:
    code = function.__code__
    file = os.path.basename(code.co_filename)
    return f'{name} is from {file}, line {code.co_firstlineno}'


class _Answers(dict[type, str]):
    """Answers for classes, in one iteration; they hold while everything is in place.

    A look-up runs no code of Python's: each function asks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places = _Places()
        self._former: dict[type, str] = {}
        self._lock = threading.Lock()

    def __missing__(self, kind: type) -> str:
        with self._lock:
            if not (self or self._places.hold()):
                self._places, self._former = _Places(), {}
            foreign = self._former.get(kind)
            if foreign is None:
                is_followed = is_of_chainer(kind)
                foreign = _ClassLook(kind, self._places).foreign if is_followed else ''
                self._former[kind] = foreign
            self[kind] = foreign
            return foreign


_answers = _Answers()


def look_anew() -> None:
    """Whether everything is where it was is asked once more before an answer."""
    _answers.clear()


find_foreign: Callable[[type], str] = _answers.__getitem__
"""What a Chainer class runs in forward that is not Chainer's; mostly nothing.

Such as ``'Sigmoid.forward_cpu is from train.py, line 9'``; empty also for a class that
is not Chainer's.
"""


def is_own(value: Any) -> bool:
    """Whether something that can be called runs no code of the program."""
    look = _ClassLook(object, _Places())
    look.visit('', value)
    look.finish()
    return not look.foreign
