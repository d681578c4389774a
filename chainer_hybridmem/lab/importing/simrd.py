"""Logs of DTR's simulator ``simrd``.

Source: Kirisame et al. 2021, *Dynamic Tensor Rematerialization*. A log has one
instruction in a line, in JSON; times are nanoseconds. What is counted is what ``simrd``
counts:

- A view has no memory and no time of its own besides its call's.
- What an operation changes in place (``MUTATE``) is a new buffer of the same size; so
  every operation can run again.
- A buffer can be given up after the last call that reads it, whatever the program
  still holds; what it holds at the end stays.

Backward begins where the log says so, else with the first call named so. Operations of
backward run once, where DTR may run them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.lab.importing.graphs import (
    MOST_NODES,
    Buffer,
    GraphNode,
    build_profile,
)
from chainer_hybridmem.lab.importing.reading import parse_json
from chainer_hybridmem.planning.records.profile import Link, Profile

_SECONDS = 1e-9
_BACKWARD = 'BACKWARD'
_START = 'START'


def read_log(data: bytes, link: Link) -> Profile:
    """The iteration in a log.

    Args:
        data: The whole log.
        link: The path to host memory, of which logs say nothing.

    Raises:
        FormatError: If it is no such log.
    """
    instructions = list(_instructions(data))
    with files.reading('log'):
        said = [i.get('ANNOTATION') for i in instructions]
        start = said.index(_START) + 1 if _START in said else 0
        reader = _Reader(_BACKWARD in said)
        for instruction in instructions[start:]:
            reader.take(instruction)
        device = {'kind': 'import', 'name': 'as logged for simrd'}
        return build_profile(reader.nodes, reader.buffers(), link, device)


def _instructions(data: bytes) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(data.splitlines(), 1):
        if number > 20 * MOST_NODES:
            raise FormatError(f'The log has more than {20 * MOST_NODES} lines.')
        instruction = parse_json(line) if line.strip() else {'ANNOTATION': ''}
        if not isinstance(instruction, dict):
            raise FormatError(f'Line {number} of the log is no instruction.')
        yield instruction


class _Reader:
    """The nodes and buffers so far, and which buffer each name means."""

    def __init__(self, annotated: bool) -> None:
        self.nodes: list[GraphNode] = []
        self._sizes: list[int] = []
        self._names: dict[str, int] = {}
        self._annotated = annotated
        self._backward = False
        self._arguments: list[int] = []  # of the last call

    def buffers(self) -> list[Buffer]:
        held = set(self._names.values())
        return [Buffer(size, stays=b in held) for b, size in enumerate(self._sizes)]

    def take(self, instruction: dict[str, Any]) -> None:
        """One line of the log."""
        kind = instruction.get('INSTRUCTION', 'ANNOTATE')
        if kind == 'ANNOTATE':
            self._backward |= instruction.get('ANNOTATION') == _BACKWARD
        elif kind == 'CONSTANT':
            self._names[instruction['NAME']] = self._new(0)
        elif kind == 'MEMORY':
            self._sizes[self._names[instruction['NAME']]] = int(instruction['MEMORY'])
        elif kind == 'ALIAS':
            self._alias(instruction['NAME'], int(instruction['ALIAS']))
        elif kind in ('COPY', 'COPY_FROM'):
            self._names[instruction['DST']] = self._names[instruction['SRC']]
        elif kind == 'RELEASE':
            self._names.pop(instruction['NAME'], None)
        elif kind == 'CALL':
            self._call(instruction)
        elif kind == 'MUTATE':
            self._mutate(instruction)
        else:
            raise FormatError(f'The log has an instruction {str(kind)[:40]!r}.')

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _call(self, call: dict[str, Any]) -> None:
        made = [self._new(0) for _ in call['RESULT']]
        self._append(call, made)
        self._names.update(zip(call['RESULT'], made, strict=True))

    def _alias(self, name: str, argument: int) -> None:
        """The last call's result is a view of one of its arguments."""
        if argument < 0:
            return
        node, view = self.nodes[-1], self._names[name]
        self._sizes[view] = 0
        self._names[name] = self._arguments[argument]
        makes = tuple(b for b in node.makes if b != view)
        self.nodes[-1] = dataclasses.replace(node, makes=makes)

    def _mutate(self, call: dict[str, Any]) -> None:
        changed = [call['ARGS'][place] for place in call['MUTATE']]
        made = [self._new(self._sizes[self._names[name]]) for name in changed]
        self._append(call, made)
        self._names.update(zip(changed, made, strict=True))

    def _append(self, call: dict[str, Any], made: list[int]) -> None:
        name = str(call['NAME'])
        if not self._annotated:
            self._backward |= 'backward' in name
        self._arguments = [self._names[argument] for argument in call['ARGS']]
        self.nodes.append(
            GraphNode(
                label=f'/{len(self.nodes)}/{name}',
                backward=self._backward,
                seconds=int(call['TIME']) * _SECONDS,
                reads=tuple(dict.fromkeys(self._arguments)),
                makes=tuple(made),
            )
        )
