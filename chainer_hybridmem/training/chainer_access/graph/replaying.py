"""Running a forward again, without the graph noticing."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import chainer

from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access.graph.by_owner import ByOwner
from chainer_hybridmem.training.chainer_access.graph.doors import copy_as_it_is
from chainer_hybridmem.training.chainer_access.graph.function_nodes import target
from chainer_hybridmem.training.chainer_access.graph.places import (
    attribute_arrays,
    away_values,
    put_attribute,
    read_attribute,
)
from chainer_hybridmem.training.devices.protocol import Array, Device

Forward = Callable[[Any, tuple[Array, ...]], tuple[Array, ...]]

# How functions have run that have not run as a whole.
_forwards: ByOwner[Forward] = ByOwner()


def set_forward(function: Any, forward: Forward) -> None:
    """Says how a function has run if not as a whole: its replays do the same.

    Args:
        function: In the graph.
        forward: Takes a copy of it, and the input arrays.
    """
    _forwards[function] = forward


@dataclasses.dataclass(frozen=True, slots=True)
class Pristine:
    """A function as it was before its forward, to be run again.

    Attributes:
        function (FunctionNode): A copy.
        settings (dict): Chainer's configuration at that moment.
    """

    function: Any
    settings: dict[str, Any]

    def copied(self) -> Any:
        """Another copy, which may run."""
        return _copy(self.function)


def pristine(function: Any) -> Pristine:
    """A function as it is before its forward runs."""
    return Pristine(_copy(function), remember_settings())


def pristine_again(function: Any, is_made: Callable[[Any], bool]) -> Pristine:
    """A function that has run, without what its forward has left in it.

    Args:
        function: In the graph.
        is_made: Whether an attribute is an array that forward has made.
    """
    before = pristine(function)
    clone, owner = before.function, target(before.function)
    clone.inputs = clone.outputs = clone._retained_output_data = None
    for key, _ in attribute_arrays(clone, is_made):
        put_attribute(owner, key, None)
    return before


def _copy(function: Any) -> Any:
    result = copy_as_it_is(function)
    wrapped = vars(function).get('_function')
    if wrapped is not None:
        result._function = copy_as_it_is(wrapped)
    attributes = vars(target(result))
    for name, value in away_values(target(function)).items():
        attributes.setdefault(name, value)
    for name, value in attributes.items():
        if type(value) is list:  # a replay must not write into the function's list
            attributes[name] = list(value)
    return result


def replay(
    before: Pristine, live: Any, attributes: tuple[str, ...],
    inputs: tuple[Array, ...], device: Device,
) -> tuple[tuple[Array, ...], Any]:  # fmt: skip
    """Runs a forward again without touching the graph, hooks or statistics.

    Arrays that the function had before its forward (running statistics) are
    copied, so that updating them in place has no effect. It runs in parts if
    the first one did.

    Args:
        before: What :func:`pristine` returned.
        live: The function in the graph.
        attributes: Names taken over from ``live``, such as a dropout mask.
        inputs: Input arrays.
        device: Device of the arrays.

    Returns:
        Output arrays and the object with the attributes.
    """
    clone = before.copied()
    settings = {**before.settings, 'in_recomputing': True, 'enable_backprop': False}
    owner = target(clone)
    if owner is not clone:
        owner._node = weakref.ref(clone)
    for key, array in attribute_arrays(clone, device.arrays.owns):
        put_attribute(owner, key, array.copy())
    for key in attributes:
        name, _, index = key.partition('.')
        if not index or name in vars(owner):  # else forward makes the list
            put_attribute(owner, key, read_attribute(target(live), key))
    with (
        use_settings(settings),
        chainer.using_device(chainer.backend.get_device_from_array(*inputs)),
    ):
        forward = _forwards.get(live)
        outputs = clone.forward(inputs) if forward is None else forward(clone, inputs)
    return outputs, owner


def product(slot: Slot, function: Any, outputs: Any, made: Any) -> Array:
    """What a replay has made for one of a function's own slots.

    Args:
        slot: An output, a retained output or an attribute.
        function: The function in the graph.
        outputs: Output arrays of the replay.
        made: The object with its attributes.
    """
    if slot.kind is SlotKind.OUTPUT:
        return outputs[int(slot.key)]
    if slot.kind is SlotKind.RETAINED:
        return outputs[function._output_indexes_to_retain[int(slot.key)]]
    return read_attribute(made, str(slot.key))


_last: dict[str, Any] = {}  # most functions share the settings of the one before


def settings() -> tuple[dict[str, Any], dict[str, Any]]:
    """The live dictionaries of Chainer's configuration: this thread's, all threads'.

    Looking a name up in both takes a tenth of the time that ``chainer.config`` takes.
    """
    return vars(chainer.config._local), vars(chainer.config._global)


def remember_settings() -> dict[str, Any]:
    """All settings of Chainer as they are now for this thread."""
    global _last
    local, common = settings()
    now = {**common, **local}
    if now != _last:
        _last = now
    return _last


@contextlib.contextmanager
def use_settings(values: dict[str, Any]) -> Iterator[None]:
    """Runs this thread under other settings of Chainer, and restores its own."""
    local, _ = settings()
    before = dict(local)
    local.update(values)
    try:
        yield
    finally:
        local.clear()
        local.update(before)
