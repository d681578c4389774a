"""Everything that an iteration may change, as fingerprints to be compared."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from chainer_hybridmem.devices.bits import fingerprint

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
