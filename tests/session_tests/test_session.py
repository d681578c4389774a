"""Sessions from the outside: bad input, interruptions, iterations that differ."""

from __future__ import annotations

import _thread
import dataclasses
import gc
import io
import os
import pathlib
import re
import signal
import string

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem import compiling, timing, training
from chainer_hybridmem.errors import (
    OptionError,
    SessionError,
    SwapStoreError,
    UnknownNameError,
)
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.session import report
from chainer_hybridmem.training.session.setting.options import OPTIONS, Options
from chainer_hybridmem.units import format_bound, format_bytes

LIMIT = 4_000_000  # bytes; Everything needs 5.2 MB in-core, 3.6 MB at least


@pytest.fixture
def model():
    np.random.seed(0)
    return networks.Everything()


def assert_nothing_installed():
    assert not numpy_memory.installed()
    assert 'hybridmem' not in chainer.get_function_hooks()


@pytest.mark.parametrize(
    ('options', 'error', 'words'),
    [
        ({'planner': 'poch'}, UnknownNameError, "Did you mean 'pooch'"),
        ({'memory_limit': '4 quarks'}, OptionError, '4 quarks'),
        ({'memory_limit': 0}, OptionError, 'above zero'),
        ({'memory_limit': 8000}, OptionError, "Did you mean '8000MiB'"),
        ({'memory_limit': '60%'}, OptionError, '`hybridmem run`'),
        ({'link_bandwidth': -1}, OptionError, 'link_bandwidth'),
        ({'link_bandwidth': 100}, OptionError, "Did you mean '100MB/s'"),
        ({'stepz': 3}, OptionError, 'steps'),
        ({'planner': 'pooch', 'time_budget': 3}, OptionError, 'with it: exact, hybrid'),
        ({'planner': ['hybrid']}, UnknownNameError, r"\['hybrid'\]"),
        ({'memory_limit': True}, OptionError, 'memory_limit is True'),
        ({'steps': 'many'}, OptionError, "steps is 'many'; a whole number or None"),
        ({'steps': -3}, OptionError, 'steps must not be negative; -3'),
        ({'steps': 2.5}, OptionError, 'steps is 2.5'),
        ({'seed': 2**64}, OptionError, 'seed must be below'),
        ({'seed': True}, OptionError, 'seed is True'),
        ({'tolerance': None}, OptionError, 'tolerance is None; a number is needed'),
        ({'time_budget': 0}, OptionError, 'time_budget is in seconds'),
        ({'planner': 'exact', 'time_budget': -1}, OptionError, 'time_budget is in sec'),
        ({'planner': 'pooch', 'node_budget': 0}, OptionError, 'node_budget must be'),
        ({'arena': 'yes'}, OptionError, "arena is 'yes'; True or False"),
        ({'device': 'tpu'}, UnknownNameError, 'tpu'),
        ({'device': 'cuda'}, OptionError, 'model is on'),
        ({'swap_dir': '/nowhere/at/all'}, SwapStoreError, '/nowhere/at/all'),
        ({'swap_dir': ''}, SwapStoreError, 'it is empty'),
        ({'swap_dir': 3}, SwapStoreError, 'swap_dir 3'),
    ],
)
def test_bad_options_are_refused_with_their_values(model, options, error, words):
    with pytest.raises(error, match=words):
        hybridmem.optimize(model, **{'memory_limit': LIMIT, **options})
    assert_nothing_installed()


@pytest.mark.parametrize('name', list(OPTIONS))
def test_every_option_refuses_what_is_no_value_of_any(model, name):
    """One without a check would be taken, and do anything or nothing."""
    others = {'shared_link': {'link_bandwidth': '1GB/s'}}.get(name, {})
    with pytest.raises(hybridmem.HybridMemoryError, match=name):
        hybridmem.optimize(model, **{'memory_limit': LIMIT, **others, name: object()})
    assert_nothing_installed()


def test_every_switch_is_checked():
    types = {field.name: str(field.type) for field in dataclasses.fields(Options)}
    switches = [name for name in types if types[name] == 'bool']
    assert set(switches) >= {'arena', 'keep_graph'}
    for name in switches:
        for value in ('yes', 0, None):
            with pytest.raises(OptionError, match=f'{name} is {value!r}; True'):
                Options(LIMIT, **{name: value})


