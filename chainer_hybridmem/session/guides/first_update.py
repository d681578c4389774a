"""What the first update of an optimizer will allocate, found out on small arrays.

Chainer's update rules are copied, and the copies get a small parameter. States grow
with the parameter, and so do temporary arrays on the host; a GPU updates in place.
Rules of the program are not tried: they may have effects, such as random numbers.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import math
import tracemalloc
from typing import Any

import chainer
import numpy as np

from chainer_hybridmem.chainer_access import owners

_LARGE = 2**17  # elements, from which on NumPy uses temporary arrays again
_SHARE = 4  # temporary bytes are told in quarters of the parameter


@dataclasses.dataclass(frozen=True)
class Coming:
    """What is still to be allocated.

    Attributes:
        state_bytes (int): Of optimizer states, to stay.
        temporary_bytes (int): At most at once, while one parameter is updated.
    """

    state_bytes: int
    temporary_bytes: int


def coming(model: chainer.Link, on_host: bool) -> Coming:
    """What the update of a model has not allocated yet.

    Args:
        model: Its parameters have update rules.
        on_host: Whether updates need temporary arrays.
    """
    state_bytes = temporary_bytes = 0
    seen: set[int] = set()
    for _, parameter in owners.parameters_of(model):
        rule = parameter.update_rule
        if (
            not parameter.is_initialized
            or rule is None
            or not rule.enabled
            or id(parameter) in seen
        ):
            continue
        if type(rule).__module__.partition('.')[0] != 'chainer':
            continue
        seen.add(id(parameter))
        array = parameter.array
        states, temporaries = _needs(rule, array.dtype, array.size)
        there = sum(
            value.nbytes
            for value in (rule.state or {}).values()
            if isinstance(value, chainer.get_array_types())
        )
        state_bytes += max(0, states - there)
        if on_host:
            temporary_bytes = max(temporary_bytes, temporaries)
    return Coming(state_bytes, temporary_bytes)


def _needs(rule: Any, dtype: np.dtype[Any], size: int) -> tuple[int, int]:
    """Bytes of states and temporaries for one parameter; zero if that is unknown."""
    trial = owners.fresh_rule(rule)
    n = min(size, _LARGE)
    run = functools.partial(_try, trial, np.ones(n, dtype))
    try:
        states, temporaries = contextvars.Context().run(run)
    except Exception:  # a rule may want more of its parameter than this one has
        return 0, 0
    return states * size // n, math.ceil(temporaries * _SHARE / n) * size // _SHARE


def _try(rule: Any, array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Initialises and updates with memory that no session counts."""
    parameter = chainer.Parameter(array)
    parameter.grad = np.ones_like(array)
    rule.init_state(parameter)
    states = sum(
        value.nbytes for value in rule.state.values() if isinstance(value, np.ndarray)
    )
    traced = tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        rule.update_core(parameter)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not traced:
            tracemalloc.stop()
    small = array.nbytes // 64  # Python's own objects
    return states, max(0, peak - before - small)
