"""Plans kept on disk: guided from the first iteration, and nothing else is believed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import gzip
import io
import json
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import forks, networks

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

import chainer_hybridmem
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.records.plan_file import serialise_plan
from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.session import plan_cache
from chainer_hybridmem.training.session.plan_cache import PlanCache
from chainer_hybridmem.training.session.planning.planning import Planning
from chainer_hybridmem.training.session.session import Session
from chainer_hybridmem.training.splitting.rules import Way

LIMIT = 1_600_000  # bytes; plain Chainer needs 2.8 million
PLANNER = 'superneurons'  # keeps, swaps and recomputes here
LEARNING = 4  # iterations before the first guided one
ITERATIONS = 11  # enough for a plan to get an arena and to be timed


class Net(chainer.Chain):
    """Parameters that are made in the first iteration, statistics, a mask."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.stem = L.Convolution2D(None, 8, 1)
            self.norms = chainer.ChainList(*(L.BatchNormalization(8) for _ in range(3)))
            self.last = L.Linear(None, 10)

    def forward(self, x: Any, t: Any) -> Any:
        h = F.relu(self.stem(x))
        for norm in self.norms:
            h = F.sigmoid(h + F.dropout(F.relu(norm(h)), 0.3))
        return F.softmax_cross_entropy(self.last(h), t)


@dataclasses.dataclass
class Trained:
    """What a session gives, and what it has told."""

    result: dict[str, Any]
    session: Any
    log: str
    profiled: int

    @property
    def guided(self) -> list[bool]:
        """Whether each iteration has followed a plan."""
        return [bool(entry['guided']) for entry in networks.entries_of(self.session)]

    @property
    def refusals(self) -> list[str]:
        """Lines about files that are not used."""
        return [line for line in self.log.splitlines() if 'is not used' in line]


def train(folder: Any, data: Any, **options: Any) -> Trained:
    log = io.StringIO()
    options = {'memory_limit': LIMIT, 'planner': PLANNER, **options}
    with (
        mock.patch.object(Session, 'observe_problem') as profiled,
        mock.patch.object(
            Planning, '_find_faster', return_value=None
        ),  # as chance has it
    ):
        result, session = networks.train(
            Net, data, cache_dir=folder, progress=log, **options
        )
    return Trained(result, session, log.getvalue(), profiled.call_count)


def begin(folder: Any, **options: Any) -> tuple[int, str]:
    """Plans that a session begins with, and what it tells."""
    log = io.StringIO()
    options = {'memory_limit': LIMIT, 'planner': PLANNER, **options}
    model = Net()
    with chainer_hybridmem.optimize(
        model, cache_dir=folder, progress=log, **options
    ) as session:
        return session.statistics()['cached'], log.getvalue()


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def rewrite(path: Path, change: Any) -> None:
    """Changes what a file says."""
    body = json.loads(gzip.decompress(path.read_bytes()))
    change(body)
    path.write_bytes(gzip.compress(json.dumps(body).encode(), compresslevel=1))


@pytest.fixture(scope='module')
def in_core(data: Any) -> Any:
    return networks.train(Net, data)[0]


