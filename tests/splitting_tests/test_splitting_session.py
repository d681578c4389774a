"""Sessions whose limit is below the working set of single operations.

``Everything`` needs 5.2 MB in-core and 3.1 MB for its largest function as a whole.
"""

from __future__ import annotations

import concurrent.futures
import io
import os
import re
import signal
import types

from support import networks  # imports chainer_hybridmem before chainer

# isort: split
import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import _backprop_utils
from chainer.functions.activation import sigmoid
from chainer.functions.noise import dropout

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OptionError, SwapStoreError
from chainer_hybridmem.training.chainer_access import own_code
from chainer_hybridmem.training.devices import open_device
from chainer_hybridmem.training.splitting import Splitter, rules
from chainer_hybridmem.training.splitting import splitter as splitter_module

ITERATIONS = 6
EXACT_LIMIT = 2_300_000
TIGHT_LIMIT = 1_300_000
RECOMPUTED = {'*': 'swap', '*MaxPoolingND': 'recompute', '*2DFunction': 'recompute'}
SUM_LIMIT = 4_700_000  # of arrays of 1 MB
NEW_WAY = 'does not fit as a whole'
HOST, GPU = (types.SimpleNamespace(kind=k, memory=None) for k in ('cpu', 'cuda'))


def test_without_parts_it_is_out_of_memory(data):
    with pytest.raises(hybridmem.OutOfMemoryError, match='Convolution2DFunction'):
        networks.train(
            networks.Everything, data, memory_limit=EXACT_LIMIT, splitting=False
        )


@pytest.mark.parametrize('options', [{}, {'planner': 'manual', 'actions': RECOMPUTED}])
def test_exact_parts_train_with_every_bit(data, in_core, options):
    told = io.StringIO()
    actual, session = networks.train(
        networks.Everything, data, memory_limit=EXACT_LIMIT, progress=told, **options
    )
    networks.assert_same(in_core, actual)
    figures = session.statistics()
    assert figures['state'] == 'guided'
    assert figures['split'] == 8 and figures['split_inexact'] == 0
    assert figures['predicted_peak_bytes'] == figures['guided_peak_bytes']
    assert figures['peak_bytes'] <= EXACT_LIMIT
    assert re.search(
        r'run in parts, of these not exact +8 functions / 0', session.report()
    )
    # What has been found out is known from then on.
    before, _, after = told.getvalue().partition('iteration 1 (warm-up)')
    assert before.count(NEW_WAY) == 8 and NEW_WAY not in after
    assert (figures['recompute'] > 0) or not options


def test_exact_parts_refuse_what_rounding_would_change(data):
    with pytest.raises(hybridmem.OutOfMemoryError) as caught:
        networks.train(networks.Everything, data, memory_limit=TIGHT_LIMIT)
    message = str(caught.value)
    assert 'Convolution2DFunction run in parts' in message
    assert 'splitting=True' in message


@pytest.mark.parametrize(
    ('batch', 'limit', 'is_told'), [(2048, '3MiB', True), (8, '1100KiB', False)]
)
def test_parts_are_hinted_at_where_an_operation_does_not_fit(
    batch, limit, is_told, monkeypatch
):
    """They are no help where the update does not."""
    monkeypatch.setattr(Splitter, 'hint', ', or in parts')
    model = chainer.Sequential(chainer.links.Linear(256, 256, nobias=True))
    optimizer = chainer.optimizers.Adam().setup(model)
    with (
        pytest.raises(hybridmem.OutOfMemoryError) as caught,
        hybridmem.optimize(model, limit, splitting=False),
    ):
        loss = F.sum(F.tanh(model(np.ones((batch, 256), 'f'))))
        loss.backward()
        del loss
        optimizer.update()
    assert ('in the update' in str(caught.value)) != is_told
    assert (', or in parts' in str(caught.value)) == is_told


