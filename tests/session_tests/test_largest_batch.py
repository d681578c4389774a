"""``largest_batch()`` on live models."""

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer

LIMIT = '6MiB'


class Trained:
    """A network that trains with as many examples as it is told."""

    def __init__(self, device=None):
        np.random.seed(0)
        self.model = networks.Everything()
        if device:
            self.model.to_device(device)
        self.optimizer = chainer.optimizers.Adam().setup(self.model)
        self.sizes = []

    def step(self, number):
        self.sizes.append(number)
        x = np.random.rand(number, 3, 24, 24).astype(np.float32)
        t = np.random.randint(0, 10, number).astype(np.int32)
        x, t = self.model.device.send((x, t))
        self.optimizer.update(self.model, x, t)


def trains(batchsize, planner, device=None):
    trained = Trained(device)
    try:
        with hybridmem.optimize(trained.model, LIMIT, planner) as session:
            for _ in range(8):
                trained.step(batchsize)
    except hybridmem.HybridMemoryError:
        return False
    return session.state == 'guided'


def test_the_answer_trains_and_one_more_does_not():
    trained = Trained()
    found = hybridmem.largest_batch(trained.step, LIMIT, trained.model)
    assert found.batchsize > found.in_core.batchsize > 8
    assert max(trained.sizes) <= found.in_core.batchsize  # nothing is tried out
    assert trains(found.batchsize, 'hybrid')
    assert not trains(found.batchsize + 1, 'hybrid')
    assert trains(found.in_core.batchsize, 'in-core')
    assert not trains(found.in_core.batchsize + 1, 'in-core')


def state_of(trained):
    arrays = [p.array for _, p in sorted(trained.model.namedparams())]
    for _, parameter in sorted(trained.model.namedparams()):
        arrays += [s for s in parameter.update_rule.state.values()]
    for link in trained.model.links():
        arrays += [np.asarray(link.__dict__[n]) for n in sorted(link._persistent)]
    return [array.tobytes() for array in arrays]


def test_the_model_is_as_it_was():
    trained = Trained()
    for _ in range(2):
        trained.step(4)
    before, numbers = state_of(trained), np.random.get_state()[1].tobytes()
    hybridmem.largest_batch(trained.step, LIMIT, trained.model, 'swap-all')
    assert state_of(trained) == before
    assert np.random.get_state()[1].tobytes() == numbers


def test_wrong_questions_are_refused():
    trained = Trained()

    def ask(limit=LIMIT, planner='hybrid', **options):
        return hybridmem.largest_batch(
            trained.step, limit, trained.model, planner, **options
        )

    with pytest.raises(hybridmem.OptionError, match='ascending'):
        ask(batchsizes=(4, 4))
    with pytest.raises(hybridmem.OptionError, match='at least 2'):
        ask(most=1)
    with pytest.raises(hybridmem.OptionError, match='min_speed is 80'):
        ask(min_speed=80)
    with pytest.raises(hybridmem.OptionError, match='no option'):
        ask(min_spede=0.8)
    with pytest.raises(hybridmem.UnknownNameError):
        ask(planner='hybird')
    with pytest.raises(hybridmem.UnknownNameError):
        ask(gpu='v1000')
    with pytest.raises(hybridmem.SessionError, match='before optimize'):
        with hybridmem.optimize(trained.model, '1GiB'):
            ask()
    with pytest.raises(hybridmem.OptionError, match="min_speed is '80%'"):
        ask(min_speed='80%')
    with pytest.raises(hybridmem.OptionError, match='batchsizes is 4'):
        ask(batchsizes=4)
    with pytest.raises(hybridmem.OptionError, match='step is None'):
        hybridmem.largest_batch(None, LIMIT, trained.model)
    with pytest.raises(hybridmem.SessionError, match='could be recorded'):
        hybridmem.largest_batch(lambda number: None, LIMIT, trained.model)
    assert not trained.sizes
    with pytest.raises(hybridmem.OptionError, match='need the same memory'):
        hybridmem.largest_batch(lambda number: trained.step(4), LIMIT, trained.model)


def test_a_gpu_that_is_not_there():
    trained = Trained()
    found = hybridmem.largest_batch(
        trained.step, '16GiB', trained.model, 'swap-all', gpu='v100-16gb-pcie3'
    )
    assert found.batchsize > 10_000
    assert len(repr(found)) < 1000
    assert found.refusal.needed_bytes > 2**34
    # Without a limit it is all of its memory, as for the command.
    asked = {'model': trained.model, 'planner': 'swap-all', 'gpu': 'v100-16gb-pcie3'}
    whole = hybridmem.largest_batch(trained.step, **asked)
    assert whole.limit_bytes == 16 * 10**9 and 0 < whole.batchsize < found.batchsize
    with pytest.raises(hybridmem.OptionError, match='model is None'):
        hybridmem.largest_batch(trained.step)


def test_without_a_limit_it_is_that_of_the_machine(monkeypatch):
    ram = 'chainer_hybridmem.forecasting.largest_batch.total_ram'
    monkeypatch.setattr(ram, lambda: 6 * 2**20)
    trained = Trained()
    found = hybridmem.largest_batch(trained.step, model=trained.model, most=8)
    assert found.limit_bytes == 6 * 2**20


@pytest.mark.gpu
def test_on_a_gpu():
    trained = Trained('@cupy:0')
    found = hybridmem.largest_batch(trained.step, LIMIT, trained.model)
    assert trains(found.batchsize, 'hybrid', '@cupy:0')
    # cuDNN may take larger workspaces for larger batches: room for one is left.
    more = found.batchsize // 8 if chainer.backends.cuda.cudnn_enabled else 1
    assert not trains(found.batchsize + more, 'hybrid', '@cupy:0')