@pytest.fixture(scope='module')
def kept(data: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """Name and contents of the file of a timed plan."""
    folder = tmp_path_factory.mktemp('kept')
    assert train(folder, data).session.settled
    path = only_file(folder)
    return path.name, path.read_bytes()


@pytest.fixture
def folder(kept: tuple[str, bytes], tmp_path: Path) -> Path:
    """A folder with that file, to be changed."""
    name, contents = kept
    (tmp_path / name).write_bytes(contents)
    (tmp_path / name).chmod(0o600)
    return tmp_path


# -- the second run -------------------------------------------------------------------
@pytest.mark.parametrize(
    'options',
    [
        {},
        {'arena': False},
        {'planner': 'pooch', 'cross_iteration': 'all'},
        {'planner': 'swap-all', 'host_limit': '300kB'},
    ],
    ids=str,
)
def test_guided_from_the_first_iteration(options, data, in_core, tmp_path):
    if 'host_limit' in options:
        options = {**options, 'swap_dir': str(tmp_path)}
    folder = tmp_path / 'kept'
    first = train(folder, data, **options)
    networks.assert_same(in_core, first.result)
    assert first.profiled == 1
    assert first.session.statistics()['cached'] == 0
    assert 'earlier runs' not in first.session.report()
    second = train(folder, data, **options)
    networks.assert_same(in_core, second.result)
    assert second.profiled == 0
    assert all(second.guided)
    assert second.session.plan == first.session.plan
    figures = second.session.statistics()
    assert figures['cached'] == 1
    assert figures['evictions'] == figures['restores'] == figures['deviations'] == 0
    assert figures['footprint_bytes'] <= LIMIT
    assert figures['arena_bytes'] == first.session.statistics()['arena_bytes']
    row = next(r for r in second.session.report().splitlines() if 'earlier' in r)
    assert row.split() == ['plans', 'of', 'earlier', 'runs', '1']
    assert second.refusals == []


def test_poisoned_memory_and_late_copies(folder, data, hostile):
    trained = train(folder, data[:4])
    assert all(trained.guided)
    networks.assert_same(networks.train(Net, data[:4])[0], trained.result)


def test_the_plan_tried_has_all_kinds_of_actions(kept, folder):
    log = io.StringIO()
    with chainer_hybridmem.optimize(
        Net(), LIMIT, PLANNER, cache_dir=folder, progress=log
    ) as session:
        figures = session.statistics()
        assert figures['keep'] and figures['swap'] and figures['recompute']
        assert session.settled
        assert session.state == 'guided'


def test_a_plan_is_timed_where_that_has_not_been_done(data, in_core, tmp_path):
    first = train(tmp_path, data[: LEARNING + 1])
    assert first.guided[-1]
    assert not first.session.settled
    second = train(tmp_path, data)
    assert all(second.guided)
    assert second.log.count('timed:') == 1
    third = train(tmp_path, data)
    assert third.log.count('timed:') == 0
    assert third.session.settled
    networks.assert_same(in_core, second.result)
    networks.assert_same(in_core, third.result)


def test_two_shapes(tmp_path):
    small, large = networks.batches(8, size=4), networks.batches(8)
    data = [batch for pair in zip(small, large, strict=True) for batch in pair]
    in_core = networks.train(Net, data)[0]
    first = train(tmp_path, data)
    assert first.profiled == 2
    assert len(list(tmp_path.iterdir())) == 2
    second = train(tmp_path, data)
    networks.assert_same(in_core, second.result)
    assert second.profiled == 0
    assert all(second.guided)
    assert second.session.statistics()['cached'] == 2


def test_another_process(tmp_path):
    script = tmp_path / 'train.py'
    script.write_text(
        'import sys\n'
        f'sys.path.insert(0, {str(Path(networks.__file__).parents[1])!r})\n'
        'from support import forks, networks\n'
        'class Own(networks.Block):\n'
        '    def forward(self, x, t):\n'
        '        h = super().forward(x)\n'
        '        return networks.F.sum(h * h)\n'
        'data = [(x[:, :1].repeat(8, axis=1), t) for x, t in networks.batches(6)]\n'
        'plain, _ = networks.train(lambda: Own(8), data)\n'
        'result, session = networks.train(lambda: Own(8), data, memory_limit=3_500_000,'
        f' planner="swap-all", cache_dir={str(tmp_path / "plans")!r})\n'
        'networks.assert_same(plain, result)\n'
        'figures = session.statistics()\n'
        'print(figures["cached"], figures["guided_iterations"])\n'
    )
    printed = [forks.run(str(script)).stdout.split() for _ in range(2)]
    assert printed[0][0] == '0'
    assert printed[1] == ['1', '6']


def test_the_trainer_extension_hands_it_on(tmp_path):
    extension = chainer_hybridmem.HybridMemory('1GB', cache_dir=tmp_path / 'plans')
    assert extension._options.cache_dir == str(tmp_path / 'plans')
    with pytest.raises(OptionError, match='cache_dir'):
        chainer_hybridmem.HybridMemory('1GB', cache_dir=tmp_path / 'no' / 'plans')


# -- other circumstances --------------------------------------------------------------
def test_the_same_circumstances(folder):
    assert begin(folder)[0] == 1


@pytest.mark.parametrize(
    'options',
    [
        {'memory_limit': LIMIT + 1},
        {'planner': 'swap-all'},
        {'planner': 'hybrid', 'steps': 10},
        {'cross_iteration': True},
        {'arena': False},
        {'splitting': False},
        {'host_limit': '1GB'},
        {'link_bandwidth': '1GB/s'},
    ],
    ids=str,
)
def test_other_options(options, folder):
    assert begin(folder, **options) == (0, '')


def test_a_link_that_is_shared_and_not_its_name(data, tmp_path):
    shared = {'link_bandwidth': '1GB/s', 'shared_link': f'test-{os.getpid()}'}
    train(tmp_path, data[: LEARNING + 1], **shared)
    assert begin(tmp_path, **shared)[0] == 1
    assert begin(tmp_path, **{**shared, 'shared_link': f'other-{os.getpid()}'})[0] == 1
    assert begin(tmp_path, link_bandwidth='1GB/s') == (0, '')


@pytest.mark.parametrize(
    ('changed', 'new'),
    [
        ('chainer_hybridmem.training.session.plan_cache.__version__', '0.0'),
        ('chainer.__version__', '0.0'),
        ('numpy.__version__', '0.0'),
        ('platform.python_version', lambda: '0.0'),
        ('chainer.backends.cuda.cupy', mock.Mock(__version__='0.0')),
    ],
)
def test_other_versions(changed, new, folder):
    with mock.patch(changed, new):
        assert begin(folder) == (0, '')


def test_other_options_of_the_planner(data, tmp_path):
    train(tmp_path, data[: LEARNING + 1], planner='hybrid', steps=10)
    assert begin(tmp_path, planner='hybrid', steps=10)[0] == 1
    assert begin(tmp_path, planner='hybrid', steps=11) == (0, '')


def test_another_device(folder):
    describe = HostDevice.describe
    with mock.patch.object(
        HostDevice, 'describe', lambda self: {**describe(self), 'cores': 99}
    ):
        assert begin(folder) == (0, '')


def test_another_configuration_of_chainer(folder):
    with chainer.using_config('cudnn_deterministic', True):
        assert begin(folder) == (0, '')


def test_another_cudnn(folder):
    with mock.patch.object(plan_cache, 'describe_cudnn', lambda: {'version': 1}):
        assert begin(folder) == (0, '')


@pytest.mark.parametrize(
    'module', [Net.__module__, 'chainer.functions.activation.sigmoid', '__main__']
)
def test_other_code(module, folder):
    stamp = plan_cache._stamp
    with mock.patch.object(
        plan_cache, '_stamp', lambda name: 'new' if name == module else stamp(name)
    ):
        cached, log = begin(folder)
    assert cached == 0
    assert log.count('\n') == 1
    assert f'the code of module {module!r} is another' in log


def test_code_without_a_file_is_never_kept(data, tmp_path):
    stamp = plan_cache._stamp
    with mock.patch.object(
        plan_cache,
        '_stamp',
        lambda name: None if name == Net.__module__ else stamp(name),
    ):
        trained = train(tmp_path, data)
    assert list(tmp_path.iterdir()) == []
    assert trained.log.count(f'module {Net.__module__!r} has no file') == 1
    assert any(trained.guided)


# -- files that are not believed ------------------------------------------------------
def refused(folder: Path, reason: str) -> None:
    """A session tells in one line why it does not use the file, and begins."""
    cached, log = begin(folder)
    assert cached == 0
    (line,) = log.splitlines()
    assert 'is not used' in line
    assert reason in line
    assert len(line) < 500


def flip_byte(data: bytes, k: int) -> bytes:
    return data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :]


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (lambda data: b'', 'not JSON'),
        (lambda data: data[: len(data) // 2], 'cannot be read'),
        (lambda data: b'{"format": ' + data, 'cannot be read'),
        (lambda data: flip_byte(data, 3000), 'cannot be read'),
        (lambda data: gzip.compress(b'\xff'), 'cannot be read'),
        (lambda data: gzip.compress(b'[' * 10**6), 'not JSON'),
        (lambda data: gzip.compress(b'[]'), 'The file is list, not an object'),
        (lambda data: gzip.compress(bytes(2**26 + 1), 1), 'more than 67108864 bytes'),
    ],
)
def test_damaged_contents(change, reason, folder):
    path = only_file(folder)
    path.write_bytes(change(path.read_bytes()))
    refused(folder, reason)


