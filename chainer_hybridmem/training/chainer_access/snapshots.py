"""Everything that an iteration may change: compared by its bits, or put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from chainer_hybridmem.training.chainer_access.owners import (
    Owner,
    owners_of,
    persistents_of,
)
from chainer_hybridmem.training.devices.bits import fingerprint

KINDS = (
    'loss',
    'gradients',
    'parameters',
    'optimizer states',
    'persistent arrays',
    'random state',
)
Print = tuple[str, tuple[int, ...], int]  # type, shape, bits
Snapshot = dict[str, dict[str, Print]]  # by kind, by name


def snapshot(model: chainer.Link, loss: Any) -> Snapshot:
    """Fingerprints of a model, its loss, its optimizer and NumPy's random state.

    Args:
        model: Between an update and the next forward.
        loss: Array of the loss.
    """
    result: Snapshot = {kind: {} for kind in KINDS}
    result['loss']['loss'] = _print(loss)
    for name, parameter in sorted(model.namedparams(include_uninit=False)):
        result['parameters'][name] = _print(parameter.array)
        if parameter.grad is not None:
            result['gradients'][name] = _print(parameter.grad)
        rule = parameter.update_rule
        for key, value in (rule.state or {}).items() if rule is not None else ():
            result['optimizer states'][f'{name}:{key}'] = _print(value)
    for path, link in sorted(model.namedlinks()):
        for name in sorted(link._persistent):
            result['persistent arrays'][f'{path}/{name}'] = _print(getattr(link, name))
    state: Any = np.random.get_state()
    result['random state'] = {
        str(number): _print(part) for number, part in enumerate(state[1:])
    }
    return result


def first_difference(left: Snapshot, right: Snapshot) -> tuple[str, str] | None:
    """Kind and name of the first thing that differs; None if nothing does."""
    for kind in KINDS:
        for name in sorted(left[kind].keys() | right[kind].keys()):
            if left[kind].get(name) != right[kind].get(name):
                return kind, name
    return None


def _print(value: Any) -> Print:
    if not isinstance(value, chainer.get_array_types()):
        value = np.asarray(value)
    return value.dtype.str, value.shape, fingerprint(value)


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
