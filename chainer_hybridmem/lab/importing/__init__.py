"""Reads iterations that others have recorded, as profiles of this package.

Files of others are data: bounded, checked, never executed. Each kind has a file, which
says what it counts and where that differs from what this package records.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from chainer_hybridmem import files
from chainer_hybridmem.errors import OptionError, UnknownNameError, nearest
from chainer_hybridmem.lab.importing import (
    checkmate,
    execution_traces,
    kusumoto,
    moccasin,
    monet,
    simrd,
    snapshots,
)
from chainer_hybridmem.lab.importing.reading import read_data, without_collections
from chainer_hybridmem.planning.records.profile import Link, Profile

Reader = Callable[[bytes, 'bytes | None', Link], Profile]


@dataclasses.dataclass(frozen=True)
class FileKind:
    """One kind of file.

    Attributes:
        what (str): Whose files these are.
        read (callable): Their bytes, those of a file of times or None, and a link, to
            a profile.
        times (str): What a file of times is; empty if there is none.
    """

    what: str
    read: Reader
    times: str = ''


def _checkmate(data: bytes, times: bytes | None, link: Link) -> Profile:
    graph = checkmate.read_solution(data, times)
    name = "P100 16 GB (MONeT's schedule zoo)"
    return checkmate.graph_profile(graph, link, name)


def _moccasin(data: bytes, _: bytes | None, link: Link) -> Profile:
    graph = moccasin.read_graph(data)
    return checkmate.graph_profile(graph, link, "V100 (MOCCASIN's repository)")


KINDS: dict[str, FileKind] = {
    'checkmate': FileKind(
        "solutions of Checkmate and MONeT, as in MONeT's schedule zoo",
        _checkmate,
        'cost_*.pkl of the zoo',
    ),
    'monet': FileKind(
        "MONeT's solutions of mode inplace_normal, counted as MONeT counts",
        lambda data, _, link: monet.graph_profile(monet.read_graph(data), link),
    ),
    'moccasin': FileKind(
        "Checkmate's networks as JSON, as MOCCASIN has them", _moccasin
    ),
    'simrd': FileKind(
        "logs of DTR's simulator",
        lambda data, _, link: simrd.read_log(data, link),
    ),
    'execution-trace': FileKind(
        "PyTorch's execution traces",
        execution_traces.read_trace,
        'a Kineto trace of the same program',
    ),
    'kusumoto': FileKind(
        'graphs of Kusumoto et al.',
        lambda data, _, link: kusumoto.read_graph(data, link),
    ),
    'snapshot': FileKind(
        "PyTorch's snapshots of memory, for layouts only",
        lambda data, _, link: snapshots.read_snapshot(data, link),
    ),
}


def import_profile(
    kind: str, path: str, link: Link, times: str | None = None
) -> Profile:
    """A profile of a file that another program has written.

    Args:
        kind: One of :data:`KINDS`.
        path: The file; it may be compressed with gzip.
        link: The path to host memory, which such files do not know.
        times: A file with other times, for kinds that have one.

    Raises:
        FormatError: If a file is missing or not of this kind.
        OptionError: If the kind has no file of times.
        UnknownNameError: If there is no such kind.
    """
    if kind not in KINDS:
        raise UnknownNameError(
            f'There is no kind {kind!r}.{nearest(kind, KINDS)} Kinds: '
            f'{", ".join(KINDS)}.'
        )
    found = KINDS[kind]
    if times is not None and not found.times:
        having = ', '.join(name for name, other in KINDS.items() if other.times)
        raise OptionError(f'Kind {kind!r} has no file of times; these have: {having}.')
    data = read_data(path)
    other = None if times is None else read_data(times)
    with files.named(os.fspath(path)), without_collections():
        return found.read(data, other, link)