def changed_profile(**changes: Any) -> Any:
    def change(body: dict[str, Any]) -> None:
        profile = json.loads(body['profile'])
        profile.update(changes)
        body['profile'] = json.dumps(profile)

    return change


def changed_recipe(column: int, value: Any) -> Any:
    """Of the first recipe: its sources (3) or attributes (4)."""

    def change(body: dict[str, Any]) -> None:
        profile = json.loads(body['profile'])
        profile['recipes'][0][column] = value
        body['profile'] = json.dumps(profile)

    return change


def changed_slot(body: dict[str, Any]) -> None:
    profile = json.loads(body['profile'])
    storage = next(s for s in profile['storages'] if s[-1])
    storage[-1][0][2] = -1
    body['profile'] = json.dumps(profile)


def changed_plan(**changes: Any) -> Any:
    def change(body: dict[str, Any]) -> None:
        plan = json.loads(body['plan'])
        plan.update(changes)
        body['plan'] = json.dumps(plan)

    return change


def keep_everything(body: dict[str, Any]) -> None:
    plan = json.loads(body['plan'])
    plan['maps'] = [[row[0], 'keep', *[-1] * 5, 'ram'] for row in plan['maps']]
    plan['replays'] = []
    body['plan'] = json.dumps(plan)


def findings(index: int, value: Any) -> Any:
    def change(body: dict[str, Any]) -> None:
        body['findings'][index] = value

    return change


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (lambda body: body.update(format='chainer_hybridmem/plan'), 'format'),
        (lambda body: body.update(version=1), 'version 1'),
        (
            lambda body: body.update(version=plan_cache.VERSION + 1),
            f'version {plan_cache.VERSION + 1}',
        ),
        (lambda body: body.update(version='\n' * 9 + 'x' * 9999), 'version'),
        (lambda body: body.pop('plan'), "it lacks 'plan'"),
        (lambda body: body['circumstances'].update(limit_bytes=1), 'circumstances'),
        (lambda body: body.update(sources=[]), 'dict was expected'),
        (lambda body: body['sources'].update(os='0'), "module 'os' is another"),
        (lambda body: body['sources'].update(no_such_module='0'), 'no_such_module'),
        (lambda body: body['sources'].update(no_such_module=None), 'no_such_module'),
        (lambda body: body['sources'].pop(Net.__module__), 'is another'),
        (lambda body: body['keys'].pop(), 'name belongs to other operations'),
        (lambda body: body['keys'].append([1, 2]), 'name of a function'),
        (lambda body: body['keys'].append(['ReLU', [[2], 3], 0]), 'shape and type'),
        (lambda body: body['keys'].append(['ReLU', [[2], 'f']]), 'the wiring'),
        (lambda body: body['keys'].append([]), 'ValueError'),
        (changed_profile(operations=[]), 'no operation'),
        (changed_recipe(3, []), 'makes something else'),
        (changed_recipe(4, ['__class__']), 'no place for an array'),
        (changed_recipe(4, ['a.b']), 'no place for an array'),
        (changed_slot, 'no place for an array'),
        (changed_plan(profile_fingerprint='0'), 'another profile'),
        (changed_plan(maps=[], replays=[]), 'the limit is'),
        (keep_everything, 'the limit is'),
        (findings(0, 1), 'bool was expected'),
        (findings(3, -1), '-1 bytes'),
        (findings(4, LIMIT), 'bytes are to be left free'),
        (findings(5, [[0, 'attribute', '__dict__']]), 'no place for an array'),
        (findings(5, [[10**6, 'input', 0]]), 'no place for an array'),
        (findings(6, [[0, 0, 'ReLU', 'batch', 2, False]]), 'cannot run like'),
        (findings(6, [[0, 0, 'ReLU', 'batch', 0, True]]), 'cannot run like'),
        (findings(6, [[-1, 0, 'ReLU', 'batch', 2, True]]), 'cannot run like'),
        (lambda body: body['findings'].pop(), 'needs 7 values'),
    ],
)
def test_hostile_contents(change, reason, folder):
    rewrite(only_file(folder), change)
    refused(folder, reason)


