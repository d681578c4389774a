"""Gradients and persistent arrays that an iteration begins with have their names."""

from __future__ import annotations

from support import networks  # imports chainer_hybridmem before chainer

from chainer_hybridmem.planning.records.profile import Category

ITERATIONS = 5


def test_what_an_iteration_begins_with_has_a_name(data):
    _, session = networks.train(
        networks.Everything, data, memory_limit='1GB', planner='swap-all'
    )
    before = [s for s in session.profile.storages if s.allocated_at < 0]
    gradients = [s.label for s in before if s.category is Category.GRADIENT]
    parameters = {s.label for s in before if s.category is Category.PARAMETER}
    assert gradients
    assert all(label.endswith(':grad') for label in gradients)
    assert {label.removesuffix(':grad') for label in gradients} <= parameters
    assert {s.category for s in before if s.label == 'input'} <= {Category.INPUT}
