"""Sessions around programs that do not know of them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import threading
import warnings
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import toys

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
from chainer.graph_optimizations.static_graph import static_graph

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OptionError, OutOfMemoryError, SessionError
from chainer_hybridmem.forecasting.estimation import Kind
from chainer_hybridmem.forecasting.recording_session import (
    RecordingSession,
    recording_options,
)
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.planning.simulation.fitting import fitted
from chainer_hybridmem.running import limit_finder
from chainer_hybridmem.running.follower import Follower
from chainer_hybridmem.running.limit_finder import find_least_limit
from chainer_hybridmem.running.step_recorder import (
    TIMED_STEPS,
    PlainTimer,
    RecordedProgram,
)
from chainer_hybridmem.training.devices.host.memory import HostMemory
from chainer_hybridmem.training.session.guides.forecast import forecast, with_spare
from chainer_hybridmem.training.session.iterations.iteration_history import StepTimes
from chainer_hybridmem.training.session.session import active_session
from chainer_hybridmem.training.session.setting.options import OPTIONS, RECORDED_WITH
from chainer_hybridmem.units import parse_bytes

LIMIT = 3_000_000  # of 4.3 MB
ITERATIONS = 6


class Layers(chainer.ChainList):
    def __init__(self) -> None:
        super().__init__(*[L.Linear(64, 64) for _ in range(8)])

    def forward(self, x: np.ndarray) -> chainer.Variable:
        for layer in self:
            x = F.tanh(layer(x))
        return F.average(x)


class Images(chainer.ChainList):
    def __init__(self) -> None:
        np.random.seed(0)
        super().__init__(*[L.Convolution2D(8, 8, 3, pad=1) for _ in range(3)])

    def forward(self, x: np.ndarray) -> chainer.Variable:
        for layer in self:
            x = F.relu(layer(x))
        return F.average(x)


def images(model: Images) -> list[bytes]:
    """Gradients of one iteration."""
    loss = model(np.random.RandomState(0).rand(32, 8, 24, 24).astype(np.float32))
    model.cleargrads()
    loss.backward()
    return [parameter.grad.tobytes() for parameter in model.params()]


def train(
    model: chainer.Chain, optimizer: chainer.Optimizer, iterations: int = ITERATIONS
) -> list[bytes]:
    x = np.random.RandomState(0).rand(1000, 64).astype(np.float32)
    losses = []
    for _ in range(iterations):
        loss = model(x)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(loss.array.tobytes())
    return losses


def one_model(iterations: int = ITERATIONS) -> list[bytes]:
    np.random.seed(0)
    model = Layers()
    return train(model, chainer.optimizers.SGD(0.1).setup(model), iterations)


def two_models(iterations: int = ITERATIONS, more: int = 0) -> list[bytes]:
    """The second one gets its optimizer when the first one has trained."""
    np.random.seed(0)
    first, second = Layers(), Layers()
    optimizer = chainer.optimizers.SGD(0.1).setup(first)
    losses = train(first, optimizer, iterations + more)
    other = chainer.optimizers.SGD(0.1).setup(second)
    losses += train(second, other, iterations)
    return losses + train(first, optimizer, iterations)


def set_up_again() -> list[bytes]:
    """As with another learning rate, and the same model."""
    np.random.seed(0)
    model = Layers()
    losses = train(model, chainer.optimizers.SGD(0.1).setup(model))
    return losses + train(model, chainer.optimizers.SGD(0.01).setup(model))


def part_of_another() -> list[bytes]:
    """A model and one of its links have an optimizer each."""
    np.random.seed(0)
    model = Layers()
    inner = chainer.optimizers.SGD(0.1).setup(model[0])
    losses = train(model, chainer.optimizers.SGD(0.1).setup(model))
    inner.update()
    return losses


def in_a_thread() -> list[bytes]:
    """Another one than that in which the session is ended."""
    losses: list[bytes] = []
    thread = threading.Thread(target=lambda: losses.extend(one_model()))
    thread.start()
    thread.join()
    return losses


def in_one_thread_after_another() -> list[bytes]:
    """The second one goes on with the model of the first."""
    np.random.seed(0)
    model = Layers()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    losses: list[bytes] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: losses.extend(train(model, optimizer)))
        thread.start()
        thread.join()
    return losses


PROGRAMS = {
    one_model: '6 iterations, ',
    two_models: '18 iterations in 2 sessions, ',
    set_up_again: '12 iterations, ',
    part_of_another: '6 iterations, ',
    in_a_thread: '6 iterations, ',
    in_one_thread_after_another: '11 iterations in 2 sessions, ',
}


@pytest.mark.parametrize('program', PROGRAMS, ids=lambda program: program.__name__)
def test_what_trains_keeps_the_limit_and_its_bits(program):
    expected = program()
    follower = Follower(LIMIT, {})
    assert program() == expected
    follower.__exit__()
    peak, limit, _ = follower.describe()
    assert peak.startswith('peak ')
    assert PROGRAMS[program] in limit
    assert active_session() is None


@pytest.fixture
def generous(monkeypatch):
    """A limit may cost what it likes: functions of tests are small."""
    monkeypatch.setattr(limit_finder, 'MOST_COST', 1e6)


@pytest.mark.parametrize('limit', ['60%', 'auto', LIMIT])
def test_the_first_iterations_show_what_a_limit_is(limit, tmp_path, generous):
    """Of a percentage also where networks train one after the other."""
    program = one_model if limit == 'auto' else two_models
    expected = program(20)
    profile = str(tmp_path / 'p.json')
    follower = Follower(limit, {}, profile=profile if limit != '60%' else None)
    assert program(20) == expected
    follower.__exit__()
    peak, told, _ = follower.describe()
    shares = re.search(r'peak ([\d.]+) MiB of ([\d.]+) MiB in-core', peak)
    assert float(shares[1]) < float(shares[2])
    assert (f'({limit})' in told) == isinstance(limit, str)
    if limit != '60%':
        assert hybridmem.load_profile(profile).operations


class StaticLayers(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.layers = Layers()

    @static_graph
    def forward(self, x: np.ndarray) -> chainer.Variable:
        return self.layers(x)


def a_static_graph(iterations: int = ITERATIONS) -> list[bytes]:
    np.random.seed(0)
    model = StaticLayers()
    return train(model, chainer.optimizers.SGD(0.1).setup(model), iterations)


def test_static_graphs_run_as_others_do():
    expected = a_static_graph()
    follower = Follower(LIMIT, {})
    assert a_static_graph() == expected
    follower.__exit__()
    *_, last = follower.describe()
    assert last.startswith('@static_graph was off')
    assert chainer.global_config.use_static_graph is True


def test_a_program_that_wants_a_static_graph_is_refused():
    follower = Follower(LIMIT, {})
    with chainer.using_config('use_static_graph', True):
        with pytest.raises(SessionError, match='@static_graph'):
            a_static_graph()
    follower.__exit__()
    assert not any('@static_graph' in line for line in follower.describe())


@pytest.mark.parametrize(
    'in_core, told', [(4e6, 'MiB of '), (1e6, '; iterations need ')]
)
def test_a_peak_above_that_of_iterations_is_no_share_of_it(in_core, told):
    """Other memory of the program lay beside them, if all of them are known."""
    follower = Follower(LIMIT, {})
    one_model()
    follower.__exit__()
    follower._figures[-1]['plain_peak_bytes'] = int(in_core)
    peak, *_ = follower.describe()
    assert told in peak
    if in_core < LIMIT:
        follower._figures.append({**follower._figures[-1], 'plain_peak_bytes': None})
        assert 'in-core' not in next(iter(follower.describe()))


def test_sessions_know_what_the_iterations_without_a_limit_have_needed():
    follower = Follower('60%', {})
    one_model(24)
    follower.__exit__()
    (figures,) = follower._figures
    assert figures['in_core_peak_bytes'] >= follower._finder.in_core_bytes > 4e6
    assert figures['limit_bytes'] == int(0.6 * follower._finder.in_core_bytes)


def test_what_trains_without_a_limit_in_the_end_is_told():
    follower = Follower('60%', {})
    two_models(more=7)  # the second one for six, in which the first one is not
    follower.__exit__()
    _, limit, _, last = follower.describe()
    assert '3 iterations, ' in limit
    assert last.startswith('the limit was not applied to what has trained last: ')


def test_a_program_that_catches_the_error_is_told_of():
    """Once the limit gives way, to find out what does; then it holds."""
    follower = Follower(1_000_000, {'splitting': False})
    model, caught = Layers(), []
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    for _ in range(ITERATIONS):
        try:
            train(model, optimizer, 1)
        except MemoryError as error:
            caught.append(str(error))
    peak_bytes = active_session().statistics()['peak_bytes']
    follower.__exit__()
    assert len(caught) == ITERATIONS - 2
    assert follower._peak_bytes == peak_bytes
    *_, told, last = follower.describe()
    assert told == f'the program has caught this error: {caught[0]}'
    assert re.search(r'will do for steps like these: --memory-limit [\d.]+MiB$', last)


@pytest.mark.parametrize(
    ('limit', 'says'), [('60%', r', 60% of which are ([\d.]+ \w+)'), ('auto', '')]
)
def test_what_the_first_iterations_cannot_show(limit, says):
    follower = Follower(limit, {})
    model = Layers()
    model(np.zeros((10, 64), np.float32))
    one_model(1)
    session = active_session()
    follower.__exit__()
    peak_bytes = session.statistics()['peak_bytes']
    (told,) = follower.describe()
    found = re.search(
        rf'the program ends after 1 iteration; let it train for longer, or name a '
        rf'size: it needs ([\d.]+ \w+){says}$',
        told,
    )
    named = [parse_bytes(size) for size in found.groups()]
    wanted = [peak_bytes, 0.6 * peak_bytes][: len(named)]
    assert named == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize(
    ('error', 'why'),
    [
        (None, 'does not train'),
        (SystemExit(0), 'does not train'),
        (SystemExit(2), 'has failed'),
    ],
)
def test_a_program_that_does_not_train(error, why):
    follower = Follower(LIMIT, {})
    follower.__exit__(error and SystemExit, error)
    assert re.search(f'not applied: the program {why}: ', follower.describe()[0])


@pytest.mark.parametrize('limit', ['20%', '1MB'])
def test_the_last_line_names_a_limit_that_does(limit):
    """As a share of the peak where one was asked for."""
    follower = Follower(limit, {'splitting': False})
    with pytest.raises(MemoryError), follower:
        one_model(20)
    *_, time, last = follower.describe()
    assert time == 'time unknown: no iteration has followed a plan'
    does = r'[\d.]+ \w+ will do for steps like these: --memory-limit (\S+)'
    found = re.fullmatch(does, last)
    assert found and found[1].endswith(limit[-1])
    with Follower(found[1], {'splitting': False}) as follower:
        one_model(20)
    assert len(follower.describe()) == 3


def test_a_shared_limit_is_named_for_all_who_share_it():
    named = []
    for sharers in (1, 2):
        follower = Follower(sharers * 10**6, {}, count_sharers=lambda n=sharers: n)
        with pytest.raises(MemoryError), follower:
            one_model(20)
        *_, last = follower.describe()
        named.append(parse_bytes(last.rpartition(' ')[2]))
    assert named[1] == pytest.approx(2 * named[0], rel=0.01)


def test_what_does_not_fit_and_shows_nothing_is_told_with_what_it_needs(monkeypatch):
    monkeypatch.setattr(HostMemory, 'raise_limit', lambda self, nbytes: False)
    follower = Follower(10**6, {'splitting': False})
    with pytest.raises(hybridmem.OutOfMemoryError) as caught, follower:
        one_model()
    *_, last = follower.describe()
    told = re.fullmatch(r'.* or more is needed: --memory-limit (\S+)', last)
    needed = caught.value.used_bytes + caught.value.requested_bytes
    assert needed <= parse_bytes(told[1]) <= 1.01 * needed


def test_host_copies_without_room_are_told_with_what_they_need():
    told = {'planner': 'swap-all', 'host_limit': '300kB'}
    follower = Follower(4_200_000, told)
    with pytest.raises(hybridmem.InfeasibleError) as caught, follower:
        one_model()
    *_, last = follower.describe()
    named = re.fullmatch(r'.* or more is needed on the host: --host-limit (\S+)', last)
    needed = caught.value.requested_bytes
    assert needed <= parse_bytes(named[1]) <= 1.01 * needed


@pytest.mark.parametrize('limit', ['60%', 'auto'])
def test_what_does_not_fit_without_a_limit_is_told_of_the_one_that_helps(limit):
    follower = Follower(limit, {})
    with pytest.raises(MemoryError), follower:
        one_model(1)
        raise MemoryError
    assert follower.describe()[-1].endswith('does not fit: --memory-limit free')


@pytest.mark.parametrize('verify', [2, 0])
def test_what_was_verified_is_told(verify):
    with Follower(LIMIT, {'planner': 'hybrid', 'verify': verify}) as follower:
        one_model()
    told = [line for line in follower.describe() if 'verified' in line]
    assert len(told) == bool(verify)
    assert not told or re.match(r'verified 2 iterations: all bits of [1-9]', told[0])


def test_that_nothing_was_verified_is_told():
    with Follower(2**40, {'verify': True}) as follower:
        one_model()
    assert follower.describe()[-1].startswith('nothing was verified: ')


def test_a_slip_in_a_rule_is_refused_before_a_limit_is_looked_for():
    follower = Follower('60%', {'rules': [('1/LinearFunktion', 'keep')]})
    with pytest.raises(OptionError, match='LinearFunction'), follower:
        one_model()
    assert follower.refused and not follower.has_trained


def test_all_that_is_free_is_shared_and_told(monkeypatch):
    """On a CPU host copies are in the same RAM."""
    monkeypatch.setattr(
        'chainer_hybridmem.training.devices.available_ram', lambda: 16 * 2**30
    )
    with Follower('free', {}, count_sharers=lambda: 2) as follower:
        one_model()
    (figures,) = follower._figures
    assert figures['host_limit_bytes'] == 15 * 2**30 // 4 // 2
    half = (15 * 2**30 * 3 // 4) // 2
    assert half <= figures['limit_bytes'] < half + 10**6  # that the model has
    told = follower.describe()[1]
    assert '(free: 16.0 GiB less 1.0 GiB and 3.8 GiB for host copies)' in told
    with hybridmem.optimize(Layers(), 'free') as session:
        assert 2 * half <= session.limit_bytes < 2 * half + 10**6


@pytest.mark.parametrize(
    ('options', 'nbytes'), [({'swap_dir': '.'}, 0), ({'host_limit': '1MiB'}, 2**20)]
)
def test_what_host_copies_may_take_is_not_free(options, nbytes, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        'chainer_hybridmem.training.devices.available_ram', lambda: 10**7
    )
    expected = one_model()
    with Follower('free', options) as follower:
        assert one_model() == expected
    (figures,) = follower._figures
    assert figures['host_limit_bytes'] == nbytes
    room_bytes = 10**7 - 10**7 // 16 - nbytes
    model_bytes = 8 * (64 * 64 + 64) * 4
    assert 0 <= figures['limit_bytes'] - room_bytes - model_bytes <= model_bytes


def test_what_is_not_free_is_told(monkeypatch):
    monkeypatch.setattr(
        'chainer_hybridmem.training.devices.available_ram', lambda: 10**6
    )
    follower = Follower('free', {'splitting': False})
    with pytest.raises(MemoryError), follower:
        one_model()
    *_, last = follower.describe()
    assert last.endswith('so much is not free: lower the batch size')


def test_a_session_that_is_refused():
    follower = Follower(LIMIT, {'shared_link': 'bus'})
    with pytest.raises(OptionError), follower:
        one_model()
    assert follower.describe()[-1].endswith('refused, as the error says')


@pytest.mark.parametrize('limit', [LIMIT, '70%'])
def test_time_beside_plain_of_a_short_program(limit):
    """Iterations of a percentage have shown it; a size needs a plan for it."""
    with Follower(limit, {}) as follower:
        one_model(12 if limit == '70%' else 2)
    *_, time = follower.describe()
    known = 'times that of plain Chainer' in time
    assert known == (limit == '70%')
    assert known or re.search(r'of which .+ wait for copies; .+ not timed', time)


def test_auto_is_the_least_limit_that_costs_little():
    """Of a step of two kinds of iteration, which need not need the same."""
    session = RecordingSession(Layers(), recording_options(2**40))
    with session:
        optimizer = chainer.optimizers.SGD(0.1).setup(session.model)
        train(session.model, optimizer)
    kind = Kind(session.problem.profile, 2)
    step = RecordedProgram((kind,), 6, True)
    peak = session.problem.in_core_peak_bytes

    def find(cost: float, step: RecordedProgram = step) -> int:
        return find_least_limit(step, {}, cost).limit_bytes or peak

    assert find(9.0) <= find(0.1) <= find(0.0) <= peak
    assert find(9.0) < peak
    plan = hybridmem.make_plan(session.problem, find(0.1))
    assert plan.predicted_seconds <= 1.1 * plan.in_core_seconds
    beside = dataclasses.replace(step, kinds=(kind, kind._replace(older_bytes=1000)))
    assert find(9.0) < find(9.0, beside) <= peak + 1000


def record(model, iterate) -> RecordedProgram:
    with RecordingSession(model, recording_options(2**40)) as session:
        for _ in range(ITERATIONS):
            iterate(model)
    return RecordedProgram((Kind(session.problem.profile, 1),), ITERATIONS, True)


def test_auto_counts_on_functions_in_parts_that_do_not_fit_as_a_whole():
    """Columns of a convolution; in a session at that limit, plans know them, too."""
    step = record(Images(), images)
    as_a_whole, in_parts = (
        find_least_limit(step, options, 9.0).limit_bytes
        for options in ({'splitting': False}, {})
    )
    (problem,) = step.problems
    assert as_a_whole == forecast(problem.profile, 0).enough_bytes
    assert in_parts < 0.8 * as_a_whole
    model, expected = Images(), images(Images())
    limit = with_spare(in_parts, step.find_peak())
    with hybridmem.optimize(model, limit, planner='hybrid') as session:
        for _ in range(ITERATIONS):
            assert images(model) == expected
    assert session.state == 'guided' and not session.exceeded
    assert session.statistics()['peak_bytes'] <= limit


def test_auto_counts_on_none_that_fits_as_a_whole():
    """What fits as a whole runs so as long as there is no plan."""
    step = record(Layers(), lambda model: train(model, mock.Mock(), 1))
    (problem,) = step.problems
    found = find_least_limit(step, {}, 1e6).limit_bytes
    assert fitted(problem, 0).parts
    assert found == forecast(problem.profile, 0).enough_bytes


def test_auto_counts_on_no_more_host_memory_than_there_is():
    step = record(Layers(), lambda model: train(model, mock.Mock(), 1))
    (problem,) = step.problems
    most_bytes = sum(storage.nbytes for storage in problem.maps) // 4
    options = {'host_limit': most_bytes, 'rules': {'*': 'no recompute'}}
    found = find_least_limit(step, options, 9.0).limit_bytes
    assert found > find_least_limit(step, {}, 9.0).limit_bytes
    plan = hybridmem.make_plan(problem, found, **options)
    assert 0 < plan.tier_bytes(problem.profile, Tier.RAM) <= most_bytes


@pytest.mark.parametrize(
    'options', [{'host_limit': '1MB'}, {'rules': {'*': 'recompute'}}]
)
def test_what_records_obeys_where_not_everything_may_be_swapped(options, generous):
    expected = one_model(40)
    follower = Follower('auto', options)
    assert one_model(40) == expected
    follower.__exit__()
    (figures,) = follower._figures
    assert figures['guided_iterations'] and not figures['fits']


ONE_KIND = {
    'iterations': 12,
    'guided_iterations': 9,
    'iteration_seconds': 0.4,
    'own_seconds': 0.15,
    'predicted_seconds': 0.145,
    'in_core_seconds': 0.125,
    'fits': False,
    'kinds': [],
    'step': None,
    'step_iterations': 1,
    'stall_seconds': 0.0,
}


@pytest.mark.parametrize(
    ('plain', 'told'),
    [
        ([0.110, 0.1005, 0.100], '1.49 times that of plain Chainer (1.44 predicted)'),
        ([0.103, 0.150, 0.100], '1.5 times that of plain Chainer (1.4 predicted)'),
        ([], '1.2 times that of plain Chainer (1.2 predicted), which was estimated'),
    ],
)
def test_a_ratio_has_the_digits_that_are_known(plain, told):
    """What is computed counts: another program has had the processor meanwhile."""
    follower = Follower('60%', {})
    follower.__exit__()
    follower._figures.append({**ONE_KIND, 'plain_seconds': plain})
    assert f'time 400.0 ms / iteration, {told}' in follower._describe_time()


def test_a_time_says_that_it_is_of_the_few_iterations_that_had_a_plan():
    follower = Follower('60%', {})
    follower.__exit__()
    follower._figures.append({**ONE_KIND, 'iterations': 40, 'plain_seconds': []})
    assert (
        'time 400.0 ms / iteration with a plan, 1.2 times' in follower._describe_time()
    )


@pytest.mark.parametrize(
    ('plain', 'step', 'told'),
    [
        (
            [0.5],
            (1.0, 0.8, 0.7),
            '500.0 ms / iteration, 1.6 times that of plain Chainer',
        ),
        ([0.5], None, '400.0 ms / iteration; too few steps have run so to compare it'),
        ([], None, '175.0 ms / iteration, 1.5 times that of plain Chainer (1.3 pred'),
    ],
)
def test_times_of_several_kinds_are_means(plain, step, told):
    """Over a step where plain Chainer's is known, else over what has followed plans."""
    follower = Follower('60%', {})
    follower.__exit__()
    kinds = [
        {
            'state': 'guided',
            'iterations': count,
            'seconds': seconds,
            'own_seconds': 0.9 * seconds,
            'predicted_seconds': 0.8 * seconds,
            'in_core_seconds': 0.6 * seconds,
        }
        for count, seconds in ((3, 0.1), (1, 0.4))
    ]
    figures = {'plain_seconds': plain, 'step_iterations': 2, 'kinds': kinds}
    figures['step'] = step and StepTimes(*step)
    follower._figures.append({**ONE_KIND, **figures})
    assert told in follower._describe_time()


