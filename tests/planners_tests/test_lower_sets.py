"""The programme against brute force, its families against an enumeration."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys
from support.matrices import several

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.lab.planners.lower_sets import (
    UNLIMITED,
    boundaries,
    make_stages,
    pruned_family,
    strategies,
    whole_family,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.search.replay_graph import make_replay_graph
from chainer_hybridmem.planning.simulation import make_problem

MIB = toys.MIB
Nodes = frozenset[int]
seeds = st.integers(0, 10_000)


class Dag:
    """A random graph with whole seconds, and the paper's formulas on sets."""

    def __init__(self, seed: int, most: int = 6) -> None:
        rng = random.Random(seed)
        self.n = rng.randint(1, most)
        pairs = itertools.combinations(range(self.n), 2)
        self.edges = [pair for pair in pairs if rng.random() < 0.4]
        self.seconds = [rng.randint(0, 3) for _ in range(self.n)]
        self.sizes = [rng.randint(1, 9) for _ in range(self.n)]
        self.reads = np.zeros((self.n, self.n), bool)
        for source, reader in self.edges:
            self.reads[reader, source] = True

    def lower_sets(self) -> list[Nodes]:
        subsets = itertools.chain.from_iterable(
            itertools.combinations(range(self.n), r) for r in range(self.n + 1)
        )
        return [
            frozenset(s)
            for s in subsets
            if all(source in s for source, reader in self.edges if reader in s)
        ]

    def boundary(self, lower: Nodes) -> Nodes:
        return frozenset(a for a, b in self.edges if a in lower and b not in lower)

    def nbytes(self, nodes: Nodes) -> int:
        return sum(self.sizes[v] for v in nodes)

    def judge(self, sets: tuple[Nodes, ...]) -> tuple[int, int]:
        """Seconds of the replays, and bytes of the dearest stage."""
        kept, before, overhead, peak = Nodes(), Nodes(), 0, 0
        for lower in sets:
            stage = lower - before
            readers = {b for a, b in self.edges if a in lower}
            read = Nodes(a for a, b in self.edges if b in readers)
            needed = self.nbytes(kept) + 2 * self.nbytes(stage)
            needed += self.nbytes(Nodes(readers - lower)) + self.nbytes(read - lower)
            peak = max(peak, needed)
            overhead += sum(self.seconds[v] for v in stage - self.boundary(lower))
            kept, before = kept | self.boundary(lower), lower
        return overhead, peak

    def sequences(self, family: list[Nodes]) -> Iterator[tuple[Nodes, ...]]:
        """All growing sequences that end with everything."""

        def from_(lower: Nodes) -> Iterator[tuple[Nodes, ...]]:
            if len(lower) == self.n:
                yield ()
            for larger in family:
                if lower < larger:
                    for rest in from_(larger):
                        yield larger, *rest

        return from_(Nodes())

    def cheapest(self, family: list[Nodes], budget: int) -> int | None:
        judged = (self.judge(sequence) for sequence in self.sequences(family))
        return min((time for time, peak in judged if peak <= budget), default=None)


def as_sets(family: np.ndarray) -> list[Nodes]:
    return [frozenset(np.flatnonzero(row).tolist()) for row in family]


def found(dag: Dag, family: np.ndarray, budget: int) -> Any:
    seconds = np.array(dag.seconds, float)
    stages = make_stages(dag.reads, seconds, np.array(dag.sizes), family)
    total = int(seconds.sum())
    return strategies(stages, budget, total, max(1, total), 1_000)


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_families_are_those_of_an_enumeration(seed: int) -> None:
    dag = Dag(seed)
    every = dag.lower_sets()
    whole = whole_family(dag.reads, len(every))
    assert sorted(map(sorted, as_sets(whole))) == sorted(map(sorted, every))
    needs = [Nodes({v}) for v in range(dag.n)]
    for source, reader in sorted(dag.edges, key=lambda edge: edge[1]):
        needs[reader] |= needs[source]
    pruned = as_sets(pruned_family(dag.reads))
    assert set(pruned) == {Nodes(), *needs, Nodes(range(dag.n))}
    assert len(pruned) == len(set(pruned))
    assert [dag.boundary(lower) for lower in as_sets(whole)] == as_sets(
        boundaries(dag.reads, whole)
    )


@given(seeds)
@settings(max_examples=several(15, all_of_them=60), deadline=None)
def test_the_programme_is_as_good_as_brute_force(seed: int) -> None:
    """At every budget, for both families; whole seconds are told apart exactly."""
    dag = Dag(seed, 5)
    exact, pruned = whole_family(dag.reads, 100), pruned_family(dag.reads)
    least_of: dict[int, list[float]] = {}
    for family in (exact, pruned):
        for budget in range(0, 5 * sum(dag.sizes), 3):
            result = found(dag, family, budget)
            best = dag.cheapest(as_sets(family), budget)
            assert [s.seconds for s in result[:1]] == ([] if best is None else [best])
            least_of.setdefault(budget, []).append(np.inf if best is None else best)
    assert all(whole <= approximate for whole, approximate in least_of.values())


