"""Who in the package looks at a model brings nothing back that is away."""

from __future__ import annotations

import chainer_hybridmem  # noqa: F401  (before chainer, which it makes importable)

# isort: split
from collections.abc import Callable
from typing import Any

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainer_hybridmem.training.chainer_access import owners

READERS: dict[str, Callable[[Any], Any]] = {
    'permanent arrays': owners.permanent_arrays,
    'model arrays': owners.model_arrays,
    'owners': lambda model: list(owners.owners_of(model)),
    'named arrays': lambda model: list(owners.named_arrays(model)),
    'arrays by link': lambda model: list(owners.arrays_by_link(model)),
    'away bytes': owners.away_bytes,
}


@pytest.fixture
def model() -> chainer.Link:
    """A trained layer with states."""
    layer = L.Linear(3, 4)
    optimizer = chainer.optimizers.Adam().setup(layer)
    optimizer.update(
        lambda x: chainer.functions.sum(layer(x)), np.ones((2, 3), np.float32)
    )
    return layer


@pytest.mark.parametrize('name', READERS)
def test_what_is_away_stays_there(name: str, model: chainer.Link) -> None:
    expected = {owner.label: owner.nbytes for owner in owners.owners_of(model)}
    assert len(expected) == 6  # W and b, and two states each
    away = [o for o in owners.owners_of(model) if o.label in ('/W', '/b:v')]
    arrays = [owner.get() for owner in away]
    asked: list[str] = []
    for owner in away:
        owner.watch(lambda label=owner.label: asked.append(label), owner.nbytes)
        owner.put(None)
    READERS[name](model)
    assert not asked
    assert owners.away_bytes(model) == expected['/W'] + expected['/b:v']
    owners.bring_home(model)
    assert sorted(asked) == ['/W', '/b:v']
    for owner, array in zip(away, arrays, strict=True):
        owner.put(array)
        owner.unwatch()
    assert owners.away_bytes(model) == 0
    assert {o.label: o.nbytes for o in owners.owners_of(model)} == expected
