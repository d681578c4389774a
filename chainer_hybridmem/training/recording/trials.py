"""Trials: whether making forward's outputs again gives the same bits, and its cost.

Note: [steady times]
    A replay in backward finds its inputs far from the processor, right after
    forward they are still in its cache; and a first run may compile a loop. So
    what takes long is run once, and what is short some more times, with other
    memory walked through before each; the median counts.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import mmap
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from chainer_hybridmem import timing
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.devices.protocol import Array, Device, Mark
from chainer_hybridmem.training.recompute import drawing, fused_replays

SHORT_SECONDS = 0.01
TIMED_RUNS = 3  # of what is short, on the host
WALKED_BYTES = 2**25  # of a processor's last cache
WALKED_TIMES = 8  # what a replay touches


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """What one trial has shown.

    Attributes:
        exact (bool): Same bits, same layout, no random numbers drawn.
        attributes (tuple of str): Attributes it had to start with.
        spans (tuple of pair of Mark): Before and after each timed replay.
        peak_bytes (int): Highest load above the first moment.
        made (tuple of str): Attributes that a fused replay makes again.
        formula (int): How that replay rounds.
    """

    exact: bool
    attributes: tuple[str, ...]
    spans: tuple[tuple[Mark, Mark], ...]
    peak_bytes: int
    made: tuple[str, ...] = ()
    formula: int = 0

    def seconds(self, device: Device) -> float:
        """Median time of one replay; see [steady times]."""
        if not self.spans:
            return 0.0
        return statistics.median(device.clock.elapsed(*span) for span in self.spans)


class Walker:
    """Memory to walk through, so that nothing else is in the cache.

    Args:
        device (Device): Where replays run; on CUDA there is nothing to do.
        timed (bool): Whether it matters how long replays take.

    Attributes:
        runs (int): How often a replay is timed; a GPU's clock needs no second one.
    """

    def __init__(self, device: Device, timed: bool) -> None:
        nbytes = 1
        self.runs = int(timed)
        if timed and device.kind == 'host':
            nbytes += min(WALKED_BYTES, device.memory.limit_bytes // 8)
            self.runs = TIMED_RUNS
        # Not the program's memory, and all of it goes back to the system.
        self._memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)

    def walk(self, touched_bytes: int) -> None:
        """Makes a replay that touches so many bytes find none in the cache."""
        part = self._memory[: WALKED_TIMES * touched_bytes]
        np.add(part, 1, out=part)


def try_replay(
    before: Any,
    function: Any,
    inputs: tuple[Array, ...],
    made: dict[str, Array],
    device: Device,
    walker: Walker,
) -> TrialResult | None:
    """Replays a function and compares everything it made.

    With nothing but its own configuration first, then with the attributes that
    its forward has set (a dropout mask, say).

    Args:
        before: The function as it was before its forward.
        function: The function in the graph.
        inputs: The arrays its forward has read.
        made: Attribute arrays that its forward has made.
        device: Device of the arrays.
        walker: See [steady times].

    Returns:
        TrialResult, or None if nothing could be said: an output is not reachable
        any more, or there is no memory for the trial.
    """
    if graph.communicates(function):
        return TrialResult(False, (), (), 0)
    outputs = graph.output_arrays(function)
    if not outputs or any(output is None for output in outputs):
        return None
    trials: list[tuple[str, ...]] = [()]
    if made:
        # A random function must not draw: with its attributes first.
        trials = [tuple(made)] if _is_random(function) else [(), tuple(made)]
    touched_bytes = sum(
        array.nbytes for array in (*inputs, *outputs) if array is not None
    )
    result = None
    for attributes in trials:
        spans: list[tuple[Mark, Mark]] = []
        for _ in range(max(walker.runs, 1)):
            walker.walk(touched_bytes)
            begin = timing.now()
            try:
                with device.memory.attempt():
                    result = run_trial(
                        before, function, inputs, outputs, made, attributes, device
                    )
            except MemoryError:
                return None
            spans += result.spans
            if not result.exact or timing.now() - begin > SHORT_SECONDS:
                break
        if result is not None and result.exact:
            return dataclasses.replace(result, spans=tuple(spans))
    return result


def try_fused(
    functions: Sequence[Any], fetch: fused_replays.Fetch, device: Device, walker: Walker
) -> TrialResult | None:
    """Runs a fused replay and compares what it makes with what forward has made.

    Args:
        functions: What it covers.
        fetch: Gives the arrays that forward has read.
        device: Device of the arrays.
        walker: See [steady times].

    Returns:
        TrialResult, of the formula that gives the same bits, if there is one. None if
        there is no loop for it, if an output is not reachable any more, or if there is
        no memory for the trial.
    """
    result = None
    try:
        with device.memory.attempt():
            formulas = fused_replays.list_formulas(functions, fetch)
    except (fused_replays.NoFusedReplayError, MemoryError):
        return None
    for formula in formulas:
        result = _try_formula(functions, fetch, formula, device, walker)
        if result is None or result.exact:
            break
    return result


def _try_formula(
    functions: Sequence[Any],
    fetch: fused_replays.Fetch,
    formula: int,
    device: Device,
    walker: Walker,
) -> TrialResult | None:
    last = functions[-1]
    outputs = graph.output_arrays(last)
    if not outputs or any(output is None for output in outputs):
        return None
    spans: list[tuple[Mark, Mark]] = []
    names: tuple[str, ...] = ()
    exact, peak_bytes = True, 0
    with random_guard(device) as drawn:
        for _ in range(1 + walker.runs):  # the first one may compile
            walker.walk(peak_bytes)
            device.memory.reset_window()
            load, start = device.memory.used_bytes, device.clock.mark()
            try:
                with device.memory.attempt():
                    again, made = fused_replays.run(functions, fetch, formula)
                spans.append((start, device.clock.mark()))
                peak_bytes = max(peak_bytes, device.memory.window_peak_bytes - load)
                exact = exact and all(
                    _same(device, *pair) for pair in zip(outputs, again, strict=True)
                )
                exact = exact and all(
                    _same(device, getattr(last, name), array)
                    for name, array in vars(made).items()
                )
            except (fused_replays.NoFusedReplayError, MemoryError):
                return None
            except Exception:  # as for a whole forward
                return TrialResult(False, (), (), 0)
            names = tuple(vars(made))
            del again, made
            if not exact:
                break
    return TrialResult(
        exact and not drawn, (), tuple(spans[1:]), peak_bytes, names, formula
    )


def _is_random(function: Any) -> bool:
    name = graph.function_name(function).lower()
    return any(word in name for word in ('dropout', 'random', 'zoneout', 'gaussian'))


def run_trial(
    before: Any,
    function: Any,
    inputs: tuple[Array, ...],
    outputs: list[Array | None],
    made: dict[str, Array],
    attributes: tuple[str, ...],
    device: Device,
) -> TrialResult:
    """Runs a forward again once, and compares everything it makes.

    Args:
        before: The function as it was before its forward.
        function: The function; it has run.
        inputs: The arrays that it has read.
        outputs: The arrays that it has returned.
        made: Attribute arrays that its forward has made.
        attributes: Names of those from which the replay starts.
        device: Device of the arrays.

    Raises:
        MemoryError: If there is no memory for it.
    """
    device.memory.reset_window()
    load = device.memory.used_bytes
    with random_guard(device) as drawn:
        start = device.clock.mark()
        try:
            again, owner = graph.replay(before, function, attributes, inputs, device)
        except MemoryError:
            raise
        except Exception:  # a function that cannot run twice is not recomputable
            return TrialResult(False, attributes, (), 0)
        end = device.clock.mark()
    peak_bytes = device.memory.window_peak_bytes - load
    exact = not drawn and len(again) == len(outputs)
    exact = exact and all(
        _same(device, left, right) for left, right in zip(outputs, again, strict=True)
    )
    for name, array in made.items():
        if not exact or name in attributes:
            continue
        exact = _same(device, array, graph.read_attribute(owner, name))
    return TrialResult(exact, attributes, ((start, end),), peak_bytes)


def _same(device: Device, left: Any, right: Any) -> bool:
    return (
        device.arrays.owns(left)
        and device.arrays.owns(right)
        and left.strides == right.strides
        and device.arrays.same_bits(left, right)
    )


@contextlib.contextmanager
def random_guard(device: Device) -> Iterator[list[str]]:
    """Leaves the random number generators as they were.

    Yields:
        list of str: Filled, on leaving, with the generators that were used.
    """
    drawn: list[str] = []
    # In a context of its own nothing is counted: there is room for it at any moment.
    state: Any = contextvars.Context().run(np.random.get_state)
    position = (state[2], state[3], int(state[1][0]))
    on_gpu = device.kind == 'cuda'
    aside = drawing.set_aside() if on_gpu else contextlib.nullcontext(lambda: False)
    with aside as used:
        try:
            yield drawn
        finally:
            now: Any = contextvars.Context().run(np.random.get_state)
            if (now[2], now[3], int(now[1][0])) != position:
                drawn.append('numpy')
                contextvars.Context().run(np.random.set_state, state)
            if used():
                drawn.append('cupy')