def renamed(folder: Path, change: Any) -> None:
    """Changes a file and gives it the name that goes with its operations."""
    path = only_file(folder)
    rewrite(path, change)
    body = json.loads(gzip.decompress(path.read_bytes()))
    keys = [plan_cache.read_key(row) for row in body['keys']]
    circumstances = json.dumps(body['circumstances'], sort_keys=True)
    kind = plan_cache._digest(circumstances + json.dumps(keys))
    path.rename(folder / f'{plan_cache._digest(circumstances)}-{kind}.guide.gz')


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (lambda keys: keys.pop(), 'operations are recorded for'),
        (lambda keys: keys[0][1][0].append(1), 'operation 0'),
        (lambda keys: keys[-1].__setitem__(1, 1), 'operation 39'),
        (lambda keys: keys.__setitem__(-1, keys[0]), 'operation 39'),
    ],
)
def test_operations_of_another_profile(change, reason, folder):
    renamed(folder, lambda body: change(body['keys']))
    refused(folder, reason)


def owned_by_another(look: Any) -> Any:
    """What the system tells of a file, but that its owner is another user."""

    def changed(*args: Any, **options: Any) -> Any:
        status = look(*args, **options)
        return os.stat_result((*status[:4], status.st_uid + 1, *status[5:]))

    return changed


