"""Plans kept on disk: what one process has learnt guides the next one.

A file holds one guide: the operations that it is known by, their profile, the plan and
what else the session has found out about it. It counts only under the circumstances
that it was made in, and with the source files of the model and of its functions: what
has been edited since may not be repeatable any more.

Note: [trust]
    Whether a map can be made again with the same bits is what the profile says, and
    nothing but another profile could contradict it. So the folder must be this user's
    or root's, and not everybody's to write in; a group may, since many systems give
    each user one. Only files are read that belong to this user and that no other user
    may write, and each is checked as a whole before anything of it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from typing import Any

import chainer
import numpy as np

from chainer_hybridmem import files
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.planning.records.plan import Part
from chainer_hybridmem.planning.records.plan_file import parse_plan, serialise_plan
from chainer_hybridmem.planning.records.profile import (
    Operation,
    Phase,
    Profile,
    Slot,
    SlotKind,
)
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.records.rules import pairs_of
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.recording.stopwatch import Times
from chainer_hybridmem.training.session.guides.guide import (
    ForeignMemory,
    Guide,
    PlanArena,
    ProgramHabits,
)
from chainer_hybridmem.training.session.guides.guidebook import LARGEST_GUIDE_COUNT
from chainer_hybridmem.training.session.guides.operation_key import (
    BACKWARD,
    OperationKey,
)
from chainer_hybridmem.training.session.setting.cache_folder import (
    read_private,
    replace_private,
)
from chainer_hybridmem.training.session.setting.runtime import Runtime
from chainer_hybridmem.training.splitting.rules import Way
from chainer_hybridmem.units import format_count
from chainer_hybridmem.version import __version__

_ATTRIBUTE = re.compile(r'(?!__)[^\W\d]\w*(\.\d{1,6})?')


def check_profile(signature: list[OperationKey], profile: Profile) -> None:
    """The profile is one of these operations, and names nothing but arrays.

    Raises:
        FormatError: With the operation or slot.
    """
    operations = profile.operations
    if (
        profile.first_update != len(signature)
        or operations[-1].phase is not Phase.UPDATE
    ):
        raise files.broken(
            'guide',
            f'{profile.first_update} operations are recorded for {len(signature)} keys',
        )
    for op, key in zip(operations, signature, strict=False):
        if not _is_recording(op, key):
            raise files.broken('guide', f'operation {op.index} ({op.label}) is {key}')
    for slot in _list_slots(profile):
        check_slot(slot, len(signature))


def _is_recording(op: Operation, key: OperationKey) -> bool:
    """Whether an operation of a profile looks like this."""
    if _is_backward(key):
        forward = key[1] if isinstance(key[1], int) else -1
        return op.phase is Phase.BACKWARD and op.forward == forward
    specs = tuple(
        f'{np.dtype(char).name}[{",".join(map(str, shape))}]'
        for shape, char in _inputs(key)
    )
    return op.phase is Phase.FORWARD and op.specs == specs


def _list_slots(profile: Profile) -> Iterator[Slot]:
    """All slots of a profile, and the attributes that its recipes read."""
    for recipe in profile.recipes:
        yield from recipe.sources
        for name in recipe.attributes:
            yield Slot(recipe.operation, SlotKind.ATTRIBUTE, name)
    for storage in profile.storages:
        yield from storage.slots


def check_slot(slot: Slot, n_operations: int) -> None:
    """An array of a function has an index, or a name that is none of Python's own."""
    if slot.kind is SlotKind.ATTRIBUTE:
        fits = isinstance(slot.key, str) and _ATTRIBUTE.fullmatch(slot.key) is not None
    else:
        fits = type(slot.key) is int and slot.key >= 0
    if not (fits and 0 <= slot.operation < n_operations):
        raise files.broken('guide', f'{slot} is no place for an array')


def _is_backward(key: OperationKey) -> bool:
    return len(key) == 3 and key[0] == BACKWARD and isinstance(key[1], int | str)


def read_key(row: Any) -> OperationKey:
    """An operation as a session knows it, from its JSON form."""
    name, *rest = row
    if not isinstance(name, str):
        raise TypeError(f'the name of a function was expected, got {name!r}')
    *rest, wiring = rest
    if type(wiring) is not int:
        raise TypeError(f'a number for the wiring was expected, got {wiring!r}')
    if _is_backward(row):
        return tuple(row)
    given = [part for part in rest if isinstance(part, str)]
    inputs = rest[: len(rest) - len(given)]  # they come first
    for shape, char in inputs:
        sizes = isinstance(shape, list) and all(type(n) is int for n in shape)
        if not (sizes and isinstance(char, str)):
            raise TypeError(f'shape and type were expected, got {shape!r}, {char!r}')
    return name, *((tuple(shape), char) for shape, char in inputs), *given, wiring


def _inputs(key: OperationKey) -> list[tuple[Any, str]]:
    """Shape and type of each input of a forward operation."""
    return [part for part in key[1:] if isinstance(part, tuple)]


MAIN = '__main__'