def test_a_kept_plan_counts_under_the_same_options_of_plans():
    """An option is in one of two lists: a new one asks which of them it belongs to."""
    of_plans = {
        'planner', 'planner_options', 'arena', 'cross_iteration', 'splitting', 'rules',
    }  # fmt: skip
    others = {
        'memory_limit', 'device', 'swap_dir', 'host_limit', 'verify', 'progress',
        'link_bandwidth', 'disk_bandwidth', 'shared_link', 'cache_dir', 'communicator',
        'keep_graph',
    }  # fmt: skip
    assert set(Options(LIMIT).of_plans()) == of_plans
    assert {field.name for field in dataclasses.fields(Options)} == of_plans | others


def test_every_option_is_read_by_a_session():
    """One that is declared and reaches nothing would be taken without a word."""
    sources = [
        path.read_text(encoding='utf-8')
        for path in pathlib.Path(training.__file__).parent.rglob('*.py')
        if path.name != 'options.py'
    ]
    read = set(re.findall(r'options\.(\w+)', ' '.join(sources)))
    derived = {
        'host_limit': 'host_limit_bytes',
        'memory_limit': 'limit_bytes',
        'rules': 'checked_rules',
        'verify': 'verified_iterations',
    }
    assert {derived.get(name, name) for name in OPTIONS} - read == set()


def test_something_that_is_no_model():
    with pytest.raises(OptionError, match='chainer.Link'):
        hybridmem.optimize(lambda x: x, LIMIT)


def test_nested_sessions_are_refused_and_the_outer_one_goes_on(model):
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with hybridmem.optimize(model, LIMIT) as session:
        with pytest.raises(SessionError, match='already active'):
            with hybridmem.optimize(model, LIMIT):
                pass
        for _ in range(5):
            networks.iterate(model, optimizer, x, t)
        assert session.state == 'guided'
    assert_nothing_installed()


def test_limit_below_the_largest_operation(model):
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with pytest.raises(hybridmem.OutOfMemoryError) as caught:
        with hybridmem.optimize(model, 500_000):
            networks.iterate(model, optimizer, x, t)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.limit_bytes == 500_000
    message = str(caught.value)
    assert 'Convolution2DFunction' in message
    assert format_bytes(caught.value.requested_bytes) in message
    assert_nothing_installed()


def test_infeasible_plan_names_a_limit_that_works(model):
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with pytest.raises(hybridmem.InfeasibleError, match="'in-core' does not fit"):
        with hybridmem.optimize(model, LIMIT, planner='in-core'):
            for _ in range(5):
                networks.iterate(model, optimizer, x, t)
    assert_nothing_installed()


@pytest.mark.matrix
@pytest.mark.parametrize('when', ['forward', 'backward'])
@pytest.mark.parametrize('iteration', [0, 1, 4])
def test_an_exception_leaves_everything_as_it_was(model, when, iteration):
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    (x, t), *_ = networks.batches(1)
    networks.iterate(model, optimizer, x, t)  # parameters exist
    with pytest.raises(ZeroDivisionError):
        with hybridmem.optimize(model, LIMIT, link_bandwidth='200MB/s'):
            for i in range(6):
                if i == iteration:
                    before = {n: p.array.copy() for n, p in model.namedparams()}
                    with _FailingHook(when):
                        networks.iterate(model, optimizer, x, t)
                networks.iterate(model, optimizer, x, t)
    assert_nothing_installed()
    for name, parameter in model.namedparams():
        assert (parameter.array == before[name]).all()
    networks.iterate(model, optimizer, x, t)  # training goes on without us


class _FailingHook(chainer.FunctionHook):
    """Raises at the tenth function of a phase."""

    name = 'failing'

    def __init__(self, phase):
        self.phase, self.seen = phase, 0

    def forward_postprocess(self, function, in_data):
        self._count('forward')

    def backward_postprocess(self, function, in_data, out_grad):
        self._count('backward')

    def _count(self, phase):
        self.seen += phase == self.phase
        if self.seen == 10:
            raise ZeroDivisionError


