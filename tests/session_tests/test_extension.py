"""The Trainer extension: start, observe, report, restore."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback

import chainer
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OptionError, SessionError, UnknownNameError
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.devices.host.memory import HostMemory
from chainer_hybridmem.units import format_bytes

LIMIT = 2_000_000


def make_trainer(out, iterations, limit=LIMIT, seed=0, **options):
    np.random.seed(seed)
    model = networks.Convolutions()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    rows = [row for x, t in networks.batches(4) for row in zip(x, t, strict=True)]
    iterator = chainer.iterators.SerialIterator(rows, 8)
    updater = training.StandardUpdater(iterator, optimizer)
    trainer = training.Trainer(updater, (iterations, 'iteration'), out=str(out))
    trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))
    trainer.extend(extensions.snapshot(), trigger=(4, 'iteration'))
    if limit:
        trainer.extend(hybridmem.HybridMemory(limit, **options))
    return trainer, model


def test_observations_reach_the_log(tmp_path):
    trainer, _ = make_trainer(tmp_path, 6)
    trainer.run()
    log = json.loads((tmp_path / 'log').read_text())
    assert log[-1]['hybridmem/peak_bytes'] <= LIMIT
    assert log[-1]['hybridmem/iteration_seconds'] > 0
    assert 'hybridmem/overhead' in log[-1]
    predicted = log[-1]['hybridmem/predicted_seconds']
    bound = log[-1]['hybridmem/lower_bound_seconds']
    assert 0 < bound <= predicted
    assert log[-1]['hybridmem/gap'] == pytest.approx(predicted / bound - 1)
    assert 'hybridmem/gap' not in log[0]  # nothing was planned yet
    assert log[-1]['hybridmem/stall_seconds'] >= 0
    assert not numpy_memory.installed()
    session = trainer.get_extension('HybridMemory').session
    assert session.statistics()['guided_iterations'] >= 2


def test_the_table_has_bytes_with_a_unit(tmp_path):
    trainer, _ = make_trainer(tmp_path, 3)
    entries = ['iteration', 'hybridmem/peak_bytes', 'hybridmem/iteration_seconds']
    table = io.StringIO()
    report = extensions.PrintReport(entries, out=table)
    trainer.extend(report, trigger=(1, 'iteration'))
    trainer.run()
    header, *rows = table.getvalue().replace('\033[J', '').splitlines()
    peaks = [
        row['hybridmem/peak_bytes'] for row in trainer.get_extension('LogReport').log
    ]
    column = header.index('hybridmem/peak_bytes')
    after = header.index('hybridmem/iteration_seconds')
    assert [row[column:after].strip() for row in rows] == list(map(format_bytes, peaks))
    assert all(float(row[after:]) > 0 for row in rows)


PEAK = 'hybridmem/peak_bytes'


def make_logged(out, iterations, every):
    """A trainer with another log, which has a line for so many iterations."""
    trainer, _ = make_trainer(out, iterations)
    log = extensions.LogReport(trigger=(every, 'iteration'), log_name=None)
    trainer.extend(log, name='several')
    return trainer, log


def peaks_of(log):
    return [line[PEAK] for line in log.log]


def test_a_log_of_several_iterations_tells_their_highest_peak(tmp_path):
    trainer, several = make_logged(tmp_path, 6, 3)
    trainer.run()
    each = peaks_of(trainer.get_extension('LogReport'))
    assert min(each) < max(each)
    assert peaks_of(several) == [max(each[:3]), max(each[3:])]
    session = trainer.get_extension('HybridMemory').session
    assert max(each) == session.statistics()['peak_bytes']


def test_a_resumed_log_has_the_peak_from_before_its_snapshot(tmp_path):
    trainer, several = make_logged(tmp_path, 5, 6)
    trainer.run()
    resumed, several = make_logged(tmp_path, 6, 6)
    chainer.serializers.load_npz(tmp_path / 'snapshot_iter_4', resumed)
    before = several._summary._summaries[PEAK].compute_mean()
    assert before == max(peaks_of(trainer.get_extension('LogReport'))[:4])
    several._summary._summaries[PEAK]._x *= 2  # higher than what is to come
    resumed.run()
    assert peaks_of(several) == [2 * before]


def test_a_log_of_other_entries_has_no_peak(tmp_path):
    trainer, _ = make_trainer(tmp_path, 3)
    own = extensions.LogReport(['main/loss'], (3, 'iteration'), log_name=None)
    trainer.extend(own, name='own', priority=1000)
    trainer.run()
    assert PEAK not in own.log[0]


def test_same_result_as_without_and_after_resuming(tmp_path):
    plain, expected = make_trainer(tmp_path / 'plain', 8, limit=None)
    plain.run()
    guided, model = make_trainer(tmp_path / 'guided', 8)
    guided.run()
    again, resumed = make_trainer(tmp_path / 'again', 8, seed=1)
    chainer.serializers.load_npz(
        os.path.join(tmp_path / 'guided', 'snapshot_iter_4'), again
    )
    again.run()
    for name, parameter in expected.namedparams():
        array = dict(model.namedparams())[name].array
        assert array.tobytes() == parameter.array.tobytes()
    # Dropout draws differ after resuming; training must simply go on.
    assert all(np.isfinite(p.array).all() for p in resumed.params())


def test_options_are_checked_when_it_is_made():
    hybridmem.HybridMemory(LIMIT, time_budget=2.0)
    with pytest.raises(OptionError, match="no option 'cache_dri'.*'cache_dir'"):
        hybridmem.HybridMemory(LIMIT, cache_dri='plans')
    with pytest.raises(OptionError, match="'hybrid' has no option 'stpes'.*steps"):
        hybridmem.HybridMemory(LIMIT, stpes=3)
    with pytest.raises(OptionError, match='Planners with it: exact, hybrid'):
        hybridmem.HybridMemory(LIMIT, planner='pooch', time_budget=2.0)
    with pytest.raises(UnknownNameError, match='no planner'):
        hybridmem.HybridMemory(LIMIT, planner='nobody')
    with pytest.raises(OptionError, match='memory_limit'):
        hybridmem.HybridMemory('much')
    with pytest.raises(OptionError, match="arena is 'yes'"):
        hybridmem.HybridMemory(LIMIT, arena='yes')
    with pytest.raises(OptionError, match='link_bandwidth'):
        hybridmem.HybridMemory(LIMIT, link_bandwidth=0)


def fail(trainer=None):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ('before_training', 'others'),
    [
        (print, {'initializer': fail}),
        (fail, {}),
        (print, {'finalizer': fail, 'priority': training.PRIORITY_WRITER + 1}),
    ],
)
def test_the_next_trainer_goes_on_after_an_extension_that_fails(
    tmp_path, before_training, others
):
    trainer, _ = make_trainer(tmp_path, 1)

    @training.make_extension((9, 'iteration'), **others)
    def other(trainer):
        before_training(trainer)

    trainer.extend(other, call_before_training=True)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    again, _ = make_trainer(tmp_path, 2)
    again.run()
    assert again.get_extension('HybridMemory').session.iterations == 2
    assert not numpy_memory.installed()
    assert 'hybridmem' not in chainer.get_function_hooks()


def test_a_session_inside_of_a_trainer_is_refused(tmp_path):
    trainer, _ = make_trainer(tmp_path, 2)

    @training.make_extension(trigger=(1, 'iteration'))
    def other(trainer):
        with (
            pytest.raises(SessionError, match='already active'),
            hybridmem.optimize(networks.Convolutions(), LIMIT),
        ):
            pass

    trainer.extend(other)
    trainer.run()
    assert trainer.get_extension('HybridMemory').session.iterations == 2


def test_an_extension_may_begin_a_measurement_of_its_own(tmp_path):
    class Wrapped(hybridmem.HybridMemory):
        def initialize(self, trainer):
            super().initialize(trainer)

    trainer, _ = make_trainer(tmp_path, 3, limit=None)
    trainer.extend(Wrapped(LIMIT))
    found = []

    @training.make_extension(trigger=(1, 'iteration'))
    def measure(trainer):
        with hybridmem.profile_memory():
            found.append(numpy_memory.installed())

    trainer.extend(measure)
    trainer.run()
    assert found == [True] * 3
    assert trainer.get_extension('HybridMemory').session.iterations == 3


def test_out_of_memory_is_explained(tmp_path):
    trainer, _ = make_trainer(tmp_path, 6, limit=600_000)
    with pytest.raises(MemoryError) as caught:
        trainer.run()
    explained = caught.value
    assert isinstance(explained, hybridmem.OutOfMemoryError)
    assert 'Convolution2DFunction' in str(explained)
    assert 'a limit known to do' in str(explained)
    assert explained.limit_bytes == 600_000
    assert not numpy_memory.installed()


def test_what_the_machine_has_not_is_explained(tmp_path, monkeypatch):
    """The trainer raises the error of NumPy: the last lines that are shown are ours."""
    monkeypatch.setattr(HostMemory, 'raise_limit', lambda self, nbytes: False)
    trainer, _ = make_trainer(tmp_path, 6, limit=600_000)
    with pytest.raises(MemoryError) as caught:
        trainer.run()
    explained = caught.value.__cause__
    assert isinstance(explained, hybridmem.OutOfMemoryError)
    assert 'Convolution2DFunction' in str(explained)
    assert explained.limit_bytes == 600_000
    assert not numpy_memory.installed()
    if sys.version_info >= (3, 11):
        assert traceback.format_exception(caught.value)[-1].strip() == str(explained)


def test_a_classifier_that_holds_its_graph_until_the_next_forward(tmp_path):
    """chainer.links.Classifier keeps loss and prediction on itself."""

    class Predictor(networks.Everything):
        def forward(self, x):
            h = self.block2(self.block1(chainer.functions.relu(self.first(x))))
            return self.last(chainer.functions.max_pooling_2d(h, 2))

    def run(out, limit):
        np.random.seed(0)
        model = chainer.links.Classifier(Predictor())
        optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
        rows = [row for x, t in networks.batches(4) for row in zip(x, t, strict=True)]
        iterator = chainer.iterators.SerialIterator(rows, 8)
        updater = training.StandardUpdater(iterator, optimizer)
        trainer = training.Trainer(updater, (8, 'iteration'), out=str(out))
        if limit:
            trainer.extend(hybridmem.HybridMemory(limit, planner='swap-all'))
        trainer.run()
        return trainer, model

    _, expected = run(tmp_path / 'plain', None)
    trainer, model = run(tmp_path / 'guided', 4_000_000)
    for name, parameter in expected.namedparams():
        array = dict(model.namedparams())[name].array
        assert array.tobytes() == parameter.array.tobytes()
    session = trainer.get_extension('HybridMemory').session
    figures = session.statistics()
    assert figures['guided_iterations'] == 5
    assert figures['evictions'] == figures['restores'] == figures['deviations'] == 0
    assert figures['peak_bytes'] <= session.limit_bytes
    assert figures['host_bytes'] == session.plan.action_bytes(
        session.profile, Action.SWAP
    )