def test_files_of_another_user_are_ignored(folder, monkeypatch):
    log = io.StringIO()
    session = chainer_hybridmem.optimize(
        Net(), LIMIT, PLANNER, cache_dir=folder, progress=log
    )
    assert len(session._cache.load()) == 1
    user = os.geteuid()
    monkeypatch.setattr(os, 'geteuid', lambda: user + 1)
    log.truncate(0)
    assert session._cache.load() == [] and not log.getvalue()


@pytest.mark.parametrize('mode', [0o777, 0o1777, 0o702, 0o707])
def test_a_folder_that_everybody_may_write_in_is_refused(mode, tmp_path):
    tmp_path.chmod(mode)
    with pytest.raises(
        OptionError, match=rf'{tmp_path}.*\(mode {mode:o}\): .*chmod o-w'
    ):
        chainer_hybridmem.optimize(Net(), LIMIT, cache_dir=tmp_path)
    with pytest.raises(OptionError, match='chmod'):
        chainer_hybridmem.HybridMemory(LIMIT, cache_dir=tmp_path)
    chainer_hybridmem.optimize(Net(), LIMIT, cache_dir=tmp_path / 'in_it')


@pytest.mark.parametrize('mode', [0o700, 0o755, 0o775, 0o2770])
def test_a_folder_that_its_group_may_write_in_is_used(mode, tmp_path):
    tmp_path.chmod(mode)
    chainer_hybridmem.optimize(Net(), LIMIT, cache_dir=tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    mine = os.stat(tmp_path).st_uid
    monkeypatch.setattr(os, 'stat', owned_by_another(os.stat))
    with pytest.raises(OptionError, match=f'belongs to user {mine + 1} .mode 700.'):
        chainer_hybridmem.optimize(Net(), LIMIT, cache_dir=tmp_path)


def test_a_folder_of_root_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'geteuid', lambda: os.stat(tmp_path).st_uid + 1)
    monkeypatch.setattr(
        'chainer_hybridmem.training.session.setting.cache_folder.ROOT',
        os.stat(tmp_path).st_uid,
    )
    chainer_hybridmem.optimize(Net(), LIMIT, cache_dir=tmp_path)


