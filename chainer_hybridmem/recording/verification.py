"""Whether running a forward again gives the same bits, and what it costs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from chainer_hybridmem import graph
from chainer_hybridmem.devices.protocol import Array, Device, Mark


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one trial replay has shown.

    Attributes:
        exact (bool): Same bits, same layout, no random numbers drawn.
        attributes (tuple of str): Attributes it had to start with.
        start (Mark): Before the replay.
        end (Mark): After the replay.
        peak_bytes (int): Highest load above the first moment.
    """

    exact: bool
    attributes: tuple[str, ...]
    start: Mark
    end: Mark
    peak_bytes: int


def verify(
    before: Any,
    function: Any,
    inputs: tuple[Array, ...],
    made: dict[str, Array],
    device: Device,
) -> Verdict | None:
    """Replays a function once and compares everything it made.

    With nothing but its own configuration first, then with the attributes that
    its forward has set (a dropout mask, say).

    Args:
        before: The function as it was before its forward.
        function: The function in the graph.
        inputs: The arrays its forward has read.
        made: Attribute arrays that its forward has made.
        device: Device of the arrays.

    Returns:
        Verdict, or None if nothing could be said: an output is not reachable
        any more, or there is no memory for the trial.
    """
    outputs = graph.output_arrays(function)
    if not outputs or any(output is None for output in outputs):
        return None
    trials: list[tuple[str, ...]] = [()]
    if made:
        # A random function must not draw: with its attributes first.
        trials = [tuple(made)] if _is_random(function) else [(), tuple(made)]
    verdict = None
    for attributes in trials:
        try:
            verdict = _trial(
                before, function, inputs, outputs, made, attributes, device
            )
        except MemoryError:
            return None
        if verdict.exact:
            return verdict
    return verdict


def _is_random(function: Any) -> bool:
    name = graph.function_name(function).lower()
    return any(word in name for word in ('dropout', 'random', 'zoneout', 'gaussian'))


def _trial(
    before: Any,
    function: Any,
    inputs: tuple[Array, ...],
    outputs: list[Array | None],
    made: dict[str, Array],
    attributes: tuple[str, ...],
    device: Device,
) -> Verdict:
    device.reset_window()
    load = device.used_bytes
    with random_guard(device) as drawn:
        start = device.mark()
        try:
            again, owner = graph.replay(before, function, attributes, inputs, device)
        except MemoryError:
            raise
        except Exception:  # a function that cannot run twice is not recomputable
            return Verdict(False, attributes, start, device.mark(), 0)
        end = device.mark()
    peak_bytes = device.window_peak_bytes - load
    exact = not drawn and len(again) == len(outputs)
    exact = exact and all(
        _same(device, left, right) for left, right in zip(outputs, again, strict=True)
    )
    for name, array in made.items():
        if not exact or name in attributes:
            continue
        exact = _same(device, array, graph.read_attribute(owner, name))
    return Verdict(exact, attributes, start, end, peak_bytes)


def _same(device: Device, left: Any, right: Any) -> bool:
    return (
        device.owns(left)
        and device.owns(right)
        and left.strides == right.strides
        and device.same_bits(left, right)
    )


@contextlib.contextmanager
def random_guard(device: Device) -> Iterator[list[str]]:
    """Leaves the random number generators as they were.

    Yields:
        list of str: Filled, on leaving, with the generators that were used.
    """
    drawn: list[str] = []
    state: Any = np.random.get_state()
    position = (state[2], state[3], int(state[1][0]))
    cupy_state = _set_aside_cupy_generator() if device.kind == 'cuda' else None
    try:
        yield drawn
    finally:
        now: Any = np.random.get_state()
        if (now[2], now[3], int(now[1][0])) != position:
            drawn.append('numpy')
            np.random.set_state(state)
        if cupy_state is not None:
            import cupy

            cupy.random.set_random_state(cupy_state)


def _set_aside_cupy_generator() -> Any:
    import cupy

    state = cupy.random.get_random_state()
    cupy.random.set_random_state(cupy.random.RandomState(0))
    return state
