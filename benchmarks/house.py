"""Measures the shape of the package: files, classes, functions, words.

``python -m benchmarks run house`` prints what is above a mark; ``--all`` prints every
figure's largest holders. A mark says where to look, not where to cut: a file and a
class are as long as their idea.

A method is every ``def`` in the body of a class, an attribute every name that methods
of the class assign on ``self`` and every annotated name of its body. Complexity is one
plus the branches of a function (if, loop, except, with an operand of ``and`` and
``or``, conditional expression, comprehension), as McCabe counts them. A foreign write
assigns, from another file, a field that a class of the package declares. Attributes of
a file's own variables (its thread-local ones) and patches of Chainer's modules
(``training/chainer_access/compat``) are none.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'chainer_hybridmem'
MARKS = {
    'files at the root': 10,
    'methods of a class': 30,
    'attributes of a class': 15,
    'lines of a function': 60,
    'arguments of a function': 7,
    'complexity of a function': 15,
    'lines of a file': 400,
    'foreign writes': 0,
    'nobody, whoever, somebody': 0,
    'words of the README': 1000,
}
# Records of compiled kernels, and what declares every option once.
TABLES = ('ProblemArrays', 'Work', 'Options')
COMPILED = ('compiled', 'njit', 'jit')  # decorators of kernels, whose length is free
BRANCHES = (
    ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension,
    ast.Assert, ast.AsyncFor,
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Holder:
    """One place and its figure."""

    figure: int
    place: str


def sources() -> Iterator[tuple[pathlib.Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob('*.py')):
        yield path, ast.parse(path.read_text())


def name_of(node: ast.expr) -> str:
    """The last name of a decorator or a function that is called."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ''


def functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def is_kernel(function: Function) -> bool:
    return any(name_of(d) in COMPILED for d in function.decorator_list)


def count_lines(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def count_arguments(function: Function) -> int:
    spec = function.args
    named = [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return len([a for a in named if a not in ('self', 'cls')])


def count_branches(function: Function) -> int:
    """McCabe's number; functions inside count for themselves."""
    count, stack = 1, list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        count += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        stack.extend(ast.iter_child_nodes(node))
    return count


def assigned(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        targets = list(statement.targets)
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
        targets = [statement.target]
    else:
        return []
    flat: list[ast.expr] = []
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Tuple | ast.List):
            targets.extend(target.elts)
        else:
            flat.append(target)
    return flat


def fields_of(node: ast.ClassDef) -> set[str]:
    found = {
        s.target.id
        for s in node.body
        if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
    }
    for function in node.body:
        if not isinstance(function, Function):
            continue
        for statement in ast.walk(function):
            for target in (
                assigned(statement) if isinstance(statement, ast.stmt) else ()
            ):
                if (
                    isinstance(target, ast.Attribute)
                    and name_of(target.value) == 'self'
                ):
                    found.add(target.attr)
    return found


def declared_in(tree: ast.Module) -> set[str]:
    """Fields of all classes of a file."""
    classes = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    return set().union(*map(fields_of, classes))


def foreign_writes(tree: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and target of assignments to fields that other files declare."""
    foreign = known - declared_in(tree)
    own = {'self'} | {
        target.id
        for statement in tree.body
        for target in assigned(statement)
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        for target in assigned(node):
            if not isinstance(target, ast.Attribute) or target.attr not in foreign:
                continue
            if not isinstance(target.value, ast.Name) or target.value.id not in own:
                yield node.lineno, ast.unparse(target)


def measure() -> dict[str, list[Holder]]:
    """All holders of every figure, largest first."""
    found: dict[str, list[Holder]] = {name: [] for name in MARKS}

    def note(name: str, figure: int, place: str) -> None:
        found[name].append(Holder(figure, place))

    loose = [p.name for p in PACKAGE.glob('*.py')]
    note('files at the root', len(loose), ' '.join(sorted(loose)))
    known = set().union(*(declared_in(tree) for _, tree in sources()))
    for path, tree in sources():
        where = str(path.relative_to(PACKAGE))
        text = path.read_text()
        note('lines of a file', text.count('\n'), where)
        words = re.findall(r'\b(?:nobody|whoever|somebody)\b', text, re.IGNORECASE)
        note('nobody, whoever, somebody', len(words), where)
        patches = 'compat' in path.parts
        for line, target in () if patches else foreign_writes(tree, known):
            note('foreign writes', 1, f'{where}:{line} {target}')
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                place = f'{where} {node.name}'
                methods = [f for f in node.body if isinstance(f, Function)]
                note('methods of a class', len(methods), place)
                if node.name not in TABLES:
                    note('attributes of a class', len(fields_of(node)), place)
        for function in functions(tree):
            place = f'{where}:{function.lineno} {function.name}'
            if not is_kernel(function):
                note('lines of a function', count_lines(function), place)
                note('arguments of a function', count_arguments(function), place)
                note('complexity of a function', count_branches(function), place)
    readme = (ROOT / 'README.md').read_text()
    note('words of the README', len(readme.split()), 'README.md')
    return {n: sorted(h, key=lambda x: -x.figure) for n, h in found.items()}


def above(name: str, holders: list[Holder]) -> list[Holder]:
    return [h for h in holders if h.figure > MARKS[name]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--all', action='store_true', help='the five largest of each')


def main(options: argparse.Namespace) -> int:
    for name, holders in measure().items():
        over = above(name, holders)
        largest = holders[0].figure if holders else 0
        print(f'{name}: largest {largest}, mark {MARKS[name]}, {len(over)} above')
        for holder in over if not options.all else holders[:5]:
            print(f'    {holder.figure:6d}  {holder.place}')
    return 0
