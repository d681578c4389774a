"""What the first backward function reads: kept, and dropped right after it."""

from __future__ import annotations

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.simulation import make_problem

ITERATIONS = 8
CLASSES = 4000


class Words(chainer.Chain):
    """Scores of many classes, which are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(32, 256)
            self.last = L.Linear(256, CLASSES)


def train(holds=False, limit=None):
    np.random.seed(0)
    model = Words()
    optimizer = chainer.optimizers.SGD(0.01).setup(model)
    data, losses = np.random.RandomState(1), []

    def iterate() -> None:
        x = data.rand(64, 32).astype(np.float32)
        t = data.randint(0, CLASSES, 64).astype(np.int32)
        scores = model.last(F.tanh(model.first(x)))
        loss = F.softmax_cross_entropy(scores, t)
        if not holds:
            del scores
        model.cleargrads()
        loss.backward()
        losses.append(float(loss.array))
        optimizer.update()
        if holds:
            losses.append(float(scores.array.sum()))

    if limit is None:
        for _ in range(ITERATIONS):
            iterate()
        return networks.outcome(model, losses), None
    with hybridmem.optimize(model, limit, 'swap-all') as session:
        for _ in range(ITERATIONS):
            iterate()
    return networks.outcome(model, losses), session


@pytest.mark.parametrize('holds', [False, True])
def test_scores_die_after_the_loss_unless_the_program_holds_them(holds):
    expected, _ = train(holds)
    actual, session = train(holds, '64MiB')
    networks.assert_same(expected, actual)
    profile, plan = session.profile, session.plan
    (scores,) = [s for s in profile.feature_maps() if s.label == '/last/LinearFunction']
    after = max(scores.backward_uses) + 1
    problem = make_problem(profile)
    planned = {entry.storage: entry for entry in plan.maps}
    if holds:
        assert scores.releasable_from > after
        assert scores.id not in planned
        return
    assert scores.releasable_from == after
    assert planned[scores.id].action is Action.KEEP
    # They are gone where the gradients of the weights are largest.
    loads = check_plan(profile, plan)
    whole = problem.in_core_peak_bytes
    assert max(loads[after:]) <= whole - scores.nbytes
