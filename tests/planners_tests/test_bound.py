"""No executable plan beats the bound: small graphs, every position a plan may use.

A plan is tested at its own peak, the tightest limit under which it is one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from support import toys
from support.matrices import several

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan, Replay
from chainer_hybridmem.planning.records.profile import Link, Profile, Storage
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search import bound
from chainer_hybridmem.planning.search.annealing import actions_of
from chainer_hybridmem.planning.search.bound import (
    WholeRelaxation,
    bound_of_parts,
    lower_bound,
    model,
)
from chainer_hybridmem.planning.search.candidates import (
    RECOMPUTE,
    SWAP,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate
from chainer_hybridmem.planning.simulation.lanes import time_lanes
from chainer_hybridmem.planning.simulation.timeline import positions_from_plan

MIB = toys.MIB


def with_link(profile: Profile, latency: float, out: float, back: float) -> Profile:
    return dataclasses.replace(profile, link=Link(latency, out * MIB, back * MIB))


def profiles() -> dict[str, Profile]:
    node = toys.Node
    uneven = toys.chain(
        4, seconds=[1.0, 0.2, 3.0, 0.5], nbytes=[8 * MIB, 20 * MIB, 0, 5 * MIB]
    )
    skips = toys.graph(
        [[], [0], [0, 1], [2], [0, 3]],
        seconds=[1.0, 0.1, 0.1, 2.0, 0.1],
        nbytes=[10 * MIB, 10 * MIB, 10 * MIB, 3 * MIB, 10 * MIB],
        transient=[False, True, False, False, False],
    )
    dropout = toys.network(
        [
            node((), (12 * MIB,), seconds=1.0),
            node(((0, 0),), (12 * MIB,), mask=3 * MIB, seconds=0.1),
            node(((1, 0),), (12 * MIB,), seconds=0.1, reads_inputs=False),
            node(((2, 0),), (4 * MIB,), saved=2 * MIB, seconds=1.0),
        ],
        graph_dies_early=True,
    )
    heavy = toys.network(
        [
            node((), (10 * MIB,), workspace=0),
            node(((0, 0),), (10 * MIB,), workspace=30 * MIB),
            node(((1, 0),), (10 * MIB,), seconds=0.1, workspace=15 * MIB),
            node(((2, 0), (0, 0)), (10 * MIB,), workspace=25 * MIB),
        ]
    )
    named = {
        'uneven': with_link(uneven, 0.0, 10, 10),
        'uneven, slow back': with_link(uneven, 0.1, 40, 3),
        'uneven, slow out': with_link(uneven, 0.02, 3, 40),
        'skips': with_link(skips, 0.0, 6, 8),
        'skips, fast': with_link(skips, 0.01, 60, 30),
        'dropout': with_link(dropout, 0.05, 8, 12),
        'heavy': with_link(heavy, 0.0, 10, 20),
    }
    named.update({f'graph {s}': toys.random_graph(s, 4 + s % 3) for s in range(6)})
    named.update({f'network {s}': toys.random_network(s, 4) for s in range(8)})
    for name, shares in (
        ('heavy', (0.5, 0.5, 0.6)),
        ('skips', (0.8, 0.3, 1.0)),
        ('skips, fast', (0.2, 1.0, 0.5)),
        ('network 2', (0.5, 0.5, 0.5)),
        ('network 5', (0.9, 0.4, 0.7)),
    ):
        named[f'{name}, contention'] = toys.with_shares(named[name], *shares)
    named['network 3173'] = toys.random_network(3173, 4)
    for name in (*CROSSING, 'network 2', 'network 5', 'skips, contention'):
        named[f'{name}, crossing'] = toys.with_persistent(named[name], len(named), 0.5)
    return named


CROSSING = ['uneven, slow back', 'uneven, slow out', 'heavy', 'graph 1']
PROFILES = profiles()
every_profile = pytest.mark.parametrize('name', list(PROFILES))


@pytest.fixture(autouse=True)
def long_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the bound knows about the sources of replays, not only what is cheap."""
    monkeypatch.setattr(model, 'LONGEST', 12)


@functools.cache
def problem_of(name: str) -> Problem:
    return make_problem(PROFILES[name], cross_iteration=True)