@pytest.mark.parametrize(
    ('limit', 'sizes', 'why'),
    [
        (2**40, [1000] * 6, ', which none has needed'),
        (LIMIT, [1000] * 4, ': too few to make one'),
        (LIMIT, range(1000, 1006), ': none has come again'),
        (1_400_000, [1000] * 6, ', as none fits'),
    ],
)
def test_why_no_iteration_had_a_plan_is_told(limit, sizes, why):
    follower = Follower(limit, {'splitting': False})
    model = Layers()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that none fits
        for size in sizes:
            loss = model(np.ones((size, 64), np.float32))
            model.cleargrads()
            loss.backward()
            optimizer.update()
    follower.__exit__()
    assert follower.describe()[1].endswith(f', 0 of them with a plan{why}')


def test_plain_chainer_is_timed_without_a_session():
    """Of a step with two backward passes, from one update to the next."""
    updates, now = [0], [0.0]
    timer = PlainTimer(lambda: updates[0], 1, lambda: now[0])
    timer.start_backward()  # perhaps the second one of a step
    updates[0] += 1
    for step in range(TIMED_STEPS):
        timer.start_backward()
        now[0] += 1.0
        timer.start_backward()
        now[0] += 2.0 + step
        updates[0] += 1
        assert not timer.is_over
    timer.start_backward()
    assert timer.is_over
    assert timer.seconds == [3.0 + step for step in range(TIMED_STEPS)]


