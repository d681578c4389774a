"""What the kernel does with running records, said again position by position."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.planning.search.candidates import KEEP, RECOMPUTE, SWAP, Search
from chainer_hybridmem.planning.simulation import (
    Problem,
    kernel,
    lanes,
    make_problem,
    replays,
)
from chainer_hybridmem.planning.simulation.arrays import ProblemArrays
from chainer_hybridmem.planning.simulation.work import NEED, Outcome, make_work


@functools.cache
def from_python(inlined: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function that has a function inside which Python cannot call."""
    return numba.njit(lambda *args: inlined(*args))


many = settings(max_examples=150, deadline=None)
seeds = st.integers(0, 2**32)


def random_problem(rng: random.Random) -> Problem:
    return make_problem(toys.random_network(rng.randrange(2**32), rng.randint(2, 40)))


def some_actions(rng: random.Random, problem: Problem) -> np.ndarray:
    weights = [rng.random() for _ in range(3)]
    drawn = rng.choices([KEEP, SWAP, RECOMPUTE], weights, k=len(problem.maps))
    action = np.array(drawn, np.int64)
    action[(action == RECOMPUTE) & ~problem.recomputable] = SWAP
    return action


def drawn(rng: random.Random) -> tuple[ProblemArrays, np.ndarray]:
    problem = random_problem(rng)
    return problem.arrays, some_actions(rng, problem)


def sums_from(first: int, differences: np.ndarray) -> np.ndarray:
    loads = differences.copy()
    loads[first:] = np.cumsum(differences[first:])
    return loads


@many
@given(seeds)
def test_what_stays_is_what_fits_up_to_its_need(seed: int) -> None:
    rng = random.Random(seed)
    a, action = drawn(rng)
    n, b0 = len(a.seconds), a.first_backward
    k = rng.randrange(b0, n)
    limit = int(a.fixed_peak.max()) + rng.randint(0, 300) * toys.MIB
    loads = np.array([rng.randint(0, 200) * toys.MIB for _ in range(n + 1)])
    chain = sorted(rng.sample(range(b0), rng.randint(1, b0)))
    w = make_work(a)
    w.chain[: len(chain)] = chain
    w.load[:] = loads
    w.load[k + 1 :] -= loads[k:-1]
    from_python(replays.choose_stays)(a, action, limit, k, len(chain), True, w)

    stays = set()
    for op in reversed(chain):
        for item in a.products[a.product_ptr[op] : a.product_ptr[op + 1]]:
            if item >= len(action) or action[item] != RECOMPUTE:
                continue
            use, size = a.first_use[item], a.size[item]
            if use == k:
                stays.add(item)
            elif use > k and (loads[k:use] + a.fixed_peak[k:use] <= limit - size).all():
                stays.add(item)
                loads[k:use] += size
    assert set(np.nonzero(w.stays)[0]) == stays
    assert (sums_from(k, w.load) == loads).all()


@many
@given(seeds)
def test_swap_ins_walk_back_as_far_as_memory_allows(seed: int) -> None:
    rng = random.Random(seed)
    a, action = drawn(rng)
    n, b0 = len(a.seconds), a.first_backward
    limit = rng.randint(50, 600) * toys.MIB
    ahead = rng.choice([n, n, 1, 3])
    lead = np.maximum(np.arange(n) - ahead, b0)
    w = make_work(a)
    swapped = np.nonzero(action == SWAP)[0]
    load, extra = w.load, w.extra
    w.swap_out[:] = np.where(action == SWAP, a.copy_from, -1)
    w.needed[:] = a.first_use
    w.release[:] = [rng.choice([-1, rng.randint(0, use)]) for use in a.first_use]
    load[:] = [rng.randint(0, 300) * toys.MIB for _ in range(n + 1)]
    extra[:] = [rng.choice([0, 1]) * rng.randint(0, 300) * toys.MIB for _ in extra]
    loads = load[:n] + np.maximum(a.fixed_peak, extra[:n])
    heads, following = w.heads[NEED], w.following[NEED]
    from_python(lanes.list_by)(w.needed, w.swap_out, heads, following)
    outcome = from_python(kernel.place_swap_ins)(a, limit, lead, w)

    previous = b0
    for m in sorted(swapped, key=lambda m: (w.needed[m], m)):
        k = w.needed[m]
        earliest = max(previous, lead[k], w.release[m])
        while k > earliest and loads[k - 1] + a.size[m] <= limit:
            k -= 1
            loads[k] += a.size[m]
        assert w.swap_in[m] == k
        previous = k
    worst = b0 + int(np.argmax(loads[b0:]))
    assert tuple(outcome) == (loads[worst], worst)


@many
@given(seeds)
def test_a_ceiling_hides_only_what_is_above_it(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    least = Search(problem, 0).evaluate(np.full(len(problem.maps), SWAP)).peak_bytes
    most = max(least, problem.in_core_peak_bytes)
    search = Search(problem, rng.randint(least, most), barrier=rng.random() < 0.5)
    action = search.obeyed(some_actions(rng, problem))
    exact = search.evaluate(action).seconds
    base = exact if np.isfinite(exact) else problem.in_core_seconds
    for share in (0.5, 0.9, 0.99, 1.0, 1.01, 2.0):
        result = kernel.judge(
            problem.arrays,
            action,
            search.limit_bytes,
            search.lead,
            problem.swap_out_seconds,
            problem.swap_in_seconds,
            search.barrier,
            share * base,
            search.work,
        )
        seconds = Outcome(*result).seconds
        assert seconds == exact or (seconds == np.inf and exact > share * base)