@dataclasses.dataclass(frozen=True)
class Style:
    """How the replays of a plan are put together.

    Attributes:
        memo (bool): One replay serves all its users in a chain; else every user
            replays its sources anew and they are freed right after it.
        replay_swapped (bool): An absent swapped source is replayed; else there is
            no such plan.
        extra (tuple): ``(before, operation)`` of replays nobody needs.
    """

    memo: bool = True
    replay_swapped: bool = True
    extra: tuple[tuple[int, int], ...] = ()


class Builder:
    """Positions of maps in, whole plans out: it adds the replays."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.profile = problem, problem.profile
        self.n, self.b0 = len(self.profile.operations), self.profile.first_backward
        self.recipes = {r.operation: r for r in self.profile.recipes if r.exact}

    def plan(self, maps: tuple[MapPlan, ...], style: Style) -> Plan | None:
        replays: list[Replay] = []
        self.maps = {entry.storage: entry for entry in maps}
        self.style = style
        for k in range(self.b0, self.n):
            due = {
                self.profile.storages[m.storage].producer
                for m in maps
                if m.action is Action.RECOMPUTE and m.needed_before == k
            }
            due |= {op for before, op in style.extra if before == k}
            if due:
                chain = self._chain(sorted(due), k)
                if chain is None:
                    return None
                replays.extend(chain)
        return Plan(
            planner='test',
            options={},
            profile_fingerprint=self.profile.fingerprint(),
            memory_limit_bytes=0,
            maps=maps,
            replays=tuple(replays),
            predicted_seconds=0.0,
            predicted_peak_bytes=0,
            in_core_seconds=0.0,
            lower_bound_seconds=0.0,
        )

    def _there(self, storage: int, k: int) -> bool:
        """Whether a source is complete before operation k without this chain."""
        if storage not in self.maps:
            item = self.profile.storages[storage]
            first = self.profile.operations[self.b0].first_event
            return not (item.producer >= 0 and 0 <= item.freed_at < first)
        entry = self.maps[storage]
        if 0 <= entry.drop_before <= k:
            return False
        if entry.action is Action.KEEP or k < entry.release_before:
            return True
        if entry.action is Action.SWAP:
            return k >= entry.needed_before
        return k > entry.needed_before

    def _chain(self, due: list[int], k: int) -> list[Replay] | None:
        order: list[int] = []
        if not all(self._visit(op, k, order, 0) for op in due):
            return None
        stay: set[int] = set()
        replays, passing = [], set()
        for place, op in enumerate(order):
            made = [s for s in self._products(op) if s not in passing]
            if len(made) < len(self._products(op)):
                return None  # would make something twice
            keeps = [
                s
                for s in made
                if s in self.maps
                and self.maps[s].action is Action.RECOMPUTE
                and self.maps[s].needed_before == k
                and s not in stay
            ]
            stay.update(keeps)
            passing.update(s for s in made if s not in keeps)
            frees = [s for s in sorted(passing) if not self._wanted(s, order, place)]
            passing.difference_update(frees)
            replays.append(Replay(k, op, tuple(keeps), tuple(frees)))
        return replays

    def _products(self, op: int) -> list[int]:
        recipe = self.recipes[op]
        return [s for s in recipe.products if s not in recipe.inputs]

    def _wanted(self, storage: int, order: list[int], place: int) -> bool:
        """Whether a later replay reads a passing storage before it is made again."""
        for op in order[place + 1 :]:
            if storage in self.recipes[op].inputs:
                return True
            if storage in self.recipes[op].products:
                return False
        return False

    def _visit(self, op: int, k: int, order: list[int], depth: int) -> bool:
        if op not in self.recipes or depth > self.n or len(order) > 12:
            return False
        if self.style.memo and op in order:
            return True
        for source in self.recipes[op].inputs:
            if self._there(source, k):
                continue
            entry = self.maps.get(source)
            if entry is not None:
                due_now = entry.action is Action.RECOMPUTE and entry.needed_before == k
                producer = self.profile.storages[source].producer
                if due_now and producer in order:
                    continue
                if entry.action is Action.SWAP and not self.style.replay_swapped:
                    return False
            producer = self.profile.storages[source].producer
            if producer < 0 or not self._visit(producer, k, order, depth + 1):
                return False
        order.append(op)
        return True


def entries(builder: Builder, storage: Storage) -> Iterator[MapPlan]:
    """All that may happen to one map; copies start as soon as they can."""
    n, b0 = builder.n, builder.b0
    copy = max((storage.producer, *storage.forward_uses)) + 1
    first, last = min(storage.backward_uses), max(storage.backward_uses) + 1
    release = max(copy, storage.releasable_from)
    for drop in sorted({last, n}):
        yield MapPlan(storage.id, Action.KEEP, drop_before=drop)
        positions = range(release, first + 1)
        for r, i, need in itertools.combinations_with_replacement(positions, 3):
            yield MapPlan(storage.id, Action.SWAP, copy, r, i, need, drop)
        for r, need in itertools.combinations_with_replacement(positions, 2):
            if need >= b0:
                yield MapPlan(storage.id, Action.RECOMPUTE, -1, r, -1, need, drop)
    yield MapPlan(storage.id, Action.KEEP)


def any_entry(rng: random.Random, builder: Builder, storage: Storage) -> MapPlan:
    """Something that may happen to one map, at random."""
    n, b0 = builder.n, builder.b0
    copy = max((storage.producer, *storage.forward_uses)) + 1
    first, last = min(storage.backward_uses), max(storage.backward_uses) + 1
    release = max(copy, storage.releasable_from)
    drop = last if rng.random() < 0.7 else rng.randint(last, n)
    action = rng.choice([Action.KEEP, Action.SWAP, Action.SWAP, Action.RECOMPUTE])
    if action is Action.KEEP:
        return MapPlan(
            storage.id, action, drop_before=drop if rng.random() < 0.8 else -1
        )
    r, i, need = sorted(rng.randint(release, first) for _ in range(3))
    if rng.random() < 0.3:
        r = release
    if rng.random() < 0.3:
        i = need
    if action is Action.SWAP:
        out = copy if rng.random() < 0.7 else rng.randint(copy, r)
        return MapPlan(storage.id, action, out, r, i, need, drop)
    need = max(need, b0)
    return MapPlan(storage.id, action, -1, r, -1, need, drop)


def any_style(rng: random.Random, builder: Builder) -> Style:
    extra: tuple[tuple[int, int], ...] = ()
    if rng.random() < 0.1 and builder.recipes:
        op = rng.choice(sorted(builder.recipes))
        extra = ((rng.randint(builder.b0, builder.n - 1), op),)
    return Style(rng.random() < 0.7, rng.random() < 0.7, extra)


def judged(problem: Problem, plan: Plan | None) -> tuple[int, float] | None:
    """Peak and time if the checker accepts the plan."""
    if plan is None:
        return None
    try:
        peak = max(check_plan(problem.profile, plan))
        work = positions_from_plan(problem, plan)
    except PlanError:
        return None
    seconds = time_lanes(
        problem.arrays, problem.swap_out_seconds, problem.swap_in_seconds, work
    )
    return peak, seconds


class Front:
    """The plans that none with less memory beats."""

    def __init__(self) -> None:
        self.fastest: dict[int, float] = {}
        self.accepted = 0

    def add(self, result: tuple[int, float] | None) -> None:
        if result is not None:
            peak, seconds = result
            self.accepted += 1
            self.fastest[peak] = min(seconds, self.fastest.get(peak, np.inf))

    def check(self, problem: Problem, whole: int = 0) -> None:
        """Against the linear program, and ``whole`` of them against the tree."""
        best = np.inf
        for peak in sorted(self.fastest):
            if self.fastest[peak] >= best:
                continue
            best = self.fastest[peak]
            proven = bound_of_parts(problem, peak)
            assert lower_bound(problem, peak).seconds <= proven
            assert proven <= best * (1 + 1e-9), (peak, proven, best)
            if whole > 0 and peak < problem.in_core_peak_bytes:
                whole -= 1
                tree = make_plan(problem, peak, 'exact', time_budget=2.0)
                assert tree.lower_bound_seconds <= best * (1 + 1e-9)


SMALL = ['uneven', 'uneven, slow back', 'uneven, slow out', 'dropout', 'heavy']
ENUMERATED = [*SMALL, 'graph 0', 'network 2', 'network 3']
ENUMERATED += [f'{name}, crossing' for name in CROSSING]
MOST = several(1500, all_of_them=4000)


@pytest.mark.parametrize('name', ENUMERATED)
def test_no_enumerated_plan_is_faster(name: str) -> None:
    """Every combination of positions; where they are too many, a large sample."""
    problem, front = problem_of(name), Front()
    builder = Builder(problem)
    choices = [list(entries(builder, storage)) for storage in problem.maps]
    rng = random.Random(0)
    total = int(np.prod([len(c) for c in choices], dtype=object))
    product: Iterator[tuple[MapPlan, ...]] = itertools.product(*choices)
    if total > MOST:
        product = (tuple(rng.choice(c) for c in choices) for _ in range(MOST))
    for maps in product:
        front.add(judged(problem, builder.plan(maps, Style())))
    assert front.accepted > 50 or total < 500
    front.check(problem, whole=5)


@pytest.mark.matrix(first=0, every=3)
@every_profile
def test_no_plan_that_a_search_over_positions_finds_is_faster(name: str) -> None:
    """Hill climbing on the executable plans themselves, at several limits."""
    problem, front = problem_of(name), Front()
    builder, rng = Builder(problem), random.Random(name)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    limits = [least + (most - 1 - least) * i // 5 for i in range(6)]
    for limit in sorted(set(limits)):
        if least > limit:
            continue
        start = make_plan(problem, limit, 'swap-all').maps
        if rng.random() < 0.5:
            start = make_plan(problem, limit, 'hybrid', steps=300).maps
        maps, style, best = start, Style(), np.inf
        for _ in range(several(120, all_of_them=250)):
            changed = list(maps)
            for m in rng.sample(range(len(maps)), min(len(maps), rng.choice([1, 2]))):
                changed[m] = any_entry(rng, builder, problem.maps[m])
            other = style if rng.random() < 0.5 else any_style(rng, builder)
            result = judged(problem, builder.plan(tuple(changed), other))
            front.add(result)
            if result is not None and result[0] <= limit and result[1] <= best:
                maps, style, best = tuple(changed), other, result[1]
        if np.isfinite(best):
            actions = actions_of(builder.plan(maps, style))
            for divided in (False, True):
                floor = bound_of_actions(problem, limit, actions, divided)
                assert floor <= best * (1 + 1e-9)
    front.check(problem, whole=3)


def bound_of_actions(
    problem: Problem, limit: int, action: np.ndarray, divided: bool
) -> float:
    """What the tree proves of all plans with these actions."""
    whole = WholeRelaxation(problem, limit)
    at, known = whole.relaxation.model.columns, whole.relaxation.model.variables
    for first, kind in ((at.swap, SWAP), (at.recompute, RECOMPUTE)):
        for m, other in enumerate(action.tolist()):
            column = known.same_as[first + m]
            known.lower[column] = max(known.lower[column], other == kind)
            known.upper[column] = min(known.upper[column], other == kind)
    prices = bound.tighten(whole.relaxation).prices
    if divided:
        whole.divide(prices)
    for _ in range(100):
        answer = whole.solve(np.inf, 5.0)
        if answer.x is None or not whole.cut(answer.x):
            return answer.floor
    raise AssertionError('rows are found again and again')


@pytest.mark.matrix(first=1, every=3)
@every_profile
def test_no_plan_is_faster_than_the_tree_proves_of_its_actions(name: str) -> None:
    """A plan's own actions leave far less slack than the best of all."""
    problem, rng = problem_of(name), random.Random(name)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    for limit in sorted({least + (most - 1 - least) * i // 3 for i in range(3)}):
        for _ in range(8):
            drawn = [
                rng.choice(np.flatnonzero(allowed).tolist())
                for allowed in problem.arrays.allowed
            ]
            action = np.array(drawn, np.int64)
            search = Search(problem, limit, barrier=rng.random() < 0.5)
            seconds = search.evaluate(action).seconds
            if np.isfinite(seconds):
                for divided in (False, True):
                    floor = bound_of_actions(problem, limit, action, divided)
                    assert floor <= seconds * (1 + 1e-9)


@pytest.mark.parametrize('name', ['heavy', 'skips', 'graph 2'])
def test_slow_plans_are_not_refused_for_their_actions(name: str) -> None:
    """A map may be copied, and made again for others before it is back."""
    problem, rng, seen = problem_of(name), random.Random(name), 0
    builder = Builder(problem)
    while seen < 60:
        maps = tuple(any_entry(rng, builder, storage) for storage in problem.maps)
        plan = builder.plan(maps, any_style(rng, builder))
        result = judged(problem, plan)
        if plan is None or result is None:
            continue
        seen += 1
        for divided in (False, True):
            floor = bound_of_actions(problem, result[0], actions_of(plan), divided)
            assert floor <= result[1] * (1 + 1e-9)


def test_a_source_that_never_leaves_need_not_be_repeatable() -> None:
    """The program holds the output of a layer that is not: what follows may be."""
    node = toys.Node
    problem = make_problem(
        toys.network(
            [
                node((), (MIB,), exact=False, held=-1, reads_inputs=False),
                node(((0, 0),), (14 * MIB,), reads_inputs=False, reads_outputs=True),
                node(((1, 0),), (20 * MIB,), seconds=3.0, reads_inputs=False),
                node(((2, 0),), (20 * MIB,), reads_inputs=False, workspace=9 * MIB),
            ],
            bandwidth=MIB,
        )
    )
    assert problem.recomputable.tolist() == [True]
    limit = problem.in_core_peak_bytes - MIB
    assert make_plan(problem, limit, 'hybrid').count(Action.RECOMPUTE) == 1


def test_the_test_judges_as_the_simulator_does() -> None:
    problem = problem_of('skips')
    plan = make_plan(problem, least_memory(problem)[0], 'hybrid')
    timeline = simulate(problem, plan)
    assert judged(problem, plan) == (timeline.peak_bytes, timeline.total_seconds)


@pytest.mark.matrix(first=2, every=3)
@every_profile
def test_more_memory_never_raises_it(name: str) -> None:
    problem = problem_of(name)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    limits = sorted({least + (most - least) * i // 8 for i in range(9)} | {most - 1})
    values = [lower_bound(problem, limit).seconds for limit in limits if limit >= least]
    assert np.isfinite(values).all()
    for less, more in itertools.pairwise(values):
        assert more <= less * (1 + 1e-6)
    assert values[-1] == problem.in_core_seconds
    assert min(values) >= problem.in_core_seconds


def test_a_solver_that_gives_up_leaves_the_in_core_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = make_problem(toys.chain())
    limit = least_memory(problem)[0]
    assert lower_bound(problem, limit).seconds > problem.in_core_seconds
    monkeypatch.setattr(bound.Relaxation, 'solve', lambda self: None)
    problem.bounds.clear()
    assert lower_bound(problem, limit).seconds == problem.in_core_seconds


def test_below_the_least_memory_it_stays_finite() -> None:
    """There is no plan, so that any value is a bound; the planners say why."""
    problem = make_problem(toys.chain())
    limit = least_memory(problem)[0] - 1
    assert lower_bound(problem, limit).seconds >= problem.in_core_seconds
    assert np.isfinite(lower_bound(problem, limit).seconds)


def test_it_is_attained_where_one_copy_is_all_there_is() -> None:
    """One map of 10 MiB at 10 MiB/s that has to leave and to come back at once."""
    problem = make_problem(toys.chain(3))
    least = least_memory(problem)[0]
    search = Search(problem, least, barrier=False)
    best = min(
        (
            search.evaluate(np.array(action, np.int64)).seconds
            for action in itertools.product(range(3), repeat=len(problem.maps))
        ),
    )
    assert lower_bound(problem, least).seconds == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize('name', ['skips', 'dropout', 'graph 1', 'network 3'])
def test_rows_left_out_do_not_matter(name: str) -> None:
    """With the rows of every operation from the start, the value is the same."""
    problem = problem_of(name)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    limit = (least + most) // 2
    few = bound.tighten(bound.Relaxation(problem, limit))
    whole = bound.Relaxation(problem, limit)
    whole.positions = set(range(whole.model.n))
    assert bound.tighten(whole).seconds == pytest.approx(few.seconds, rel=1e-6)


def test_what_is_replayed_in_several_parts_of_backward_counts_in_each() -> None:
    """The linear program alone lets one replay serve all parts."""
    problem = make_problem(toys.chain(8, bandwidth=0.5 * MIB))
    limit = least_memory(problem)[0]
    alone = lower_bound(problem, limit).seconds
    plan = make_plan(problem, limit, 'exact')
    assert alone * 1.1 < bound_of_parts(problem, limit) <= plan.predicted_seconds
    plan = make_plan(problem, limit, 'hybrid')  # whose gap is wide without
    assert plan.lower_bound_seconds == bound_of_parts(problem, limit)
