"""A model's state put back after training iterations that were only a trial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from chainer_hybridmem.chainer_access.owners import Owner, owners_of, persistents_of


@contextlib.contextmanager
def kept(model: chainer.Link) -> Iterator[None]:
    """Puts parameters, gradients, optimizer states and statistics back at the end.

    NumPy's generator, too. Parameters without a shape yet get it meanwhile, and keep
    it. The copies are in the host's memory.

    Args:
        model: Between two iterations.
    """
    arrays = [(o, _copy(o.get())) for o in (*owners_of(model), *persistents_of(model))]
    parameters = list(model.params())
    gradients = [_copy(parameter._grad) for parameter in parameters]
    rules = [p.update_rule for p in parameters if p.update_rule is not None]
    states = [
        (rule.t, None if rule.state is None else dict(rule.state)) for rule in rules
    ]
    values = _values(model)
    random = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(random)
        for link, name, value in values:
            setattr(link, name, value)
        for rule, (t, state) in zip(rules, states, strict=True):
            _put_back_state(rule, t, state)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                parameter.cleargrad()
            else:
                parameter.grad = _like(parameter.array, gradient)
        for owner, array in arrays:
            _fill(owner, array)


def _copy(array: Any) -> Any:
    return None if array is None else cuda.to_cpu(array).copy()


def _like(array: Any, copied: np.ndarray) -> Any:
    return chainer.backend.get_array_module(array).asarray(copied)


def _fill(owner: Owner, copied: np.ndarray) -> None:
    """A session may have moved the array: it is filled where it is now."""
    array: Any = owner.get()
    array[...] = _like(array, copied)


def _values(model: chainer.Link) -> list[tuple[Any, str, Any]]:
    """Persistent values that are no arrays, such as a number of batches."""
    kinds = chainer.get_array_types()
    return [
        (link, name, link.__dict__.get(name))
        for link in model.links()
        for name in link._persistent
        if not isinstance(link.__dict__.get(name), kinds)
    ]


def _put_back_state(rule: Any, t: int, state: dict[str, Any] | None) -> None:
    """Entries that are arrays have moved perhaps; they are filled by their owners."""
    rule.t = t
    if state is None:
        vars(rule)['_state'] = None
        return
    kinds = chainer.get_array_types()
    rule.state.update({k: v for k, v in state.items() if not isinstance(v, kinds)})