def test_any_parts_train_up_to_rounding(data, in_core):
    told = io.StringIO()
    actual, session = networks.train(
        networks.Everything,
        networks.batches(7),
        memory_limit=TIGHT_LIMIT,
        splitting=True,
        progress=told,
    )
    expected, _ = networks.train(networks.Everything, networks.batches(7))
    for name, value in expected.items():
        # Biases before a batch normalization have no gradient but noise.
        most = 1e-5 * max(np.abs(value).max(), 0.1)
        np.testing.assert_allclose(actual[name], value, 0, most, err_msg=name)
    figures = session.statistics()
    assert figures['state'] == 'guided'
    assert figures['split_inexact'] >= 8
    assert 'equal up to rounding only' in told.getvalue()
    assert figures['predicted_peak_bytes'] == figures['guided_peak_bytes']
    # The second iteration has gradients and needs more parts: it is recorded again.
    profiling = re.findall(r'iteration \d \(profiling\)', told.getvalue())
    assert len(profiling) == 3


def test_evaluation_in_parts():
    model = networks.Everything()
    (x, t), *_ = networks.batches(1)
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        expected = model(x, t).array
        with pytest.raises(hybridmem.OutOfMemoryError):
            with hybridmem.optimize(model, 2_000_000, splitting=False):
                model(x, t)
        with hybridmem.optimize(model, 2_000_000) as session:
            actual = model(x, t).array
    assert actual.tobytes() == expected.tobytes()
    assert session.iterations == 0


def test_sums_of_gradients_in_place():
    class Joined(chainer.Chain):
        def forward(self, x):
            return F.sum(F.sigmoid(x)) + F.sum(F.tanh(x))

    def train(limit, splitting):
        x = chainer.Variable(np.random.RandomState(0).rand(50, 5000).astype('f'))
        model = Joined()
        losses = []
        told = io.StringIO()
        with hybridmem.optimize(model, limit, splitting=splitting, progress=told):
            for _ in range(5):
                y = x + 0
                loss = model(y)
                x.cleargrad()
                loss.backward()
                losses.append(loss.array)
                del loss, y
        return losses, x.grad, told.getvalue()

    losses, expected, _ = train(10**8, False)
    with pytest.raises(hybridmem.OutOfMemoryError):
        train(SUM_LIMIT, False)
    again, actual, told = train(SUM_LIMIT, 'exact')
    assert again == losses
    assert actual.tobytes() == expected.tobytes()
    assert '(sum of gradients) does not fit as a whole: in place' in told


@pytest.mark.parametrize('splitting', ['inexact', 1.5, None, 0])
def test_bad_values_are_refused(splitting):
    with pytest.raises(OptionError, match='splitting is .*True, False or'):
        hybridmem.optimize(networks.Everything(), EXACT_LIMIT, splitting=splitting)


def replaced():
    """What a session replaces in Chainer."""
    forwards = {kind: vars(kind).get('forward') for kind in rules.KINDS}
    return _backprop_utils._reduce, forwards


def test_what_is_replaced_in_chainer_comes_back_after_the_last_session():
    before = replaced()
    with hybridmem.optimize(networks.Everything(), EXACT_LIMIT):
        ours = replaced()
        assert ours[0] is not before[0]
        assert all(ours[1][kind] is not before[1][kind] for kind in rules.KINDS)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # another session
            other = Splitter(HOST, 'exact', lambda line: None)
            thread.submit(other.__enter__).result()
            thread.submit(other.__exit__).result()
        assert replaced() == ours
    assert replaced() == before


@pytest.mark.filterwarnings('ignore:This process')  # it has threads, and forks
def test_a_child_may_begin_a_session_though_a_thread_was_beginning_one():
    with splitter_module._lock:  # as another thread has it
        child = os.fork()
        if not child:
            signal.alarm(20)
            with Splitter(HOST, 'exact', lambda line: None):
                pass
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_the_program_replaces_meanwhile_stays(monkeypatch):
    monkeypatch.setattr(sigmoid.Sigmoid, 'forward', sigmoid.Sigmoid.forward)
    with hybridmem.optimize(networks.Everything(), EXACT_LIMIT):
        own = sigmoid.Sigmoid.forward = lambda self, inputs: self.forward_cpu(inputs)
    assert sigmoid.Sigmoid.forward is own