@pytest.mark.parametrize('passes', [1, 2, 3, 5])
def test_a_step_has_all_backward_passes_that_add_to_gradients(passes):
    """They compute the same, and one update comes after them all."""
    with Follower('80%', {}) as follower:
        model = Layers()
        optimizer = chainer.optimizers.SGD(0.1).setup(model)
        model.cleargrads()
        for _ in range(TIMED_STEPS + 20):
            for _ in range(passes):
                model(np.ones((400, 64), np.float32)).backward()
            optimizer.update()
            model.cleargrads()
    assert follower._figures[-1]['step_iterations'] == passes
    assert len(follower._figures[-1]['plain_seconds']) == TIMED_STEPS


def test_no_limit_is_cheap_where_the_sessions_own_work_is_not():
    """It is in each plan, whatever it moves."""
    kind = Kind(toys.chain())
    operations = tuple(
        dataclasses.replace(op, session_seconds=0.5) for op in kind.profile.operations
    )
    profile = dataclasses.replace(kind.profile, operations=operations)
    dear = RecordedProgram((kind._replace(profile=profile),), 6, True)
    found = find_least_limit(dear, {}, 0.1)
    seconds = profile.compute_seconds
    assert found == (None, pytest.approx(1 + 0.5 * len(operations) / seconds))
    assert find_least_limit(dear, {}, 0.1, 2 * seconds).limit_bytes is not None
    assert find_least_limit(dear, {}, 0.1, seconds / 2).limit_bytes is None