class _InterruptingHook(_FailingHook):
    def _count(self, phase):
        self.seen += phase == self.phase
        if self.seen == 10:
            _thread.interrupt_main()


@pytest.fixture
def ctrl_c():
    """Ctrl-C as in a terminal; jobs in the background start with it ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize('iteration', [0, 2, 4])
def test_ctrl_c_ends_the_session_cleanly(model, iteration, ctrl_c):
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with pytest.raises(KeyboardInterrupt):
        with hybridmem.optimize(model, LIMIT, link_bandwidth='200MB/s'):
            for i in range(6):
                if i == iteration:
                    with _InterruptingHook('backward'):
                        networks.iterate(model, optimizer, x, t)
                networks.iterate(model, optimizer, x, t)
    assert_nothing_installed()
    networks.iterate(model, optimizer, x, t)


def test_iterations_of_two_sizes_and_evaluation_between():
    """The last small batch, and evaluation without backward."""
    sizes = [8, 8, 8, 8, 5, 8, 8, 5, 5, 5, 8, 5, 8]
    data = [
        (x[:n], t[:n])
        for n, (x, t) in zip(sizes, networks.batches(len(sizes)), strict=True)
    ]

    def run(**options):
        np.random.seed(0)
        model = networks.Everything()
        optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
        seen = []
        with networks.session_for(model, options) as session:
            for x, t in data:
                networks.iterate(model, optimizer, x, t)
                with chainer.no_backprop_mode(), chainer.using_config('train', False):
                    seen.append(float(model(x, t).array))
        return networks.outcome(model, seen), session

    expected, _ = run()
    result, session = run(memory_limit=LIMIT, planner='pooch')
    networks.assert_same(expected, result)
    figures = session.statistics()
    assert figures['peak_bytes'] <= LIMIT
    assert sum(e['guided'] for e in networks.entries_of(session)) >= 5  # of both sizes
    assert figures['deviations'] == 0


def test_an_evaluation_is_not_in_the_time_of_an_iteration(monkeypatch):
    later, now = 0, timing.now
    monkeypatch.setattr(timing, 'now', lambda: now() + later)
    model = networks.Everything()
    optimizer = chainer.optimizers.SGD(0.01).setup(model)
    with networks.session_for(model, {'memory_limit': LIMIT}) as session:
        for i, (x, t) in enumerate(networks.batches(8)):
            networks.iterate(model, optimizer, x, t)
            with chainer.no_backprop_mode():
                F.sum(x)  # as programs watch their training
            if i in (2, 5):
                with chainer.no_backprop_mode(), chainer.using_config('train', False):
                    model(x, t)
                later += 1000
    assert max(e['seconds'] for e in networks.entries_of(session)) < 500
    evaluates = [bool(e['evaluates']) for e in networks.entries_of(session)]
    assert evaluates == [i in (2, 5) for i in range(8)]


def test_what_evaluates_after_each_iteration_is_in_the_time_of_a_step(monkeypatch):
    """It is in no operation's, so that plans are made for the iterations alone."""
    later, now = 0, timing.now
    monkeypatch.setattr(timing, 'now', lambda: now() + later)
    model = networks.Everything()
    optimizer = chainer.optimizers.SGD(0.01).setup(model)
    with networks.session_for(model, {'memory_limit': LIMIT}) as session:
        for x, t in networks.batches(12):
            networks.iterate(model, optimizer, x, t)
            with chainer.no_backprop_mode(), chainer.using_config('train', False):
                model(x, t)
                later += 1000
                model(x, t)
    assert session.settled
    assert session.plan.predicted_seconds < 500
    assert all(op.device_seconds < 500 for op in session.profile.operations)
    assert all(1000 <= seconds < 1500 for seconds in session.time_steps(1))
    assert all(2000 <= seconds < 2500 for seconds in session.time_steps(2))