@pytest.mark.parametrize('kind', ['link', 'pipe', 'folder', 'writable', 'foreign'])
def test_files_that_are_not_this_users_alone(kind, folder, monkeypatch):
    path = only_file(folder)
    if kind == 'writable':
        path.chmod(0o620)
    elif kind == 'foreign':
        monkeypatch.setattr(os, 'fstat', owned_by_another(os.fstat))
    else:
        path.rename(folder / 'moved')
        if kind == 'link':
            path.symlink_to(folder / 'moved')
        elif kind == 'pipe':
            os.mkfifo(path)
        else:
            path.mkdir()
    reason = 'others than this user' if kind in ('writable', 'foreign') else ''
    refused(folder, reason or 'cannot be')


def scrambled(value: Any, chance: random.Random) -> Any:
    """Something else of the same JSON type, or not."""
    odd = [None, -1, 2**70, 0.5, 'x', [], {}, True]
    if isinstance(value, list | dict) and value and chance.random() < 0.9:
        copy: Any = value.copy()
        key = chance.choice([*range(len(copy))] if isinstance(copy, list) else [*copy])
        copy[key] = scrambled(copy[key], chance)
        return copy
    if isinstance(value, str) and value.startswith('{'):
        return json.dumps(scrambled(json.loads(value), chance))
    if type(value) is int and chance.random() < 0.6:
        return value + chance.choice([-2, -1, 1, 2, 1000])
    return chance.choice(odd)


def test_nothing_in_a_file_is_an_error(folder, data):
    path = only_file(folder)
    body = json.loads(gzip.decompress(path.read_bytes()))
    chance = random.Random(0)
    log = io.StringIO()
    session = chainer_hybridmem.optimize(
        Net(), LIMIT, PLANNER, cache_dir=folder, progress=log
    )
    used = 0
    for _ in range(80):
        part = chance.choice(['profile', 'plan', 'findings', 'keys', 'sources'])
        text = json.dumps({**body, part: scrambled(body[part], chance)})
        path.write_bytes(gzip.compress(text.encode(), 1))
        used += len(session._cache.load())
    assert log.getvalue().count('is not used') == 80 - used
    assert used < 40


def test_training_goes_on_beside_a_broken_file(folder, data, in_core):
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[:1000])
    trained = train(folder, data)
    networks.assert_same(in_core, trained.result)
    assert len(trained.refusals) == 1
    assert begin(folder)[0] == 1  # it has been replaced