@given(seeds)
@settings(max_examples=several(15, all_of_them=60), deadline=None)
def test_strategies_are_what_they_say(seed: int) -> None:
    """By the formulas on sets; from the cheapest to the dearest, under the budget."""
    dag = Dag(seed)
    family = whole_family(dag.reads, 100)
    named = as_sets(family)
    for budget in (UNLIMITED, 3 * sum(dag.sizes)):
        result = found(dag, family, budget)
        assert [s.seconds for s in result] == sorted({s.seconds for s in result})
        for strategy in result:
            sets = tuple(named[i] for i in strategy.sets)
            assert sets[0] == Nodes()
            judged = dag.judge(sets[1:])
            assert judged == (strategy.seconds, strategy.needed_bytes)
            assert strategy.needed_bytes <= budget


def test_no_more_strategies_than_asked_for() -> None:
    reads = np.eye(8, k=-1, dtype=bool)
    stages = make_stages(reads, np.ones(8), np.ones(8, np.int64), pruned_family(reads))
    whole = strategies(stages, UNLIMITED, 8.0, 8, 1_000)
    few = strategies(stages, UNLIMITED, 8.0, 8, 2)
    assert [s.seconds for s in whole] == list(range(1, 9))
    assert few == [whole[0], whole[-1]]


def test_a_transient_is_one_node_with_its_readers() -> None:
    """Convolution, normalization that forward drops, addition with a skip."""
    profile = toys.graph(
        [[], [0], [1, 0], [2], [3], [2, 4]],
        seconds=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        nbytes=[MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB, 6 * MIB],
        transient=[False, True, False, True, False, False],
    )
    graph = make_replay_graph(make_problem(profile))
    assert graph.seconds.tolist() == [1.0, 5.0, 9.0, 6.0]
    assert graph.nbytes.tolist() == [MIB, 3 * MIB, 5 * MIB, 6 * MIB]
    assert np.argwhere(graph.reads).tolist() == [[1, 0], [2, 1], [3, 1], [3, 2]]
    assert graph.node.tolist() == [0, 1, 2, 3]


def test_what_lies_between_a_transient_and_its_reader_is_with_them() -> None:
    profile = toys.graph([[], [0], [0, 1], [2]], transient=[True, False, False, False])
    graph = make_replay_graph(make_problem(profile))
    assert graph.node.tolist() == [0, 0, 1]
    assert graph.seconds.tolist() == [3.0, 1.0]


@given(seeds)
@settings(max_examples=several(15, all_of_them=60), deadline=None)
def test_graphs_of_any_network(seed: int) -> None:
    """In topological order; every map that can be recomputed is in one node."""
    problem = make_problem(toys.random_network(seed, 9))
    graph = make_replay_graph(problem)
    assert not np.triu(graph.reads).any()
    assert ((graph.node >= 0) == problem.recomputable).all()
    able = problem.recomputable
    sizes = problem.arrays.size[: len(able)][able]
    assert graph.nbytes.sum() == sizes.sum()


@pytest.mark.parametrize('planner', ['checkpoint-dp', 'checkpoint-dp-exact'])
def test_faster_than_square_root_segments(planner: str) -> None:
    """It keeps as much as fits."""
    problem = make_problem(toys.chain(16))
    rule = make_plan(problem, 2**50, 'checkpoint-sqrt')
    limits = [rule.predicted_peak_bytes + i * 20 * MIB for i in range(5)]
    seconds = [make_plan(problem, limit, planner).predicted_seconds for limit in limits]
    assert seconds[0] <= rule.predicted_seconds
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


def test_too_many_lower_sets() -> None:
    """Eight branches that know nothing of each other have 2**8 and more."""
    nodes = [toys.Node(()) for _ in range(8)]
    nodes.append(toys.Node(tuple((i, 0) for i in range(8))))
    problem = make_problem(toys.network(nodes))
    limit = problem.in_core_peak_bytes - 1
    plan = make_plan(problem, limit, 'checkpoint-dp-exact')
    count = plan.options['lower_sets']
    assert count >= 2**8
    with pytest.raises(OptionError, match=f'more than {count - 1} lower sets'):
        make_plan(problem, limit, 'checkpoint-dp-exact', most_lower_sets=count - 1)
    again = make_plan(problem, limit, 'checkpoint-dp-exact', most_lower_sets=count)
    assert again.maps == plan.maps


@pytest.mark.parametrize('most', [0, 2.5, None])
def test_limits_of_lower_sets_that_are_none(most: Any) -> None:
    with pytest.raises(OptionError, match='most_lower_sets'):
        make_plan(toys.chain(), '1GiB', 'checkpoint-dp-exact', most_lower_sets=most)
