"""AutoSwap (Zhang et al. 2019, section IV): swaps by priority scores.

=======  ===========================================================
symbol   meaning
=======  ===========================================================
k*       operation with the highest load when nothing is swapped
gap      from the end of a map's last access in forward to the start
         of its first one in backward, seconds of compute
DOA      duration of absence: gap - swap-out - swap-in
AOA      area of absence: DOA x size; if DOA < 0, DOA / size
WDOA     area under the load between the two accesses, byte seconds
SWDOA    WDOA under the load that is left after each selection
BO       w . (the four scores, standardised), w in [-1, 1]^4
=======  ===========================================================

Candidates have at least ``smallest_bytes`` and a lifetime across k*. They are selected
by descending score until the load stays inside the limit with the selected ones absent
over their whole gap. Swap-outs start right after their access, one after the other;
over the limit the next malloc waits for them. Swap-ins come in order of need, just
early enough to be hidden, and wait for memory (section IV-E).

Where the paper is silent: if the scheduled plan does not fit although the load of the
selection does (copies take their time), selection goes on; if the candidates are
used up, the other maps follow, by the same score. For BO the four scores alone are
evaluated first, then random weights, then those of largest expected improvement under
a Gaussian process.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    SWAP,
    Candidate,
    Search,
    kept_load,
)
from chainer_hybridmem.planning.search.planner_options import COUNT, POSITIVE
from chainer_hybridmem.planning.search.relaxed import relaxed
from chainer_hybridmem.planning.simulation.problem import Problem
from chainer_hybridmem.version import describe_installation

SMALLEST_BYTES = 2**20
EVALUATIONS = 34  # the four scores, then about 30 as in the paper
RANDOM_STARTS = 4
GUESSES = 2000  # weights among which the expected improvement is maximised


def autoswap_bo(
    problem: Problem,
    limit_bytes: int,
    smallest_bytes: int = SMALLEST_BYTES,
    evaluations: int = EVALUATIONS,
    seed: int = 0,
) -> Plan:
    """The four scores in the combination with the least overhead found.

    Args:
        problem: What to plan.
        limit_bytes: Memory limit.
        smallest_bytes: Smaller maps are no candidates.
        evaluations: Combinations that are scheduled in all.
        seed: Of the random weights.

    Raises:
        InfeasibleError: If nothing fits.
        OptionError: If scikit-learn is missing.
    """
    options: dict[str, Any] = {
        'smallest_bytes': smallest_bytes,
        'evaluations': evaluations,
        'seed': seed,
    }
    guess = import_guess()
    selection = _Selection(problem, limit_bytes, smallest_bytes)
    if selection.search.in_core_fits():  # every combination swaps nothing
        return selection.search.finish_in_core('autoswap-bo', **options)
    chosen = selection.is_candidate
    scores = np.stack([_standardised(f(selection), chosen) for f in SCORES.values()])
    best, weights = _optimise(selection, scores, guess, evaluations, seed)
    options['weights'] = [float(w) for w in weights]
    return _finish(selection, 'autoswap-bo', best, options)


def _by_score(
    name: str,
    problem: Problem,
    limit_bytes: int,
    smallest_bytes: int = SMALLEST_BYTES,
) -> Plan:
    selection = _Selection(problem, limit_bytes, smallest_bytes)
    best = selection.schedule(SCORES[name](selection))
    options: dict[str, object] = {'smallest_bytes': smallest_bytes}
    return _finish(selection, f'autoswap-{name}', best, options)


def _finish(
    selection: _Selection, planner: str, best: Candidate, options: dict[str, object]
) -> Plan:
    search = selection.search
    if search.in_core_fits():
        return search.finish_in_core(planner, **options)
    plan = search.finish(planner, best, **options)
    return relaxed(search.problem, plan, margin=0.0)


class _Selection:
    """The load without swaps, and what selecting maps makes of it.

    Args:
        problem (Problem): What to plan.
        limit_bytes (int): Memory limit.
        smallest_bytes (int): Smaller maps are no candidates.

    Attributes:
        search (Search): Schedules selections.
        load (ndarray): (n,) int64, highest load of each operation.
        size (ndarray): (M,) int64.
        gap (ndarray): (M, 2) int64, operations between the two accesses.
        doa (ndarray): (M,) seconds of absence.
        may_swap (ndarray): (M,) whether the rules allow it.
        is_candidate (ndarray): (M,) whether it is selected first.
    """

    def __init__(self, problem: Problem, limit_bytes: int, smallest_bytes: int) -> None:
        a, n_maps = problem.arrays, len(problem.maps)
        self.search = Search(problem, limit_bytes, barrier=False)
        self.size = a.size[:n_maps]
        self.seconds = a.seconds
        self.load = kept_load(problem)
        self.gap = np.stack([a.copy_from, a.first_use], axis=1)
        ends = np.append(0.0, np.cumsum(a.seconds))
        copies = problem.swap_out_seconds + problem.swap_in_seconds
        self.doa: np.ndarray = ends[a.first_use] - ends[a.copy_from] - copies
        worst = int(np.argmax(self.load))
        across = (a.producer[:n_maps] < worst) & (a.last_use >= worst)
        self.may_swap = a.allowed[:, SWAP]
        self.is_candidate = across & (self.size >= smallest_bytes) & self.may_swap

    def areas(self, load: np.ndarray) -> np.ndarray:
        """(M,) byte seconds under a load between each map's accesses."""
        under = np.append(0.0, np.cumsum(load * self.seconds))
        areas: np.ndarray = under[self.gap[:, 1]] - under[self.gap[:, 0]]
        return areas

    def without(self, load: np.ndarray, m: int) -> np.ndarray:
        """The load with a map absent over its gap."""
        left: np.ndarray = load.copy()
        left[self.gap[m, 0] : self.gap[m, 1]] -= self.size[m]
        return left

    def schedule(self, score: np.ndarray) -> Candidate:
        """Selects by descending score until it fits; else the last try."""
        action, load = self.search.fill(KEEP), self.load
        limit_bytes = self.search.limit_bytes
        for m in np.flatnonzero(action == SWAP).tolist():  # rules say so
            load = self.without(load, m)
        best = self.search.evaluate(action)
        for m in self._order(score):
            if best.fits:
                break
            if action[m] == SWAP or not self.may_swap[m]:
                continue
            action[m] = SWAP
            load = self.without(load, m)
            if load.max() <= limit_bytes:
                best = self.search.evaluate(action)
        return best if best.fits else self.search.evaluate(action)

    def _order(self, score: np.ndarray) -> Iterator[int]:
        """Candidates by descending score, then the others."""
        yield from np.lexsort((-score, ~self.is_candidate)).tolist()