class SourceFiles:
    """Hashes of the files that a model and its functions come from.

    Attributes:
        stamps (dict): By module, as it was when first met; None if it has no file
            that can be read.
    """

    def __init__(self) -> None:
        self._met: set[type] = set()
        self.stamps: dict[str, str | None] = {}
        if (stamp := _stamp(MAIN)) is not None:
            self.stamps[MAIN] = stamp

    def meet(self, kind: type) -> None:
        """Notes the source files of a link's or a function's class."""
        if kind in self._met:
            return
        self._met.add(kind)
        for base in kind.__mro__:
            module = base.__module__
            if module not in (*self.stamps, 'builtins'):
                self.stamps[module] = _stamp(module)

    def find_unknown(self) -> str | None:
        """A module without a file that could be compared; None if there is none."""
        return next((m for m, stamp in self.stamps.items() if stamp is None), None)

    def check(self, recorded: Any) -> None:
        """Nothing may have been edited, neither of the plan's nor of the model's."""
        if not isinstance(recorded, dict):
            raise TypeError(f'a dict was expected, got {recorded!r}')
        for module in sorted({*recorded, *self.stamps}):
            now = self.stamps[module] if module in self.stamps else _stamp(module)
            if module not in recorded or now is None or now != recorded[module]:
                raise files.broken('guide', f'the code of module {module!r} is another')


def _stamp(module: str) -> str | None:
    """Hash of a loaded module's file; None if it has none that can be read."""
    loaded = sys.modules.get(module)
    path = None if loaded is None else vars(loaded).get('__file__')
    if not isinstance(path, str):
        return None
    try:
        with open(path, 'rb') as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


FORMAT = 'chainer_hybridmem/guide'
VERSION = 4
SUFFIX = '.guide.gz'
MOST_TOLD = 300  # characters of a reason
_CONFIG = (  # of Chainer, with which a replay might give other bits
    'autotune',
    'cudnn_deterministic',
    'cudnn_fast_batch_normalization',
    'use_cudnn',
    'use_cudnn_tensor_core',
    'use_ideep',
)


@dataclasses.dataclass(frozen=True)
class _Findings:
    """What a guide knows beside its plan; see :class:`.guide.Guide`."""

    timed: bool
    recomputes: bool
    wants_arena: bool
    spare_bytes: int
    foreign_bytes: int
    outliving: tuple[Slot, ...]
    ways: tuple[Part, ...]

    def check(self, n_operations: int, limit_bytes: int, inexact: bool) -> None:
        """Refuses what no session can have found.

        Args:
            n_operations: Of an iteration.
            limit_bytes: The memory limit.
            inexact: Whether functions may run in parts that change bits.

        Raises:
            FormatError: With the value.
        """
        for nbytes in (self.spare_bytes, self.foreign_bytes):
            if not 0 <= nbytes < limit_bytes:
                raise files.broken('guide', f'{nbytes} bytes are to be left free')
        for slot in self.outliving:
            check_slot(slot, n_operations)
        for way in self.ways:
            possible = 0 <= way.operation < n_operations and way.function >= 0
            if not (possible and way.parts > 0 and (way.exact or inexact)):
                raise files.broken('guide', f'a function cannot run like {way}')

    @classmethod
    def of(cls, guide: Guide) -> _Findings:
        """What a guide has found out."""
        return cls(
            timed=guide.timed,
            recomputes=guide.habits.recomputes,
            wants_arena=guide.arena.wanted,
            spare_bytes=guide.arena.spare_bytes,
            foreign_bytes=guide.foreign.nbytes,
            outliving=tuple(guide.habits.outliving),
            ways=tuple(
                Part(*place, way.cut, way.parts, way.exact)
                for place, way in guide.ways.items()
            ),
        )

    def make_guide(self, signature: list[OperationKey]) -> Guide:
        """A guide that knows all this, and no plan yet."""
        return Guide(
            signature,
            ways={
                (way.operation, way.function, way.name): Way(
                    way.cut, way.parts, way.exact
                )
                for way in self.ways
            },
            arena=PlanArena(self.wants_arena, self.spare_bytes),
            foreign=ForeignMemory(self.foreign_bytes),
            habits=ProgramHabits(self.outliving, self.recomputes),
        )


def open_cache(runtime: Runtime) -> PlanCache | None:
    """The kept plans of a session; None if none are to be kept.

    Args:
        runtime: Names the folder, and what plans depend on.
    """
    folder = runtime.options.cache_dir
    return None if folder is None else PlanCache(folder, runtime)


