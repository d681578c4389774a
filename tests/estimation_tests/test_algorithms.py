"""Ways to convolve: times and workspaces by formula, and what becomes of a profile."""

import itertools
import math

import chainer
import chainer.functions as F
import chainer.links as L
import pytest
from support import recordings

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.forecasting.estimation import (
    Estimator,
    SamplePair,
    load_device_model,
)
from chainer_hybridmem.forecasting.estimation.algorithms import Algorithm
from chainer_hybridmem.forecasting.estimation.costs import Cost
from chainer_hybridmem.planning.records.profile import Phase
from chainer_hybridmem.planning.simulation import make_problem

MODEL = load_device_model('v100-16gb-pcie3')
LEAST = MODEL.workspace_bytes
SIDE, CHANNELS = 20, 16


class Convolutions(chainer.Chain):
    """Kernels of 1, 3 and 5, strides 1 and 2, one and two groups."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, CHANNELS, 3, pad=1)
            self.second = L.Convolution2D(CHANNELS, CHANNELS, 3, pad=1)
            self.large = L.Convolution2D(CHANNELS, 8, 5, pad=2)
            self.single = L.Convolution2D(8, 8, 1)
            self.groups = L.Convolution2D(8, 8, 3, pad=1, groups=2)
            self.strided = L.Convolution2D(8, 8, 3, stride=2, pad=1)
            self.fc = L.Linear(None, 10)

    def forward(self, x, t):
        h = x
        for link in (self.first, self.second, self.large, self.single):
            h = F.relu(link(h))
        h = F.relu(self.strided(F.relu(self.groups(h))))
        return F.softmax_cross_entropy(self.fc(h), t)


@pytest.fixture(scope='module')
def estimator():
    profiles = [recordings.recorded(Convolutions, b, SIDE) for b in (4, 6)]
    return Estimator.make(SamplePair.match(*profiles, (4, 6)), MODEL)


@pytest.fixture(scope='module')
def found(estimator):
    return estimator.algorithms(256)


def operation(estimator, name, phase=Phase.FORWARD):
    (index,) = (
        op.index
        for op in estimator.samples.large.operations
        if name in op.label and 'Convolution' in op.label and op.phase is phase
    )
    return index


def names(ways):
    return {part for way in ways for part in way.name.split('+')}


def test_ways_are_those_that_the_shape_allows(estimator, found):
    assert len(found) == 12
    for name, expected in (
        ('second', {'winograd', 'winograd-nonfused', 'fft', 'gemm'}),
        ('large', {'gemm', 'fft'}),
        ('single', {'gemm'}),
        ('groups', {'gemm'}),
        ('strided', {'gemm'}),
    ):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            assert names(found[operation(estimator, name, phase)]) <= expected
    assert 'winograd' in names(found[operation(estimator, 'second')])


def test_each_way_is_faster_and_takes_more(found):
    for ways in found.values():
        assert ways[0].workspace_bytes == LEAST
        for less, more in itertools.pairwise(ways):
            assert less.workspace_bytes < more.workspace_bytes
            assert less.seconds > more.seconds


def test_winograd_is_what_lavin_and_gray_count(estimator):
    batchsize, tiles = 4096, math.ceil(SIDE / 4) ** 2
    ways = estimator.algorithms(batchsize)[operation(estimator, 'second')]
    tiles *= batchsize
    workspace = 4 * 36 * (2 * tiles * CHANNELS + CHANNELS**2)
    moved = 4 * (2 * batchsize * CHANNELS * SIDE**2 + 9 * CHANNELS**2 + CHANNELS)
    seconds = MODEL.seconds(Cost('elementwise', 0.0, moved + workspace, 3))
    product = Cost('gemm', 2.0 * 36 * tiles * CHANNELS**2, float(workspace), 1)
    seconds += MODEL.seconds(product)
    nonfused = [way for way in ways if way.name == 'winograd-nonfused']
    if nonfused:
        assert nonfused[0].workspace_bytes == workspace
        assert nonfused[0].seconds == pytest.approx(seconds, rel=1e-3)
    else:  # what it saves does not pay for the bytes: with so few channels
        assert seconds > min(way.seconds for way in ways)


def test_the_first_ways_are_the_models_convolutions_or_better(estimator, found):
    plain = estimator.profile(256)
    small = estimator.profile(256, {k: ways[0] for k, ways in found.items()})
    for before, after in zip(plain.operations, small.operations, strict=True):
        assert after.device_seconds <= before.device_seconds * (1 + 1e-12)
        assert after.workspace_bytes == before.workspace_bytes
    assert make_problem(small).in_core_peak_bytes == (
        make_problem(plain).in_core_peak_bytes
    )


def test_a_choice_changes_its_operation_and_its_replay_alone(estimator, found):
    chosen = {k: ways[0] for k, ways in found.items()}
    index, other = operation(estimator, 'second'), operation(estimator, 'single')
    before = estimator.profile(256, chosen)
    way = Algorithm('drawn', 123.0, 1 << 30)
    after = estimator.profile(256, {**chosen, index: way})
    assert after.operations[index].device_seconds == 123.0
    grown = after.operations[index].workspace_bytes
    assert (
        grown - before.operations[index].workspace_bytes == way.workspace_bytes - LEAST
    )
    assert after.operations[other] == before.operations[other]
    replays = {r.operation: r for r in after.recipes if not r.covers}
    assert replays[index].seconds == 123.0
    was = next(r for r in before.recipes if r.operation == index and not r.covers)
    assert replays[index].peak_bytes - was.peak_bytes == way.workspace_bytes - LEAST


def test_calibration_holds_for_every_way(estimator, found):
    calibrated = estimator.calibrated(1000.0, 64)
    fastest = {k: ways[-1] for k, ways in found.items()}
    slow = estimator.profile(256, fastest).compute_seconds
    assert calibrated.profile(256, fastest).compute_seconds == pytest.approx(
        slow * calibrated.factor
    )


@pytest.mark.parametrize('options', [{'convolution': 'im2col'}, {'model': None}])
def test_without_cudnn_there_is_no_choice(estimator, options):
    other = Estimator.make(estimator.samples, **{'model': MODEL, **options})
    with pytest.raises(OptionError, match='cuDNN'):
        other.algorithms(8)