@pytest.fixture
def splitter():
    device = open_device('cpu', 10**9)
    with Splitter(device, 'exact', lambda line: None) as splitter:
        yield splitter
    device.close()


def narrow(monkeypatch, most):
    """Sigmoids of more samples do not fit."""
    whole, lengths = sigmoid.Sigmoid.forward_cpu, []

    def forward_cpu(self, inputs):
        lengths.append(len(inputs[0]))
        if len(inputs[0]) > most:
            raise MemoryError
        return whole(self, inputs)

    assert not own_code.find_foreign(sigmoid.Sigmoid)  # and it is not looked at again
    monkeypatch.setattr(sigmoid.Sigmoid, 'forward_cpu', forward_cpu)
    return lengths


def apply(splitter, k, x):
    function = sigmoid.Sigmoid()
    splitter.place = k, 0
    splitter.awaited = id(function)
    return function.forward((x,))[0], function


def test_more_and_more_parts_and_then_at_once(splitter, monkeypatch):
    x = np.random.rand(16, 3)
    expected = sigmoid.Sigmoid().forward((x,))[0]
    lengths = narrow(monkeypatch, 4)
    known = {}
    splitter.begin(known)
    y, function = apply(splitter, 0, x)
    assert y.tobytes() == expected.tobytes()
    assert lengths == [16, 8, 4, 4, 4, 4]
    assert 'forward' not in vars(function)
    assert splitter.changed and len(splitter.used) == 1
    lengths.clear()
    splitter.begin(known)
    apply(splitter, 0, x)
    assert lengths == [4, 4, 4, 4]
    assert not splitter.changed and len(splitter.used) == 1
    lengths.clear()
    apply(splitter, 1, x)  # another place begins with the whole
    assert lengths[0] == 16
    lengths.clear()
    apply(splitter, 0, x[:5])  # not as many samples as it was found with
    assert lengths == [5, 2, 3]


def test_what_draws_on_a_gpu_is_not_tried():
    splitter = Splitter(
        types.SimpleNamespace(kind='cuda', memory=None), True, lambda line: None
    )
    assert dropout.Dropout not in splitter.kinds
    assert sigmoid.Sigmoid in splitter.kinds


def test_nothing_is_tried_without_splitting():
    splitter = Splitter(
        types.SimpleNamespace(kind='cpu', memory=None), False, lambda line: None
    )
    assert not splitter.kinds


def test_a_failed_dropout_has_drawn_nothing_and_has_no_mask(splitter, monkeypatch):
    x = np.random.rand(8, 3)
    np.random.seed(5)
    (expected,) = dropout.Dropout(0.5).forward((x,))
    following = np.random.rand()
    whole, masks = dropout.Dropout.forward_cpu, []

    def forward_cpu(self, inputs):
        masks.append(self.mask)
        outputs = whole(self, inputs)
        if len(inputs[0]) > 2:
            raise MemoryError
        return outputs

    monkeypatch.setattr(dropout.Dropout, 'forward_cpu', forward_cpu)
    # Else it is code of the program, which runs in no parts.
    monkeypatch.setattr(own_code, 'find_foreign', lambda kind: '')
    splitter.begin({})
    np.random.seed(5)
    function = dropout.Dropout(0.5)
    splitter.awaited = id(function)
    (y,) = function.forward((x,))
    assert y.tobytes() == expected.tobytes()
    assert np.random.rand() == following
    assert len(masks) == 6 and all(mask is None for mask in masks)


def test_too_few_samples_end_in_the_first_error(splitter, monkeypatch):
    narrow(monkeypatch, 1)
    splitter.begin({})
    with pytest.raises(MemoryError):
        apply(splitter, 0, np.random.rand(8, 3))


def test_an_interrupted_reclaim_is_not_tried_again(splitter, monkeypatch):
    lengths = narrow(monkeypatch, 4)
    splitter.begin({})
    error = SwapStoreError('the swap file is full')
    monkeypatch.setattr(type(splitter._device.memory), 'reclaim_error', error)
    with pytest.raises(MemoryError):
        apply(splitter, 0, np.random.rand(8, 3))
    assert lengths == [8]