# -- scores ------------------------------------------------------------------------


def _doa(selection: _Selection) -> np.ndarray:
    return selection.doa


def _aoa(selection: _Selection) -> np.ndarray:
    doa, size = selection.doa, selection.size
    score: np.ndarray = np.where(doa >= 0, doa * size, doa / np.maximum(size, 1))
    return score


def _wdoa(selection: _Selection) -> np.ndarray:
    return selection.areas(selection.load)


def _swdoa(selection: _Selection) -> np.ndarray:
    """Areas when each map was selected, which fall from choice to choice."""
    load, score = selection.load, np.zeros(len(selection.size))
    for chosen in (selection.is_candidate, ~selection.is_candidate):
        left = np.flatnonzero(chosen)
        while len(left):
            areas = selection.areas(load)[left]
            first = int(np.argmax(areas))
            m, left = int(left[first]), np.delete(left, first)
            score[m] = areas[first]
            load = selection.without(load, m)
    return score


Score = Callable[[_Selection], np.ndarray]
SCORES: dict[str, Score] = {'doa': _doa, 'aoa': _aoa, 'wdoa': _wdoa, 'swdoa': _swdoa}


def _standardised(score: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Scales a score to mean 0 and variance 1 over the chosen maps."""
    spread = score[chosen].std() if chosen.any() else 0.0
    if spread == 0:
        return np.zeros(len(score))
    standardised: np.ndarray = (score - score[chosen].mean()) / spread
    return standardised


# -- Bayesian optimisation -----------------------------------------------------------


def _optimise(
    selection: _Selection,
    scores: np.ndarray,
    guess: Guess,
    evaluations: int,
    seed: int,
) -> tuple[Candidate, np.ndarray]:
    """The combination with the least simulated time, and its weights.

    Args:
        selection: Schedules scores.
        scores: (4, M), standardised.
        guess: Of which of many weights may be best, from those tried.
        evaluations: Combinations to schedule, the four scores alone first.
        seed: Of the random weights.
    """
    rng = np.random.default_rng(seed)
    tried = np.empty((0, len(scores)))
    candidates: list[Candidate] = []
    for number in range(evaluations):
        if number < len(scores):
            weights = np.eye(len(scores))[number]
        else:
            weights = rng.uniform(-1.0, 1.0, len(scores))
        if number >= len(scores) + RANDOM_STARTS:
            others = rng.uniform(-1.0, 1.0, (GUESSES, len(scores)))
            weights = guess(tried, _finite([c.seconds for c in candidates]), others)
        tried = np.vstack([tried, weights])
        candidates.append(selection.schedule(weights @ scores))
    best = min(range(len(candidates)), key=lambda i: candidates[i].seconds)
    return candidates[best], tried[best]


def _finite(seconds: list[float]) -> np.ndarray:
    """Times for the regression: what does not fit is worse than all that does."""
    times = np.array(seconds)
    fits = np.isfinite(times)
    worst = times[fits].max() if fits.any() else 1.0
    return np.where(fits, times, 2 * worst)


_SOURCE = 'Zhang et al. 2019, section IV'
_OPTIONS = {'smallest_bytes': COUNT}
_ACTIONS = frozenset({Action.KEEP, Action.SWAP})
PLANNERS = (
    *(
        Planner(
            f'autoswap-{name}',
            functools.partial(_by_score, name),
            _SOURCE,
            _OPTIONS,
            actions=_ACTIONS,
        )
        for name in SCORES
    ),
    Planner(
        'autoswap-bo',
        autoswap_bo,
        _SOURCE,
        {**_OPTIONS, 'evaluations': POSITIVE._replace(end=10_000), 'seed': COUNT},
        actions=_ACTIONS,
    ),
)


Guess = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Of weights tried, their times and others: the best of the others."""


def import_guess() -> Guess:
    """A function of the weights tried, their times and others: the best of those.

    Raises:
        OptionError: If scikit-learn is missing.
    """
    try:
        from scipy.stats import norm
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern
    except ImportError:
        raise OptionError(
            "Planner 'autoswap-bo' needs scikit-learn: "
            f'{describe_installation("autoswap")}.'
        ) from None

    def guess(tried: np.ndarray, times: np.ndarray, others: np.ndarray) -> np.ndarray:
        process = GaussianProcessRegressor(
            Matern(nu=2.5), alpha=1e-6, normalize_y=True, random_state=0
        )
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', ConvergenceWarning)  # all times are equal
            process.fit(tried, times)
        mean, spread = process.predict(others, return_std=True)
        spread = np.maximum(spread, 1e-12)
        better = times.min() - mean
        improvement = better * norm.cdf(better / spread)
        improvement += spread * norm.pdf(better / spread)
        best: np.ndarray = others[int(np.argmax(improvement))]
        return best

    return guess
