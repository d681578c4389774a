"""What is played for: instances, where they come from, and the best known of each.

``catalogue.json`` says it. Instances of others are not shipped: their entry has
repository, commit, path and checksum, and the user names a folder with the files. The
limits of an instance are sizes, or shares of what plain Chainer needs for it. Others
are drawn from a seed, with an optimum that is known (:func:`draw`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError, OptionError
from chainer_hybridmem.lab.contest import chains, tilings
from chainer_hybridmem.lab.importing import import_profile
from chainer_hybridmem.lab.pools import minimalloc
from chainer_hybridmem.planning.layouts.trace import Trace
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.planning.simulation.problem import Problem, make_problem
from chainer_hybridmem.units import parse_bytes

FORMAT = 'chainer_hybridmem/contest'
VERSION = 1
LINK = Link(1e-5, 12e9, 12e9)  # PCIe 3.0 x16, where a file knows none
OWN = 'profile'
CHECKMATE, MONET, MOCCASIN = 'checkmate', 'monet', 'moccasin'
CHAIN, TILING = 'chain', 'tiling'  # drawn; their path is a seed
STAGED = (CHECKMATE, MOCCASIN, CHAIN)  # whose plans keep Checkmate's constraints
SEEDS = 10  # of each family that is drawn, unless others are asked for
PLAN, LAYOUT = 'plan', 'layout'
HELD = 'held'
WHOLE = 2**60  # that shares are of, where two limits are compared


@dataclasses.dataclass(frozen=True)
class InstanceSource:
    """A public repository.

    Attributes:
        name (str): Of the source.
        repository (str): Its address.
        commit (str): The commit whose files these are.
        licence (str or None): Of its data; None: it names none.
        files (dict): SHA-256 of each file by its path.
        hint (str): What is to do before the files are there.
    """

    name: str
    repository: str
    commit: str
    licence: str | None
    files: Mapping[str, str]
    hint: str = ''


@dataclasses.dataclass(frozen=True)
class Known:
    """A limit, and what others have found within it.

    Attributes:
        limit (str): Bytes as text, or a share such as ``'60%'``.
        best (float or None): The best published: seconds, or bytes of a layout.
        bound (float or None): No answer is better, as published.
        by (str): Whose these are.
        search_seconds (float or None): How long they took.
    """

    limit: str
    best: float | None = None
    bound: float | None = None
    by: str = ''
    search_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Instance:
    """One problem at one or several limits.

    Attributes:
        name (str): Family and name.
        task (str): ``'plan'`` or ``'layout'``.
        kind (str): Of its file, as ``hybridmem import`` has it; ``'profile'`` is one of
            this package's; what is drawn.
        path (str): The file, or the seed.
        times (str or None): A file of times.
        rules (tuple): Pairs of pattern and rule that every plan obeys.
        known (tuple of Known): Its limits.
    """

    name: str
    task: str
    kind: str
    path: str
    times: str | None
    rules: tuple[tuple[str, str], ...]
    known: tuple[Known, ...]

    @property
    def family(self) -> str:
        """Whose instance it is."""
        return self.name.partition('/')[0]

    def problem(self) -> Problem:
        """What there is to plan.

        Raises:
            FormatError: If the file cannot be read.
        """
        if self.kind == OWN:
            profile = library.load_profile(self.path)
        elif self.kind == CHAIN:
            profile = chains.make_profile(chains.draw_chain(int(self.path)))
        else:
            profile = import_profile(self.kind, self.path, LINK, self.times)
        return make_problem(profile, rules=self.rules)

    def trace(self) -> Trace:
        """What there is to lay out.

        Raises:
            FormatError: If the file cannot be read.
        """
        if self.kind == TILING:
            return tilings.draw_tiling(int(self.path)).trace
        with files.named(self.path):
            return minimalloc.loads(files.read_text(self.path))[0]


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """Sources, and the instances that are made of their files.

    Attributes:
        sources (dict): By name.
        entries (list): Of instances, as the file has them.
        folder (str): What paths of entries without a source are relative to.
        held (bool): Whether its names are kept back.
    """

    sources: Mapping[str, InstanceSource]
    entries: Sequence[Mapping[str, Any]]
    folder: str = ''
    held: bool = False

    def instances(self, folders: Sequence[str] = ()) -> list[Instance]:
        """Those whose files are there.

        Args:
            folders: Of the user, with files of the sources.

        Raises:
            FormatError: If an entry is not one of an instance.
        """
        found = {name: dict(_found(s, folders)) for name, s in self.sources.items()}
        result = []
        with files.reading('catalogue'):
            for number, entry in enumerate(self.entries, 1):
                paths = [entry['file'], entry.get('times')]
                if 'source' in entry:
                    there = found[entry['source']]
                    paths = [path and there.get(path, '') for path in paths]
                elif not str(paths[0]).startswith('shipped:'):
                    paths = [path and os.path.join(self.folder, path) for path in paths]
                if '' not in paths:
                    name = f'{HELD}/{number}' if self.held else entry['name']
                    result.append(_instance(name, entry, *paths))
        return result


def _instance(
    name: str, entry: Mapping[str, Any], path: str, times: str | None
) -> Instance:
    return Instance(
        name=name,
        task=entry['task'],
        kind=entry.get('kind', OWN),
        path=path,
        times=times,
        rules=tuple((pattern, says) for pattern, says in entry.get('rules', ())),
        known=tuple(Known(**known) for known in entry['limits']),
    )


def draw(names: Sequence[str] = ()) -> list[Instance]:
    """Drawn instances of every family.

    Args:
        names: Begins of names that are asked for. ``chains/17`` is the chain of seed
            17; a family without a seed has its first ones.
    """
    found = []
    for family, drawn in (('chains', _chain), ('tilings', _tiling)):
        told = [name.partition('/') for name in names]
        seeds = [n for begin, _, n in told if begin == family and n.isdecimal()]
        found += [drawn(f'{family}/{n}', n) for n in seeds or map(str, range(SEEDS))]
    return found


def _chain(name: str, seed: str) -> Instance:
    chain = chains.draw_chain(int(seed))
    best = chains.fastest_seconds(chain)
    limit = f'{chains.limit_of(chain) // chains.MAP_BYTES}MiB'
    known = Known(limit, best, best, 'closed formula')
    return Instance(name, PLAN, CHAIN, seed, None, (('*', 'no swap'),), (known,))


def _tiling(name: str, seed: str) -> Instance:
    best = float(tilings.MEMORY_BYTES)
    known = Known(str(tilings.MEMORY_BYTES), best, best, 'construction')
    return Instance(name, LAYOUT, TILING, seed, None, (), (known,))


def at_limits(instance: Instance, limits: Sequence[str]) -> Instance:
    """An instance at other limits; what is known at one of them stays known.

    A layout has none but its capacity, and stays as it is.

    Raises:
        OptionError: If one is not a size or a share.
    """
    if instance.task == LAYOUT:
        return instance
    known = {parse_bytes(k.limit, whole_bytes=WHOLE): k for k in instance.known}
    asked = {parse_bytes(limit, whole_bytes=WHOLE): Known(limit) for limit in limits}
    return dataclasses.replace(
        instance, known=tuple(known.get(size, new) for size, new in asked.items())
    )


def load_catalogue(path: str | None = None) -> Catalogue:
    """The catalogue of the package, or one that somebody holds back.

    Args:
        path: A file of somebody who runs a contest: its instances are played by
            number, and its checksum can be told before, its contents after.

    Raises:
        FormatError: If it is no catalogue.
    """
    if path is None:
        text = (resources.files(__package__) / 'catalogue.json').read_text('utf-8')
        return _parse(text, '', held=False)
    text = files.read_text(path, FORMAT)
    with files.named(path):
        return _parse(text, os.path.dirname(path), held=True)


def _parse(text: str, folder: str, held: bool) -> Catalogue:
    body = files.parse(text, FORMAT, VERSION)
    with files.reading('catalogue'):
        sources = {
            name: InstanceSource(name, **source)
            for name, source in body.get('sources', {}).items()
        }
        return Catalogue(sources, list(body['instances']), folder, held)


def checksum(path: str) -> str:
    """SHA-256 of a file.

    Raises:
        FormatError: If it cannot be read.
    """
    try:
        with open(path, 'rb') as file:
            return hashlib.sha256(files.read_bounded(file)).hexdigest()
    except OSError as error:
        raise FormatError(f'{path!r} cannot be read: {error.strerror}.') from error


def _found(source: InstanceSource, folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Paths in a source, and in a folder where the file is just the same."""
    for path, expected in source.files.items():
        for place in _places(path, folders):
            if os.path.isfile(place) and checksum(place) == expected:
                yield path, place
                break


def _places(path: str, folders: Sequence[str]) -> Iterator[str]:
    """Where a file may lie: in the repository's folder, or by its name alone."""
    for folder in folders:
        yield os.path.join(folder, path)
        yield os.path.join(folder, os.path.basename(path))


def missing(catalogue: Catalogue, folders: Sequence[str]) -> dict[str, list[str]]:
    """What each source lacks in these folders, as paths.

    Raises:
        OptionError: If there is no such folder.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise OptionError(f'There is no folder {folder!r}; name one with files.')
    return {
        name: [p for p in source.files if p not in dict(_found(source, folders))]
        for name, source in catalogue.sources.items()
    }