def test_an_iteration_that_changes_in_the_middle():
    """Same first function, then another path: passive, then learnt again."""

    class Switching(networks.Everything):
        extra = False

        def forward(self, x, t):
            if self.extra:
                h = self.block2(self.block1(F.relu(self.first(x))))
                h = F.sigmoid(h)
                h = F.max_pooling_2d(h, 2)
                left, right = networks.Halves().apply((h,))
                h = F.concat((left, right))
                return F.softmax_cross_entropy(self.last(h), t)
            return super().forward(x, t)

    def before(model, i):
        model.extra = i == 5 or 8 <= i < 14

    def run(**options):
        data = networks.batches(16)
        return networks.train(Switching, data, before=before, **options)

    expected, _ = run()
    result, session = run(memory_limit=3_800_000)
    networks.assert_same(expected, result)
    guided = [bool(entry['guided']) for entry in networks.entries_of(session)]
    # Learnt by 3; 5 is new, 6 and 7 are not; 8 is new and recorded.
    assert guided[:9] == [False, False, False, True, True, False, True, True, False]
    # Every third one has been of the other path, so 9 begins as one of the first path;
    # 10 and 11 are profiled; from 12 on both paths are guided, whichever is taken.
    assert guided[9:] == [False, False, False, True, True, True, True]
    assert session.deviations == 2