def test_where_no_limit_is_cheap_the_program_runs_without_one():
    """Small functions take less than the hooks around them."""
    expected = one_model(20)
    follower = Follower('auto', {})
    assert one_model(20) == expected
    follower.__exit__()
    *_, told = follower.describe()
    if follower._figures:  # on a machine that computes slowly
        assert re.search(r'[\d.]+ times that of plain Chainer', told)
    else:
        assert 'no limit below the in-core peak of ' in told


def train_two_in_turns() -> list[bytes]:
    """As GANs do: a step has an iteration of each, and one needs more."""
    np.random.seed(0)
    small, large = Layers(), Layers()
    pairs = [(m, chainer.optimizers.Adam().setup(m)) for m in (small, large)]
    losses = []
    for _ in range(20):
        for (model, optimizer), size in zip(pairs, (200, 1000), strict=True):
            loss = model(np.ones((size, 64), np.float32))
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(loss.array.tobytes())
    return losses


@pytest.mark.parametrize('limit', ['70%', 'auto'])
def test_a_limit_is_found_for_every_kind_of_iteration(limit, generous):
    """The first iterations are neither the largest nor have all optimizer states."""
    expected = train_two_in_turns()
    with Follower(2**40, {}) as plain:
        train_two_in_turns()
    peak_bytes = plain._peak_bytes
    follower = Follower(limit, {})
    assert train_two_in_turns() == expected
    follower.__exit__()
    assert follower._finder.in_core_bytes == peak_bytes
    limit_bytes = follower._figures[-1]['limit_bytes']
    assert max(one['peak_bytes'] for one in follower._figures) <= limit_bytes
    assert limit_bytes < peak_bytes