class PlanCache:
    """The kept plans of one folder, as far as one session can use them.

    Args:
        folder: From :func:`open_folder`.
        runtime (Runtime): What plans are made for; the planner may change.

    Attributes:
        loaded (int): Guides of earlier runs that are used.
    """

    def __init__(self, folder: str, runtime: Runtime) -> None:
        self._rules = runtime.rules
        self._folder = folder
        self._device = runtime.device
        self._options = runtime.options
        self._tell = runtime.tell
        self._sources = SourceFiles()
        self.meet = self._sources.meet
        self.loaded = 0
        self._complained = False

    # -- reading --------------------------------------------------------------
    def load(self) -> list[Guide]:
        """Every kept guide that can be used; the newest one comes first.

        What is broken, or not this user's, is told and left alone.
        """
        guides = []
        for path in self._paths()[:LARGEST_GUIDE_COUNT]:
            name = os.path.basename(path)
            try:
                with files.reading('guide'):
                    guides.append(self._read(path))
            except HybridMemoryError as error:
                self._tell(f'kept plan {name} is not used: {_line(error)}')
        self.loaded = len(guides)
        if guides:
            plans = format_count(len(guides), 'plan')
            self._tell(f'{plans} of earlier runs from {self._folder}')
        return guides

    def _paths(self) -> list[str]:
        """This user's files for the present circumstances, the newest one first."""
        begin = _digest(self._circumstances())
        found = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(begin) and entry.name.endswith(SUFFIX):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if status.st_uid == os.geteuid():
                            found.append((-status.st_mtime_ns, entry.path))
        return [path for _, path in sorted(found)]

    def _read(self, path: str) -> Guide:
        body = files.parse(read_private(path), FORMAT, VERSION)
        if body['circumstances'] != json.loads(self._circumstances()):
            raise files.broken('guide', 'it was made under other circumstances')
        self._sources.check(body['sources'])
        keys = [read_key(row) for row in body['keys']]
        if os.path.basename(path) != self._name(keys):
            raise files.broken('guide', 'its name belongs to other operations')
        profile = parse_profile(body['profile'])
        check_profile(keys, profile)
        options = self._options
        plan = parse_plan(body['plan'])
        if plan.profile_fingerprint != profile.fingerprint():
            raise files.broken('guide', 'its plan was made for another profile')
        check_plan(profile, plan, options.limit_bytes, options.host_limit_bytes)
        problem = make_problem(
            profile,
            options.cross_iteration,
            options.host_limit_bytes,
            rules=self._rules.choose(profile),
        )
        if plan.rules != pairs_of(problem.rules):
            raise files.broken('guide', 'its plan obeys other rules')
        found = files.unrow(_Findings, body['findings'])
        found.check(len(keys), options.limit_bytes, options.splitting is True)
        guide = found.make_guide(keys)
        guide.follow(problem, plan)
        if found.timed:  # the profile has the times
            times = [
                Times(
                    op.device_seconds,
                    op.host_seconds,
                    session_seconds=op.session_seconds,
                )
                for op in profile.operations
            ]
            guide.pace.assume(times)
        return guide

    # -- writing --------------------------------------------------------------
    def save(self, guide: Guide) -> None:
        """Keeps a guide that has a plan; failing is told once, and no error."""
        unknown = self._sources.find_unknown()
        if unknown is not None:
            self._complain(f'module {unknown!r} has no file that could be compared')
            return
        try:
            text = self._written(guide)
            data = gzip.compress(text.encode(), compresslevel=3, mtime=0)
            replace_private(
                os.path.join(self._folder, self._name(guide.signature)), data
            )
            for path in self._paths()[LARGEST_GUIDE_COUNT:]:
                os.unlink(path)
        except (OSError, TypeError, ValueError) as error:
            self._complain(_line(error))

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            self._tell(f'plans are not kept in {self._folder}: {why}')

    def _written(self, guide: Guide) -> str:
        assert guide.problem is not None and guide.plan is not None
        return json.dumps(
            {
                'format': FORMAT,
                'version': VERSION,
                'circumstances': json.loads(self._circumstances()),
                'sources': self._sources.stamps,
                'keys': guide.signature,
                'findings': files.row(_Findings.of(guide)),
                'profile': serialise_profile(guide.problem.profile),
                'plan': serialise_plan(guide.plan),
            }
        )

    def _name(self, keys: list[OperationKey]) -> str:
        circumstances = self._circumstances()
        signature = _digest(circumstances + json.dumps(keys))
        return f'{_digest(circumstances)}-{signature}{SUFFIX}'

    def _circumstances(self) -> str:
        """All that a plan depends on besides the iteration, as JSON."""
        options = self._options
        found = {
            'package': __version__,
            'chainer': chainer.__version__,
            'numpy': np.__version__,
            'cupy': getattr(chainer.backends.cuda.cupy, '__version__', None),
            'python': platform.python_version(),
            'device': self._device.describe(),
            'limit_bytes': options.limit_bytes,
            'host_limit_bytes': options.host_limit_bytes,
            'options': options.of_plans(),
            'ranks_per_node': options.ranks_per_node,
            'config': {name: getattr(chainer.config, name) for name in _CONFIG},
            'cudnn': describe_cudnn(),
        }
        return json.dumps(found, sort_keys=True, default=repr)


def describe_cudnn() -> dict[str, Any] | None:
    """What cuDNN's algorithms and workspaces depend on; None if it is not used."""
    cuda = chainer.backends.cuda
    if not cuda.cudnn_enabled:
        return None
    return {
        'version': cuda.libcudnn.getVersion(),
        'workspace_bytes': cuda.get_max_workspace_size(),
        'float32': cuda.cupy._core.get_compute_type('f'),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _line(error: Exception) -> str:
    """An error in one line, whatever it quotes."""
    return ' '.join(str(error).split())[:MOST_TOLD]