def test_a_plan_that_evicts_again_and_again_is_profiled_again(folder, data, in_core):
    def pretend(body: dict[str, Any]) -> None:
        profile = parse_profile(body['profile'])
        smaller = tuple(
            dataclasses.replace(s, nbytes=s.nbytes // 8 if s.plannable else s.nbytes)
            for s in profile.storages
        )
        profile = dataclasses.replace(profile, storages=smaller)
        plan = chainer_hybridmem.make_plan(profile, LIMIT, 'in-core')
        body['profile'], body['plan'] = serialise_profile(profile), serialise_plan(plan)

    rewrite(only_file(folder), pretend)
    trained = train(folder, data)
    networks.assert_same(in_core, trained.result)
    assert trained.session.statistics()['cached'] == 1
    assert 'more memory is used than recorded: profiled again' in trained.log
    assert trained.profiled == 1
    last = trained.session.last_iteration()
    assert last['guided']
    assert not last['evictions']
    assert trained.session.statistics()['peak_bytes'] <= LIMIT


# -- writing --------------------------------------------------------------------------
@pytest.mark.parametrize('step', ['tempfile.mkstemp', 'os.replace'])
def test_failing_to_write_is_told_once(step, data, in_core, tmp_path):
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device')

    with mock.patch(step, side_effect=full) as failing:
        trained = train(tmp_path, data)
    assert failing.call_count > 1  # when it is planned, and when it is timed
    networks.assert_same(in_core, trained.result)
    assert trained.log.count('No space left') == 1
    assert list(tmp_path.iterdir()) == []
    assert trained.session.settled


def test_everything_that_was_found_out_comes_back(folder):
    cache = chainer_hybridmem.optimize(Net(), LIMIT, PLANNER, cache_dir=folder)._cache
    (guide,) = cache.load()
    guide.pace.forget_times()
    guide.foreign.nbytes = 1000
    guide.arena.exceed(2000)
    guide.arena.reject('')
    outliving = {Slot(2, SlotKind.INPUT, 0), Slot(6, SlotKind.ATTRIBUTE, 'mask')}
    guide.habits.outliving.update(outliving)
    guide.habits.recomputes = False
    guide.ways[4, 0, 'ReLU'] = Way('batch', 2, True)
    cache.save(guide)
    (again,) = cache.load()
    assert again.habits.outliving == outliving
    assert vars(again.habits) == vars(guide.habits)
    assert vars(again.foreign) == vars(guide.foreign)
    assert not again.arena.wanted and again.arena.spare_bytes == 2000
    for name in ('ways', 'timed', 'signature', 'stage', 'plan', 'table'):
        assert getattr(again, name) == getattr(guide, name), name
    assert again.problem.profile == guide.problem.profile


def test_ways_that_change_bits_come_back_where_they_are_wanted(data, tmp_path):
    train(tmp_path, data[: LEARNING + 1], splitting=True)
    rewrite(only_file(tmp_path), findings(6, [[4, 0, 'ReLU', 'batch', 2, False]]))
    assert begin(tmp_path, splitting=True)[0] == 1


def test_a_class_may_have_builtin_bases(folder):
    log = io.StringIO()
    session = chainer_hybridmem.optimize(
        Net(), LIMIT, PLANNER, cache_dir=folder, progress=log
    )
    cache = session._cache
    (guide,) = cache.load()
    cache.meet(type('Listed', (Net, list), {'__module__': __name__}))
    cache.save(guide)
    assert 'not kept' not in log.getvalue()


def test_what_is_no_data_is_not_written(folder):
    log = io.StringIO()
    session = chainer_hybridmem.optimize(
        Net(), LIMIT, PLANNER, cache_dir=folder, progress=log
    )
    (guide,) = session._cache.load()
    guide.signature.append(('ReLU', object()))
    session._cache.save(guide)
    assert 'plans are not kept' in log.getvalue()
    assert len(list(folder.iterdir())) == 1


def test_files_are_private_and_whole(data, tmp_path):
    folder = tmp_path / 'plans'
    train(folder, data)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only_file(folder).stat().st_mode & 0o777 == 0o600


def test_the_oldest_files_go(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_cache, 'LARGEST_GUIDE_COUNT', 1)
    for size in (4, 8):
        train(tmp_path, networks.batches(LEARNING + 1, size=size))
    keys = json.loads(gzip.decompress(only_file(tmp_path).read_bytes()))['keys']
    assert keys[0][1][0][0] == 8


def test_many_writers_and_readers(folder):
    log = io.StringIO()
    caches = [
        chainer_hybridmem.optimize(
            Net(), LIMIT, PLANNER, cache_dir=folder, progress=log
        )._cache
        for _ in range(4)
    ]
    (guide,) = caches[0].load()
    for cache in caches:
        cache._sources.stamps.update(json_sources(folder))

    def write(cache: PlanCache) -> None:
        for _ in range(5):
            cache.save(guide)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, cache) for cache in caches[1:]]
        while not all(future.done() for future in writing):
            assert len(caches[0].load()) == 1
        for future in writing:
            future.result()
    assert 'not' not in log.getvalue()
    assert len(list(folder.iterdir())) == 1


def json_sources(folder: Path) -> dict[str, str]:
    """Sources that the file was made with."""
    body = json.loads(gzip.decompress(only_file(folder).read_bytes()))
    return dict(body['sources'])


# -- the option -----------------------------------------------------------------------
@pytest.mark.parametrize(
    'value', ['', 3, b'plans', 'file', 'file/plans', 'no/plans', '\0']
)
def test_what_can_be_no_folder(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'file').touch()
    with pytest.raises(OptionError, match='cache_dir is ') as raised:
        chainer_hybridmem.optimize(Net(), LIMIT, cache_dir=value)
    assert repr(value) in str(raised.value)


def test_a_folder_that_vanishes_is_no_error(data, tmp_path):
    with chainer_hybridmem.optimize(
        Net(), LIMIT, PLANNER, cache_dir=tmp_path / 'plans'
    ) as session:
        os.rmdir(tmp_path / 'plans')
    assert session.statistics()['cached'] == 0