def test_a_map_the_user_holds_is_not_planned_for():
    class Holding(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.a = L.Convolution2D(3, 8, 3, pad=1)
                self.b = L.Convolution2D(8, 8, 3, pad=1)
                self.c = L.Linear(None, 10)

        def forward(self, x, t):
            self.held = F.relu(self.a(x))
            return F.softmax_cross_entropy(self.c(F.relu(self.b(self.held))), t)

    model = Holding()
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with hybridmem.optimize(model, '4MB', planner='swap-all') as session:
        for _ in range(6):
            networks.iterate(model, optimizer, x, t)
        assert model.held.array is not None
        figures = session.statistics()
    held = [
        s
        for s in session.profile.storages
        if s.label.endswith('ReLU') and s.slots and not s.plannable
    ]
    assert len(held) == 1
    assert figures['guided_peak_bytes'] == pytest.approx(
        figures['predicted_peak_bytes'], rel=0.01
    )


def test_a_graph_that_outlives_the_session_still_has_its_backward(model):
    (x, t), *_ = networks.batches(1)
    optimizer = chainer.optimizers.SGD().setup(model)
    networks.iterate(model, optimizer, x, t)  # parameters exist
    with hybridmem.optimize(model, LIMIT, planner='swap-all'):
        for _ in range(5):
            networks.iterate(model, optimizer, x, t)
        loss = model(x, t)
    model.cleargrads()
    loss.backward()
    assert np.isfinite(model.first.W.grad).all()


def test_replan_changes_the_plan_between_iterations(model):
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with hybridmem.optimize(model, LIMIT, planner='swap-all') as session:
        with pytest.raises(SessionError, match='no profile'):
            session.replan('pooch')
        for _ in range(5):
            networks.iterate(model, optimizer, x, t)
        session.replan('pooch')
        for _ in range(3):
            networks.iterate(model, optimizer, x, t)
        figures = session.statistics()
        bound = figures['lower_bound_seconds']
        assert 0 < bound <= figures['predicted_seconds']
        assert figures['gap'] == figures['predicted_seconds'] / bound - 1
        assert format_bound(bound, figures['gap']) in session.report()
    assert figures['planner'] == session.plan.planner == 'pooch'
    assert figures['evictions'] == figures['restores'] == 0


def test_where_no_plan_is_found_the_former_one_stays_with_what_is_known_of_it(model):
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with hybridmem.optimize(model, LIMIT, planner='swap-all') as session:
        for _ in range(6):
            networks.iterate(model, optimizer, x, t)
        guide = session._results.find_planned()
        session.finish_iteration()
        guide.arena.refuse('its allocations have exceeded the limit twice')
        pace, plan = guide.pace.iterations, session.plan
        before = session.statistics()['no_arena']
        with pytest.raises(hybridmem.InfeasibleError):
            session.replan('in-core')
        assert session.plan is plan and guide.pace.iterations == pace
        assert session.statistics()['no_arena'] == before
        networks.iterate(model, optimizer, x, t)


def test_everything_fits_keeps_everything(model):
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with hybridmem.optimize(model, '1GB', planner='hybrid') as session:
        for _ in range(6):
            networks.iterate(model, optimizer, x, t)
        figures = session.statistics()
    assert figures['swap'] == figures['recompute'] == 0
    assert figures['swapped_bytes'] == 0
    assert 'not yet' not in session.report()


def test_every_row_of_the_report_has_its_figures(model, monkeypatch):
    """Also one that is not shown now: it has a figure that decides, or fails later."""
    tables = {}

    def told(rows, figures, missing=None):
        tables.update(dict.fromkeys(rows, figures))
        return tables_of_a_report(rows, figures, missing)

    tables_of_a_report = report.told
    monkeypatch.setattr(report, 'told', told)
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with hybridmem.optimize(model, '1GB', verify=1) as session:
        networks.iterate(model, optimizer, x, t)
        session.finish_iteration()
        session.report()
    with hybridmem.optimize(model, LIMIT, planner='swap-all', verify=1) as session:
        for _ in range(6):
            networks.iterate(model, optimizer, x, t)
        session.report()
    for name in ('FITS', 'LIMITED', 'OF_THE_PLAN', 'OF_ALL_ITERATIONS'):
        assert tables.keys() >= set(getattr(report, name))
    assert report.VERIFIED in tables
    for row, figures in tables.items():
        keys = [key for _, key, _, _ in string.Formatter().parse(row.text) if key]
        assert {*keys, *filter(None, [row.given])} <= figures.keys(), row


def test_the_report_of_a_session_that_is_not_entered_says_so(model):
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    session = hybridmem.optimize(model, LIMIT)
    networks.iterate(model, optimizer, x, t)
    assert session.report().endswith('not entered: use it in a `with` statement')
    with session:
        networks.iterate(model, optimizer, x, t)
    assert 'not entered' not in session.report()


def left_behind():
    """Memory of counters, and files that are open."""
    return len(numpy_memory._memories), len(os.listdir('/proc/self/fd'))


def test_a_session_that_is_never_entered_leaves_nothing(model, tmp_path):
    before = left_behind()
    for _ in range(5):
        hybridmem.optimize(model, LIMIT, swap_dir=str(tmp_path))
    assert left_behind() == before


@pytest.mark.parametrize('refused', [False, True])
def test_a_session_that_does_not_begin_leaves_a_shared_link(model, refused):
    link = {'shared_link': f'never-{os.getpid()}', 'link_bandwidth': '1GB/s'}
    session = hybridmem.optimize(model, LIMIT, **link)
    if refused:
        with hybridmem.profile_memory(), pytest.raises(SessionError):
            session.__enter__()
    del session
    with hybridmem.optimize(model, LIMIT, **{**link, 'link_bandwidth': '2GB/s'}):
        pass


def test_sessions_one_after_the_other_leave_nothing(tmp_path):
    before = None
    for _ in range(4):
        model = L.Linear(3, 4)
        with hybridmem.optimize(model, LIMIT, swap_dir=str(tmp_path)):
            for _ in range(4):
                model.cleargrads()
                F.sum(F.relu(model(np.ones((2, 3), np.float32)))).backward()
        del model
        gc.collect()
        before = before or left_behind()
    assert left_behind() == before


def test_a_session_that_has_ended_is_not_entered_again(model):
    session = hybridmem.optimize(model, LIMIT)
    for _ in range(2):
        if session._thread._has_ended:
            with pytest.raises(SessionError, match='has ended .* make another one'):
                session.__enter__()
        else:
            with session:
                pass
        assert_nothing_installed()


def test_a_session_that_is_entered_twice_goes_on(model):
    with hybridmem.optimize(model, LIMIT) as session:
        with pytest.raises(SessionError, match='already active in this thread'):
            session.__enter__()
        assert numpy_memory.installed()
        loss = model(*networks.batches(1)[0])
        model.cleargrads()
        loss.backward()
        session.finish_iteration()
    assert session.iterations == 1


def test_a_session_tells_who_waits_for_a_compiler(model):
    told = io.StringIO()
    with hybridmem.optimize(model, LIMIT, progress=told):
        compiling._tellers[-1]('compiling')
    assert told.getvalue() == 'hybridmem: compiling\n'
    assert not compiling._tellers
    with hybridmem.optimize(model, LIMIT):
        assert not compiling._tellers
