"""Every planner on networks nobody has thought of, and with all of its options."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys
from support.matrices import several

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.planners import PLANNERS, find_planner, options_of
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.testing.planners import plan_within

every_planner = pytest.mark.parametrize('name', list(PLANNERS))

# Short searches: it is the plans that are looked at, not how good they are.
QUICK: dict[str, dict[str, Any]] = {
    'swap-opt': {'node_budget': 100},
    'pooch': {'node_budget': 100},
    'autoswap-bo': {'evaluations': 6},
    'manual': {'actions': {'*': 'swap'}},
    'exact': {'time_budget': 0.2},
    'hybrid': {'steps': 200},
}
VALUES: dict[str, tuple[Any, ...]] = {
    'node_budget': (1, 7, 500),
    'segments': (None, 1, 2, 9),
    'most_lower_sets': (1, 50),
    'smallest_bytes': (0, 2**20, 2**40),
    'evaluations': (1, 4, 9),
    'rehearsals': (0, 1, 20),
    'actions': (None, {}, {'*': 'swap'}, {'*': 'recompute', '*@0': 'keep'}),
    'steps': (None, 0, 50),
    'time_budget': (None, 0.01),
    'tolerance': (0, 0.1),
    'seed': (0, 3),
}


def check(problem: Problem, limit: int, name: str, **options: Any) -> Plan | None:
    """What the suite for planners says about a plan; None if nothing fits."""
    try:
        return plan_within(problem, limit, name, **options)
    except OptionError as error:
        assert 'lower sets' in str(error)
        return None


@every_planner
@settings(max_examples=several(8, all_of_them=25), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 9), share=st.floats(0.0, 1.2)
)
def test_networks_that_are_drawn(
    name: str, seed: int, nodes: int, share: float
) -> None:
    """Fan-out, skips, views, several outputs, masks, latencies, any limit."""
    problem = make_problem(toys.random_network(seed, nodes))
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    limit = least + int(share * max(0, most - least))
    plan = check(problem, limit, name, **QUICK.get(name, {}))
    if name == 'hybrid':
        assert plan is not None  # it fits wherever anything fits


@every_planner
def test_all_combinations_of_options(name: str) -> None:
    problem = make_problem(toys.chain(4))
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    options = options_of(name)
    assert set(options) <= set(VALUES), 'values for a new option are missing'
    defaults = find_planner(name).defaults
    tried = (
        [v for v in VALUES[option] if v is not None or defaults[option] is None]
        for option in options
    )
    for values in itertools.product(*tried):
        chosen = dict(zip(options, values, strict=True))
        for limit in (least, (least + most) // 2, most):
            plan = check(problem, limit, name, **chosen)
            if plan is not None:
                assert plan.options.keys() >= chosen.keys()
