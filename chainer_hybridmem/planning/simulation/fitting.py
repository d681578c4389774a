"""Operations that alone exceed a limit, in as few parts as fit."""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.planning.records.plan import Part
from chainer_hybridmem.planning.records.profile import Profile, Split
from chainer_hybridmem.planning.records.splits import in_parts, is_about, part_of
from chainer_hybridmem.planning.simulation.in_core import fixed_load
from chainer_hybridmem.planning.simulation.problem import Problem, with_parts
from chainer_hybridmem.planning.simulation.work import RECOMPUTE, SWAP

_Function = tuple[int, int]  # operation, which of its functions


def fitted(problem: Problem, limit_bytes: int) -> Problem:
    """The problem with functions in parts where nothing else helps.

    As in a session: only functions of operations that exceed the limit with all that
    can leave gone, each in the first of its ways that fits.

    Args:
        problem: Its ``splitting`` says which ways there are.
        limit_bytes: Memory limit. Below what any parts can do, they are as many as
            lower the load.
    """
    ways = _ways(problem)
    if not ways:
        return problem
    base = _unavoidable(problem)
    planned = {s.id for s in problem.maps}
    chosen: dict[_Function, Part] = {}
    profile = problem.profile
    while True:
        _, peaks, moments = fixed_load(profile, planned)
        over = np.nonzero(base + peaks > limit_bytes)[0]
        more = {}
        for k in over:
            function = _running(profile, ways, int(k), int(moments[k]))
            if function is not None:
                more[function] = part_of(ways[function].pop(0))
        if not more:
            break
        chosen.update(more)
        profile = in_parts(profile, tuple(more.values()))
    if not chosen:
        return problem
    return with_parts(problem, tuple(chosen.values()))


def _ways(problem: Problem) -> dict[_Function, list[Split]]:
    """What is left to try, each way with less memory than the one before."""
    tried = {(part.operation, part.function): part for part in problem.parts}
    result: dict[_Function, list[Split]] = {}
    least: dict[_Function, int] = {}
    for split in problem.profile.splits:
        function = split.operation, split.function
        if function in tried:
            if part_of(split) == tried[function]:
                del tried[function]
                least[function] = split.peak_bytes
            continue
        if not (problem.splitting is True or (problem.splitting and split.exact)):
            continue
        if function not in least or split.peak_bytes < least[function]:
            least[function] = split.peak_bytes
            result.setdefault(function, []).append(split)
    return result


def _running(
    profile: Profile, ways: dict[_Function, list[Split]], operation: int, moment: int
) -> _Function | None:
    """The function that can be cut further and runs at this event."""
    for (k, index), left in ways.items():
        if k != operation or not left:
            continue
        if is_about(profile, left[0], moment):
            return k, index
    return None


def _unavoidable(problem: Problem) -> np.ndarray:
    """(n,) bytes of maps that every operation needs or that cannot have left yet."""
    a, n_maps = problem.arrays, len(problem.maps)
    k = np.arange(len(a.seconds))[:, None]
    waiting = (a.producer[:n_maps] < k) & (k < a.release_from)
    used = (a.first_use <= k) & (k <= a.last_use)
    stuck = ~a.allowed[:, [SWAP, RECOMPUTE]].any(axis=1)  # rules keep them
    used |= stuck & (a.producer[:n_maps] < k) & (k <= a.last_use)
    load: np.ndarray = ((waiting | used) * a.size[:n_maps]).sum(axis=1)
    return load
