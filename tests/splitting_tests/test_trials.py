"""What functions would need in parts, tried one by one."""

from __future__ import annotations

import chainer_hybridmem  # noqa: F401 before chainer, which it makes importable

# isort: split
import numpy as np
import pytest
from chainer.functions.activation import sigmoid
from chainer.functions.normalization import batch_normalization

from chainer_hybridmem.training.devices import open_device
from chainer_hybridmem.training.splitting import Splitter, rules

LIMIT = 10**8


class Recording:
    """Knows when trials run."""

    def __init__(self):
        self.spans = []
        self.entered = []

    def enter(self):
        self.entered.append(True)

    def leave(self):
        self.entered.append(False)

    def note_split_trial(self, first_event, end_event, splits):
        self.spans.append((first_event, end_event, splits))


@pytest.fixture
def device():
    device = open_device('cpu', LIMIT)
    device.memory.install(lambda nbytes: None)
    device.memory.start_events()
    yield device
    device.memory.uninstall()
    device.close()


@pytest.fixture
def recording():
    return Recording()


@pytest.fixture
def splitter(device, recording):
    splitter = Splitter(device, 'exact', lambda line: None)
    splitter.begin({})
    splitter.try_parts(recording)
    with splitter:
        yield splitter


def run(splitter, k, function, *inputs):
    """The function's outputs."""
    splitter.place = k, 0
    splitter.awaited = id(function)
    return function.forward(inputs)


def test_the_load_of_every_way(splitter, device, recording):
    x = np.random.rand(16, 1000)
    (expected,) = sigmoid.Sigmoid().forward((x,))
    (y,) = run(splitter, 3, sigmoid.Sigmoid(), x)
    splits = recording.spans[-1][2]
    assert y.tobytes() == expected.tobytes()
    assert [(s.operation, s.function, s.name) for s in splits] == (
        [(3, 0, 'Sigmoid')] * len(splits)
    )
    assert [s.parts for s in splits] == [2, 4, 8]  # at least two samples in each
    assert all(s.cut == 'batch' and s.exact for s in splits)
    loads = [s.peak_bytes for s in splits]
    assert loads == sorted(loads, reverse=True)
    assert loads[-1] >= y.nbytes
    assert recording.entered == [True, False]
    first, end, _ = recording.spans[0]
    assert end == device.memory.event_count > first > 0
    assert not splitter.used and not splitter.changed


def test_more_parts_that_save_nothing_are_not_tried(splitter, monkeypatch):
    tried = []
    whole = rules.run

    def forward(function, inputs, way, mark=None):
        tried.append(way.parts)
        held = np.zeros(10**6)  # whatever the parts
        outputs = whole(function, inputs, way, mark)
        del held
        return outputs

    monkeypatch.setattr(rules, 'run', forward)
    run(splitter, 0, sigmoid.Sigmoid(), np.random.rand(64, 10))
    assert tried == [2, 4]


def test_nothing_is_left_of_trials(splitter):
    x = np.random.rand(4, 8, 5, 5)
    gamma, beta = np.ones(8), np.zeros(8)
    results = []
    for tries in (True, False):
        if not tries:
            splitter.begin({})
        mean, var = np.zeros(8), np.ones(8)
        function = batch_normalization.BatchNormalization(mean=mean, var=var)
        function._input_layouts = (None,) * 3
        splitter.place = 0, 0
        splitter.awaited = id(function)
        (y,) = function.forward((x, gamma, beta))
        results.append((y, mean, var, function.mean, function.inv_std))
    for left, right in zip(*results, strict=True):
        assert left.tobytes() == right.tobytes()


def test_a_load_with_evictions_does_not_count(splitter, recording, monkeypatch):
    whole, others = rules.run, [np.zeros(10**5)]

    def evicting(function, inputs, way, mark=None):
        others.clear()
        return whole(function, inputs, way, mark)

    monkeypatch.setattr(rules, 'run', evicting)
    run(splitter, 0, sigmoid.Sigmoid(), np.random.rand(16, 1000))
    assert [s.parts for s in recording.spans[-1][2]] == [
        4,
        8,
    ]  # the first one has evicted


def test_what_the_whole_evicts_leaves_before_any_load_is_measured(device, recording):
    """Else it seems to leave less behind than its parts do, and none counts."""
    x = np.random.rand(16, 1000)
    others = [np.zeros((LIMIT - device.memory.used_bytes) // 8 - 10_000)]
    device.memory.uninstall()
    device.memory.install(lambda nbytes: others.clear())
    splitter = Splitter(device, 'exact', lambda line: None)
    splitter.begin({})
    splitter.try_parts(recording)
    with splitter:
        run(splitter, 0, sigmoid.Sigmoid(), x)
    assert not others
    assert [s.parts for s in recording.spans[-1][2]] == [2, 4, 8]


def test_ways_that_leave_more_behind_do_not_count(splitter, recording, monkeypatch):
    whole = rules.run

    def padded(function, inputs, way, mark=None):
        (y,) = whole(function, inputs, way, mark)
        if way.parts == 2:
            y = np.concatenate([y, y])[: len(y)]
        return (y,)

    monkeypatch.setattr(rules, 'run', padded)
    run(splitter, 0, sigmoid.Sigmoid(), np.random.rand(16, 1000))
    assert [s.parts for s in recording.spans[-1][2]] == [4, 8]


def test_what_does_not_fit_is_left_out(splitter, device, recording):
    rest = np.zeros((LIMIT - device.memory.used_bytes) // 8 - 45_000)
    x = np.random.rand(16, 1000)
    function = sigmoid.Sigmoid()
    splitter.place = 0, 0
    splitter.awaited = id(function)
    (y,) = function.forward((x,))
    splits = recording.spans[-1][2]
    assert y.shape == x.shape
    assert 2 not in [s.parts for s in splits] and splits
    del rest


def test_operations_that_are_not_counted_are_not_tried(splitter, recording):
    run(splitter, -1, sigmoid.Sigmoid(), np.random.rand(16, 10))
    assert not recording.spans and not recording.entered


@pytest.mark.parametrize('end', [Splitter.switch, Splitter.begin])
def test_another_kind_of_iteration_ends_the_trials(splitter, recording, end):
    end(splitter, {})
    run(splitter, 0, sigmoid.Sigmoid(), np.random.rand(16, 10))
    assert not recording.spans and not recording.entered
