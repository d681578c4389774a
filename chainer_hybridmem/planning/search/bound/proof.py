"""A proven lower bound: no executable plan is faster.

The bound is the optimum of a linear program in which every plan that passes
:mod:`.records.validation` is feasible. Notation: before operation k
compute waits and replays for ``w_k`` seconds, then runs it for ``c_k``; ``W(i, j)`` is
the time from the beginning of the wait before operation i to the beginning of operation
j.

Variables: per feature map the fractions ``s`` swapped and ``r`` recomputed (the rest
is kept), per forward operation whether it is replayed at all (``R``), per operation k
the wait ``w_k`` and the bytes ``N_k`` of swapped maps that are away while it runs.
Minimise ``sum(c) + sum(w)`` subject to

memory
    fixed load + maps alive - recomputed maps not yet made again - ``N_k`` <= limit, at
    every operation k.
away
    ``N_k`` <= bytes of swapped maps that may be away at k: released at the earliest
    before k, not needed before k + 1.
swap-out, for operations i <= k
    of ``N_k``, what forward has finished with only before operation i or later has been
    copied within ``W(i, k)``.
swap-in, for operations k < j
    of ``N_k``, what is needed before operation j at the latest is copied within
    ``W(k + 1, j)``.
replays
    the waits of backward hold one run of all that is replayed; what needs an array
    that forward has dropped needs a replay of its producer.
rules
    a map that may not be kept has ``s + r >= 1``, one that may not be swapped or
    recomputed no such fraction; where rules limit the kept bytes of a group, those
    that leave have the rest. The copies of maps that may not be kept or are in such a
    group, of those needed by operation j, take no longer in each direction than
    ``W(i, j)``, i the first operation before which one of them begins.
host
    if host copies in RAM are limited: without a disk, the swapped bytes are no more
    than the limit; with one, the copies of each direction, those beyond the limit at
    the disk's speed, fit one after the other into the iteration.
sharing
    where several processes share the link, each with a plan and a start of its own:
    their average copies no more in each direction than its part of what the link
    carries within the iteration.
contention
    all waits hold one run of all that is replayed and what copies take from compute,
    ``1 - share`` of their time, that of swap-ins as if all were beside swap-outs.
sources
    what a replay reads by the first use of map x is back, or made again, by then: a
    swapped map so needed early leaves the sums and cuts above from there on
    (``first_back``), unless it is released only after the first backward
    operation (``first_late``; such a map is not away until then).

What crosses iterations is a map like any other: it is there before operation 0, no copy
of it begins before the iteration does, and it is back before its first use.

Why every plan satisfies them. A map that is swapped is away during k only if it is
released before k or earlier and its swap-in starts before k + 1 or later. The release
waits for the copy, which starts no sooner than forward's last use of the map; all
copies that have ended by the start of operation k and started no sooner than the
wait before operation i share one link within ``W(i, k)``. The swap-in is waited
for no later than before the first use, so the same holds on the way back. A map that
is recomputed is absent only between its release and its replay, which comes no
later than its first use; a map that is kept is there until its last use. Sources of
a replay are there, or a replay in the same place has made them; forward's transients
can only be made. Replays run in backward only: a source released by its first
operation can be there without being made again only if its swap-in has been waited for,
and from then on it stays until its last use; one released later is there all
through forward. Where copies slow compute down, ``w_k`` holds what operation k - 1 has
lost as well: a second of two copies beside compute loses ``1 - share_out * share_in``,
a second of one of them no less than its part of that, and a second of a copy while
compute waits costs a whole one. Copies may be issued in any order and anywhere, replays
repeated, and maps kept for longer: none of this lowers a load or shortens a wait below
what is asked for here. The graph may die within an operation; maps left to it then
count at the operation's first moment only.

The pairs (i, k) and (k, j) are added as they turn out to be violated. Leaving pairs
out only lowers the optimum: each round's value is a bound. The reported value does
not rely on the solver's tolerances: it is the Lagrangian bound of the
solver's multipliers, evaluated over the variables' ranges (Neumaier and Shcherbina,
"Safe bounds in linear and mixed-integer linear programming", 2004). The range of a
wait ends at ``longest``: a plan that waits longer anywhere is slower than the in-core
time and ``longest`` together, and the reported value is never above that.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from chainer_hybridmem.jit import make_ready
from chainer_hybridmem.planning.records.sharing import check_ranks, share_links
from chainer_hybridmem.planning.search.bound import relaxation, reversal
from chainer_hybridmem.planning.search.bound.model import least_copy_seconds
from chainer_hybridmem.planning.search.bound.relaxation import Relaxation
from chainer_hybridmem.planning.search.bound.reversal import (
    graph_of_plans,
    seconds_of_passes,
)
from chainer_hybridmem.planning.simulation.obedience import keeps_everything
from chainer_hybridmem.planning.simulation.problem import (
    Problem,
    with_profile,
    with_rules,
)
from chainer_hybridmem.planning.simulation.work import SWAP

ROUNDS = 12
# Rounds without progress after which the bound is left as it is: small programs may
# take more of them.
LEAST_PATIENCE, MOST_PATIENCE = 2, 12
PATIENCE_TIMES_OPERATIONS = 4000
MOST_DIVIDED = 1000  # columns in each part of backward; more of them take minutes


@dataclasses.dataclass(frozen=True)
class Bound:
    """A proven bound and the fractions at which the relaxation attains it.

    Attributes:
        seconds (float): No executable plan is faster; always finite.
        swapped (ndarray): (M,) fraction of each map that is swapped.
        recomputed (ndarray): (M,) fraction of each map that is recomputed.
        rounds (int): Linear programs solved.
        prices (ndarray): (n,) seconds per byte: by how much the relaxation falls with
            the load of each operation.
        in_parts_seconds (float or None): Likewise proven, with replays by part of
            backward; None until :func:`bound_of_parts` has been asked.
    """

    seconds: float
    swapped: np.ndarray
    recomputed: np.ndarray
    rounds: int
    prices: np.ndarray
    in_parts_seconds: float | None = None


def lower_bound(problem: Problem, limit_bytes: int) -> Bound:
    """Seconds below which no executable plan under this limit can be.

    The problem remembers the result.

    Args:
        problem: What is planned.
        limit_bytes: Memory limit.
    """
    if limit_bytes not in problem.bounds:
        problem.bounds[limit_bytes] = _lower_bound(problem, limit_bytes)
    bound: Bound = problem.bounds[limit_bytes]
    return bound


def bound_of_parts(problem: Problem, limit_bytes: int) -> float:
    """Seconds below which no executable plan can be, with replays by part of backward.

    It takes a few times as long as :func:`lower_bound`, and is never below it. The
    problem remembers the result.

    Args:
        problem: What is planned.
        limit_bytes: Memory limit.
    """
    bound = lower_bound(problem, limit_bytes)
    seconds = bound.in_parts_seconds
    if seconds is None:
        seconds = _bound_of_parts(problem, limit_bytes, bound)
        bound = dataclasses.replace(bound, in_parts_seconds=seconds)
        problem.bounds[limit_bytes] = bound
    return seconds


def _bound_of_parts(problem: Problem, limit_bytes: int, bound: Bound) -> float:
    columns = problem.arrays.first_backward + 2 * len(problem.maps)
    if not bound.recomputed.any() or columns > MOST_DIVIDED:
        return bound.seconds
    relaxation = Relaxation(problem, limit_bytes)
    prices = tighten(relaxation).prices
    relaxation.divide(prices)
    return max(bound.seconds, tighten(relaxation).seconds)


def bound_of_ranks(problem: Problem, limit_bytes: int, ranks: int) -> float:
    """Seconds of an iteration below which processes on one link cannot be.

    Each may have a plan of its own, and begin when it likes: in lockstep, later in
    every iteration, or half an iteration apart with double buffering.

    Args:
        problem: One process; however many its link is shared by, all of it is divided
            among ``ranks``.
        limit_bytes: Memory limit of each process.
        ranks: How many processes.

    Raises:
        OptionError: If their number is out of range.
    """
    check_ranks(ranks)
    alone = problem
    if problem.profile.link.ranks > 1:
        alone = with_profile(problem, share_links(problem.profile, 1))
    seconds = lower_bound(alone, limit_bytes).seconds
    if ranks == 1 or not alone.maps:
        return seconds
    shared = tighten(Relaxation(alone, limit_bytes, ranks=ranks)).seconds
    if alone.still_seconds > alone.compute_seconds:
        return shared  # with double buffering, the host may issue ahead
    return max(seconds, shared)


def warm_up() -> None:
    """Compiles and imports what a bound needs; that is not planning."""
    make_ready(relaxation.find_tightest, reversal.reverse_from)
    from scipy import optimize, sparse  # noqa: F401


def _lower_bound(problem: Problem, limit_bytes: int) -> Bound:
    n_maps = len(problem.maps)
    nothing = np.zeros(n_maps)
    fits = problem.in_core_peak_bytes <= limit_bytes
    if (fits and keeps_everything(problem.arrays)) or n_maps == 0:
        free = np.zeros(len(problem.arrays.seconds))
        return Bound(problem.still_seconds, nothing, nothing, 0, free)
    bound = tighten(Relaxation(problem, limit_bytes))
    # The relaxation does not know that the host has to issue everything.
    seconds = max(bound.seconds, problem.still_seconds)
    seconds = max(seconds, _bound_of_passes(problem, limit_bytes, seconds))
    if problem.rules:  # which no plan obeys, perhaps: then the solver says nothing
        plain = _lower_bound(with_rules(problem, ()), limit_bytes)
        seconds = max(seconds, plain.seconds)
    return dataclasses.replace(bound, seconds=seconds)


def _bound_of_passes(problem: Problem, limit_bytes: int, proven: float) -> float:
    """Seconds below which no plan can be, if what swaps nothing is made in passes.

    Args:
        problem: What is planned.
        limit_bytes: Memory limit.
        proven: Seconds below which nothing is asked for.
    """
    with_swaps = _least_with_swaps(problem)
    if with_swaps <= proven or not problem.recomputable.any():
        return 0.0
    passes = seconds_of_passes(graph_of_plans(problem, limit_bytes))
    without = (problem.compute_seconds + passes) * (1 - relaxation.ROUNDING)
    seconds = min(without, with_swaps)
    return seconds if math.isfinite(seconds) else 0.0  # no plan fits


def _least_with_swaps(problem: Problem) -> float:
    """Seconds of any plan that swaps a map: both copies, and compute around them."""
    a = problem.arrays
    out_seconds, in_seconds = least_copy_seconds(problem)
    elapsed = np.cumsum([0.0, *a.seconds])
    before, after = elapsed[a.copy_from], elapsed[-1] - elapsed[a.first_use]
    seconds = (before + out_seconds + in_seconds + after) * (1 - relaxation.ROUNDING)
    return float(seconds[a.allowed[:, SWAP]].min(initial=math.inf))


def tighten(relaxation: Relaxation) -> Bound:
    """Adds violated pairs until there are none, or until they do not help."""
    best, stuck, done = relaxation.model.base_seconds, 0, 0
    swapped = recomputed = np.zeros(relaxation.model.n_maps)
    prices = np.zeros(relaxation.model.n)
    relaxation.cut(relaxation.everything_swapped())
    patience = PATIENCE_TIMES_OPERATIONS // max(relaxation.model.n, 1)
    patience = min(max(patience, LEAST_PATIENCE), MOST_PATIENCE)
    while done < ROUNDS and stuck < patience:
        done += 1
        solution = relaxation.solve()
        if solution is None:  # the solver gave up; what is proven stays proven
            break
        stuck = 0 if solution.seconds > best * (1 + 1e-6) or done == 1 else stuck + 1
        best = max(best, solution.seconds)
        swapped, recomputed = relaxation.fractions(solution.x)
        prices = solution.prices
        if not relaxation.cut(solution.x):
            break
    return Bound(best, swapped, recomputed, done, prices)