def train_with_more_and_more() -> list[bytes]:
    np.random.seed(0)
    model = Layers()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    losses = []
    for number in range(40):
        size = 1000 if number < 25 else 6000
        loss = model(np.ones((size, 64), np.float32))
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(loss.array.tobytes())
    return losses


def test_a_limit_that_was_found_and_is_too_small_is_raised(generous):
    """Nobody has named it, so that nothing ends for it."""
    expected = train_with_more_and_more()
    follower = Follower('auto', {})
    assert train_with_more_and_more() == expected
    follower.__exit__()
    first, last = follower._figures
    assert first['limit_bytes'] < last['peak_bytes'] <= last['limit_bytes']
    _, limit, _ = follower.describe()
    assert '(auto), raised where it was exceeded; ' in limit


@pytest.mark.parametrize('every', [1, 3, 12])
def test_a_percentage_follows_a_batch_that_grows(every):
    """It is one of what plain Chainer needs for the batch there is."""

    def train_growing() -> list[bytes]:
        np.random.seed(0)
        model = Layers()
        optimizer = chainer.optimizers.SGD(0.1).setup(model)
        losses = []
        for i in range(36):
            x = np.ones((250 * (1 + i // every), 64), np.float32)
            loss = F.average(model(x))
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(loss.array.tobytes())
            del loss
        return losses

    expected = train_growing()
    follower = Follower('60%', {})
    assert train_growing() == expected
    follower.__exit__()
    limits = [figures['limit_bytes'] for figures in follower._figures]
    assert limits and limits == sorted(limits)
    assert max(limits) > 2 * min(limits) or every == 12
    assert not any('Error' in line for line in follower.describe())
    told = r', (exceeded|looked for anew where it was exceeded); '
    assert bool(re.search(told, follower.describe()[1])) == (len(limits) > 1)


def test_a_percentage_that_does_for_a_step_only_is_looked_for_once_more_at_most():
    """It has done for two iterations, which are a step; then it is too small."""
    np.random.seed(0)
    follower = Follower('80%', {})
    first, second = Layers(), Layers()
    optimizers = [chainer.optimizers.Adam().setup(model) for model in (first, second)]
    x = np.ones((512, 64), np.float32)

    def run(model: Layers, h: Any) -> tuple[Any, list[Any]]:
        outputs = []
        for layer in model:
            h = F.tanh(layer(h))
            outputs.append(h)
        return F.average(h), outputs

    def learn(number: int, loss: Any) -> None:
        (first, second)[number].cleargrads()
        loss.backward()
        optimizers[number].update()

    def train_in_turns() -> None:
        for _ in range(30):  # the program holds outputs, which cannot leave
            loss, outputs = run(second, x)
            learn(1, loss)
            _, between = run(first, x)
            loss, others = run(second, between[-1])
            learn(0, loss)
            del loss, outputs, between, others

    with pytest.raises(OutOfMemoryError, match='a limit known to do is'):
        train_in_turns()
    follower.__exit__()
    assert len(follower._figures) <= 2


def test_a_percentage_is_not_looked_for_again_and_again_for_what_is_no_part_of_a_step():
    """Every fifth step an evaluation needs more, which no step shows."""
    follower = Follower('85%', {})
    np.random.seed(0)
    models = Layers(), Layers()
    optimizers = [chainer.optimizers.Adam().setup(model) for model in models]
    x, more = np.ones((500, 64), np.float32), np.ones((9000, 64), np.float32)

    def train_and_evaluate() -> None:
        for step in range(60):
            for model, optimizer in zip(models, optimizers, strict=True):
                loss = model(x)
                model.cleargrads()
                loss.backward()
                optimizer.update()
            if step % 5 == 4:
                with chainer.no_backprop_mode():
                    models[0](more)

    with pytest.raises(OutOfMemoryError, match='a limit known to do is'), follower:
        train_and_evaluate()
    assert len(follower._figures) <= 2


@pytest.mark.parametrize('last', [20, 29])
def test_what_exceeds_a_percentage_before_a_program_ends_is_told(last):
    """It is an error, as with a size, or what has trained since had no limit."""
    follower = Follower('70%', {})
    np.random.seed(0)
    model = Layers()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    held: list[Any] = []

    def hold_more_and_more() -> None:
        for i in range(30):
            if i >= last:
                held.append(np.zeros(10**6, np.float32))
            loss = model(np.ones((1000, 64), np.float32))
            model.cleargrads()
            loss.backward()
            optimizer.update()

    error = pytest.raises(OutOfMemoryError) if last == 29 else contextlib.nullcontext()
    with error, follower:
        hold_more_and_more()
    _, limit, _, *more = follower.describe()
    assert ', exceeded' in limit
    if last == 20:
        assert more[0] == (
            'the limit was not applied to what has trained last: one was exceeded, and '
            'the program has ended before there was another'
        )
    assert re.match(r'[\d.]+ MiB .*: --memory-limit [\d.]+MiB', more[-1])


def test_a_second_thread_is_refused_while_the_first_one_trains():
    follower = Follower(LIMIT, {})
    one_model()
    errors: list[BaseException] = []

    def another() -> None:
        model = Layers()
        try:
            model(np.zeros((10, 64), np.float32)).backward()
        except hybridmem.SessionError as error:
            errors.append(error)

    thread = threading.Thread(target=another, name='another')
    thread.start()
    thread.join()
    one_model()  # the first one may go on
    follower.__exit__()
    (error,) = errors
    assert "Thread 'another' trains while the memory limit is that of" in str(error)


def test_options_are_those_of_optimize():
    follower = Follower(LIMIT, {'planner': 'swap-all'})
    one_model()
    assert active_session().planner == 'swap-all'
    follower.__exit__()
    follower = Follower(LIMIT, {'planner': 'missing'})
    with pytest.raises(hybridmem.UnknownNameError):
        one_model()
    follower.__exit__()


def test_a_program_with_a_session_keeps_its_own():
    follower = Follower(LIMIT, {})
    model = Layers()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    train(model, optimizer)  # under ours
    assert active_session() is not None
    with hybridmem.optimize(model, '1GB') as own:
        assert active_session() is own
        optimizer.setup(model)
        train(model, optimizer)
    assert own.statistics()['iterations'] == ITERATIONS
    follower.__exit__()
    assert '6 iterations, ' in follower.describe()[1]


def only_own() -> None:
    model = Layers()
    with hybridmem.optimize(model, '1GB'):
        train(model, chainer.optimizers.SGD(0.1).setup(model))


def only_infers() -> None:
    with chainer.no_backprop_mode():
        Layers()(np.zeros((10, 64), np.float32))


def an_sgd_of_its_own() -> None:
    model = Layers()
    model(np.zeros((10, 64), np.float32)).backward()
    for parameter in model.params():
        parameter.array -= 0.1 * parameter.grad


def only_set_up() -> None:
    model = Layers()
    chainer.optimizers.SGD(0.1).setup(model)
    with chainer.no_backprop_mode():
        model(np.zeros((10, 64), np.float32))


@pytest.mark.parametrize(
    ('program', 'reason'),
    [
        (only_own, 'the program has a session of its own'),
        (only_infers, 'the program does not train: no optimizer has got a model'),
        (an_sgd_of_its_own, 'the program trains without an optimizer of Chainer'),
        (only_set_up, 'no function has run for a backward since'),
    ],
)
def test_it_says_why_there_was_no_limit(program, reason):
    follower = Follower(LIMIT, {})
    program()
    follower.__exit__()
    (told,) = follower.describe()
    assert told.startswith(f'the limit was not applied: {reason}')


def test_too_little_memory_ends_in_an_error_with_a_limit_that_will_do():
    follower = Follower(1_000_000, {'splitting': False})
    with pytest.raises(hybridmem.OutOfMemoryError) as caught:
        try:
            one_model()
        except MemoryError as error:
            follower.__exit__(type(error), error, error.__traceback__)
            raise
    assert re.search(r'a limit known to do is .+ \(\d+ bytes\)', str(caught.value))
    assert active_session() is None
    told = follower.describe()[1]
    assert told.startswith('limit 976.6 KiB, exceeded once to find out what will do; ')


def test_nothing_of_it_is_left_in_chainer():
    setup, apply = chainer.Optimizer.setup, chainer.FunctionNode.apply
    follower = Follower(LIMIT, {})
    chainer.optimizers.SGD(0.1).setup(Layers())
    assert chainer.FunctionNode.apply is not apply
    follower.__exit__()
    assert (chainer.Optimizer.setup, chainer.FunctionNode.apply) == (setup, apply)


def test_models_of_sessions_that_have_ended_are_let_go():
    with Follower(LIMIT, {}) as follower:
        model = Layers()
        alive = weakref.ref(model)
        train(model, chainer.optimizers.SGD(0.1).setup(model))
        del model
        one_model()
        gc.collect()
        assert alive() is None
    assert '12 iterations in 2 sessions, ' in follower.describe()[1]


def test_a_session_that_records_is_told_all_but_what_follows_a_plan():
    """An option that is new has to be in one of both."""
    follows = {
        'memory_limit', 'planner', 'device', 'arena',
        'cache_dir', 'verify', 'communicator', 'keep_graph',
    }  # fmt: skip
    assert set(OPTIONS) == follows | set(RECORDED_WITH)
    assert not follows & set(RECORDED_WITH)
