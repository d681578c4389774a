"""Rules per layer: every planner obeys them or refuses, and the bound knows them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from typing import Any

import numpy as np
import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError, OptionError, PlanError
from chainer_hybridmem.planning.planners import PLANNERS, find_planner, make_plan
from chainer_hybridmem.planning.planners.make import price_rules
from chainer_hybridmem.planning.records.library import load_profile
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.plan_file import parse_plan, serialise_plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.rules import check_rules
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    NUMBERS,
    RECOMPUTE,
    SWAP,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate
from chainer_hybridmem.planning.simulation.obedience import (
    breaks_rules,
    has_no_choice,
    obeyed,
)
from chainer_hybridmem.planning.simulation.problem import with_rules

MIB = toys.MIB
OPTIONS: dict[str, dict[str, Any]] = {
    'exact': {'time_budget': 2.0},
    'autoswap-bo': {'evaluations': 5},
    'hybrid': {'steps': 2000},
}
SAYINGS = (
    *(action.value for action in Action),
    *(f'no {action.value}' for action in Action),
    *('at most 20MiB', 'at most 0'),
)
SLOW = ('exact', 'autoswap-bo')
NETWORKS = {
    'slow link': toys.chain(7, bandwidth=2.0 * MIB),
    'residual': toys.graph(
        [[], [0], [1], [0, 2], [3], [4], [3, 5], [6]],
        seconds=[1.0, 0.1, 0.1, 0.2, 1.0, 0.1, 0.2, 2.0],
        transient=[False, True, False, False, True, False, False, False],
    ),
    'network 6': toys.random_network(6, 7),
}
RULES: list[dict[str, str]] = [
    {'/1/*': 'keep'},
    {'0': 'swap', '5': 'no swap'},
    {'*3/*': 'recompute', '/0/*': 'no recompute'},
    {'Layer': 'at most 20MiB', 'Node': 'at most 20MiB', '4': 'no keep'},
    {'*': 'no recompute', '/1/*': 'keep'},
    {'*': 'no swap'},
]


def ruled(profile: Profile, rules: Any) -> Problem | None:
    """The problem; None if the rules contradict this profile."""
    try:
        return make_problem(profile, rules=rules)
    except OptionError:
        return None


def known(rules: dict[str, str], name: str) -> dict[str, str]:
    """Without the rule about the other kind of toys."""
    other = 'Layer' if name.startswith('network') else 'Node'
    return {pattern: says for pattern, says in rules.items() if pattern != other}


def assert_obeyed(profile: Profile, plan: Plan, rules: dict[str, str]) -> None:
    """By names of toys alone, with nothing that plans or checks them."""
    for pattern, says in rules.items():
        number = re.sub(r'\D', '', pattern)
        function = pattern if pattern in ('Layer', 'Node') else ''
        entries = [
            (profile.storages[entry.storage], entry.action.value)
            for entry in plan.maps
            if not number or profile.storages[entry.storage].label[1] == number
        ]
        assert all(storage.label.endswith(function) for storage, _ in entries)
        actions = {action for _, action in entries}
        if says.startswith('at most'):
            kept = sum(s.nbytes for s, action in entries if action == 'keep')
            assert kept <= 20 * MIB
        elif says.startswith('no '):
            assert says[3:] not in actions
        else:
            assert actions <= {says}
        if says == 'no recompute':
            replayed = {profile.operations[r.operation].label for r in plan.replays}
            assert not any(not number or label[1] == number for label in replayed)


def limits(problem: Problem) -> list[int]:
    least = least_memory(with_rules(problem, ()))[0]
    most = problem.in_core_peak_bytes
    return [(3 * least + most) // 4, (least + 3 * most) // 4, most]


@functools.cache
def problem_of(network: str, number: int) -> tuple[Problem, list[int]]:
    """Planners share a problem, which finds the bound once for each limit."""
    rules = known(RULES[number], network)
    problem = make_problem(NETWORKS[network], rules=rules)
    return problem, limits(problem)


@pytest.mark.matrix
@pytest.mark.parametrize('network', list(NETWORKS))
@pytest.mark.parametrize('planner', list(PLANNERS))
def test_a_planner_obeys_or_refuses(planner: str, network: str) -> None:
    profile = NETWORKS[network]
    can = find_planner(planner).actions
    plans = 0
    for number in range(0, len(RULES), 3 if planner in SLOW else 1):
        problem, some = problem_of(network, number)
        rules = {rule.pattern: rule.says for rule in problem.rules}
        for limit in some[:: 2 if planner in SLOW else 1]:
            try:
                plan = make_plan(problem, limit, planner, **OPTIONS.get(planner, {}))
            except InfeasibleError as error:
                assert error.limit_bytes == limit
                continue
            except OptionError as error:
                assert can != frozenset(Action)
                assert f"Planner '{planner}' cannot obey the rules" in str(error)
                continue
            plans += 1
            assert_obeyed(profile, plan, rules)
            loads = check_plan(profile, plan, limit)
            assert max(loads) == plan.predicted_peak_bytes
            seconds = simulate(profile, plan).total_seconds
            assert seconds == pytest.approx(plan.predicted_seconds)
            assert plan.lower_bound_seconds <= plan.predicted_seconds + 1e-9
            assert plan.rules == tuple(rules.items())
            assert parse_plan(serialise_plan(plan)) == plan
    assert plans > 0


def draw_rules(rng: random.Random, nodes: int) -> list[tuple[str, str]]:
    patterns = ['*', *(f'/{k}/*' for k in range(nodes))]
    chosen = [rng.choice(patterns) for _ in range(rng.randint(1, 3))]
    return [(pattern, rng.choice(SAYINGS)) for pattern in chosen]


def draw_problem(seed: int, nodes: int) -> tuple[Problem, random.Random] | None:
    rng = random.Random(seed)
    profile = (toys.random_network if seed % 2 else toys.random_graph)(seed, nodes)
    problem = ruled(profile, draw_rules(rng, nodes))
    return None if problem is None else (problem, rng)


def brute_force(problem: Problem, limit: int) -> float:
    """Fastest of all assignments that pass for obedient in their plan."""
    plain, best = with_rules(problem, ()), float('inf')
    choices = [
        (KEEP, SWAP, RECOMPUTE) if r else (KEEP, SWAP) for r in plain.recomputable
    ]
    pairs = tuple(rule.pair for rule in problem.rules)
    for action in itertools.product(*choices):
        for barrier in (False, True):
            search = Search(plain, limit, barrier=barrier)
            candidate = search.evaluate(np.array(action, np.int64))
            if not candidate.seconds < best:
                continue
            plan = dataclasses.replace(search.finish('any', candidate), rules=pairs)
            try:
                check_plan(plain.profile, plan)
            except PlanError:
                continue
            best = candidate.seconds
    return best


@pytest.mark.parametrize('seed', range(14))
def test_exact_is_the_best_obedient_assignment(seed: int) -> None:
    drawn = draw_problem(seed, 5)
    if drawn is None or not 1 <= len(drawn[0].maps) <= 6:
        pytest.skip('rules that contradict each other, or too many maps')
    problem, rng = drawn
    plain = with_rules(problem, ())
    least, most = least_memory(plain)[0], plain.in_core_peak_bytes
    limit = rng.randint(least, max(least, most))
    best = brute_force(problem, limit)
    bound = lower_bound(problem, limit).seconds
    assert bound <= best * (1 + 1e-9)
    assert bound >= lower_bound(plain, limit).seconds
    if best == float('inf'):
        with pytest.raises(InfeasibleError):
            make_plan(problem, limit, 'exact')
        return
    plan = make_plan(problem, limit, 'exact')
    assert plan.options['proved']
    if plan.replays or plan.count(Action.KEEP) < len(plan.maps):
        assert plan.predicted_seconds == pytest.approx(best, rel=1e-5)
    assert plan.predicted_seconds <= best * (1 + 1e-5)


@pytest.mark.parametrize('seed', range(40))
def test_whatever_is_evaluated_obeys(seed: int) -> None:
    drawn = draw_problem(seed, 9)
    if drawn is None:
        return
    problem, rng = drawn
    a = problem.arrays
    for _ in range(20):
        action = np.array([rng.randrange(3) for _ in problem.maps], np.int64)
        result = obeyed(a, action)
        assert not breaks_rules.py_func(a, result)
        assert (obeyed(a, result) == result).all()
        if not breaks_rules.py_func(a, action):
            assert (result == action).all()


SHIPPED = 'shipped:alexnet-b32-host'


@pytest.mark.parametrize('planner', ['hybrid', 'pooch', 'capuchin'])
def test_a_shipped_profile(planner: str) -> None:
    rules = {
        'LocalResponseNormalization': 'keep',
        '*Pooling*': 'no recompute',
        'ReLU': 'at most 40MiB',
    }
    problem = make_problem(load_profile(SHIPPED), rules=rules)
    plan = make_plan(problem, problem.in_core_peak_bytes * 9 // 10, planner)
    check_plan(problem.profile, plan, plan.memory_limit_bytes)
    storages = problem.profile.storages
    kept = [storages[e.storage] for e in plan.maps if e.action is Action.KEEP]
    assert 'LocalResponseNormalization' in {s.label[1:] for s in kept}
    assert sum(s.nbytes for s in kept if s.label == '/ReLU') <= 40 * MIB
    pooled = [e for e in plan.maps if 'Pooling' in storages[e.storage].label]
    assert pooled and not any(e.action is Action.RECOMPUTE for e in pooled)


@pytest.mark.matrix
@pytest.mark.parametrize('says', ['swap', 'no keep', 'at most 0'])
@pytest.mark.parametrize('name', ['resnet50-b8-host', 'lstm-b128-host'])
def test_no_rule_is_about_what_backward_begins_with(name: str, says: str) -> None:
    """Planners and the checker agree on that."""
    problem = make_problem(load_profile(f'shipped:{name}'), rules={'*': says})
    plan = make_plan(problem, 1 << 50, steps=100)
    actions = [entry.action for entry in plan.maps]
    stays = has_no_choice(problem.arrays)
    assert stays.any() and Action.KEEP not in np.array(actions)[~stays]
    for m in np.flatnonzero(stays):
        assert actions[m] is Action.KEEP
    check_plan(problem.profile, plan)


def test_what_a_rule_costs_is_the_difference_of_two_searches() -> None:
    rules = {'/0/*': 'keep', '/5/*': 'swap'}
    problem = make_problem(NETWORKS['slow link'], rules=rules)
    limit = limits(problem)[1]
    seconds = make_plan(problem, limit, 'hybrid').predicted_seconds
    costs = price_rules(problem, limit, 'hybrid')
    assert [(cost.pattern, cost.says, cost.maps) for cost in costs] == [
        ('/0/*', 'keep', 1),
        ('/5/*', 'swap', 1),
    ]
    for cost in costs:
        others = {p: says for p, says in rules.items() if p != cost.pattern}
        without = make_plan(NETWORKS['slow link'], limit, 'hybrid', rules=others)
        expected = seconds - without.predicted_seconds
        assert cost.seconds == pytest.approx(expected, rel=0.005, abs=1e-9)
    assert max(cost.seconds or 0 for cost in costs) > 0.01
    assert price_rules(with_rules(problem, None), limit, 'hybrid') == ()


@pytest.mark.parametrize(
    ('rules', 'message'),
    [
        ({'/9/*': 'keep'}, r"called '/9/\*'.* Some names there are: /0/Layer"),
        ({'Lyer': 'keep'}, r"called 'Lyer'.* Nearest names: Layer"),
        ({'*': 'kep'}, r"is 'kep'; one of keep, .* Did you mean 'keep'\?"),
        (
            {'*/conv1/*': 'at most 12 lots'},
            r"^The rule for '\*/conv1/\*' is 'at most 12 lots', but '12 lots' is not a "
            r"size; write a number with a unit, such as 'at most 2GiB'",
        ),
        ({'*': 'at most'}, "'' is not a size"),
        ({'*': 'at most -3GiB'}, "'-3GiB' is not a size"),
        ({'*': 'At most  3GiB'}, r"Did you mean 'at most 3GiB'\?"),
        ({'*': 'No Swap'}, r"Did you mean 'no swap'\?"),
        ({'*': 'swap', '0': 'keep'}, r'nothing to do with /0/Layer .*swap; 0: keep'),
        ({'*': 'keep', '0': 'at most 1MiB'}, r"Rule '0: at most 1MiB' cannot hold"),
        ({'': 'keep'}, "A rule is for ''"),
        ('keep', 'a mapping from patterns to rules is needed'),
        ([('0', 'keep', 'swap')], 'a pattern and a rule are needed'),
    ],
)
def test_rules_that_cannot_be(rules: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_plan(toys.chain(), '1GiB', rules=rules)


def test_several_rules_for_one_pattern() -> None:
    rules = check_rules({'0': ['no swap', 'at most  1MiB', 'no swap']})
    assert [rule.pair for rule in rules] == [('0', 'no swap'), ('0', 'at most 1MiB')]
    assert check_rules([rule.pair for rule in rules]) == check_rules(rules) == rules


def test_manual_does_not_contradict_itself() -> None:
    with pytest.raises(OptionError, match=r"'manual' cannot obey .*/0/Layer"):
        make_plan(
            toys.chain(),
            '1GiB',
            'manual',
            rules={'0': 'keep'},
            actions={'/0/*': 'swap'},
        )
    plan = make_plan(toys.chain(), '1GiB', 'manual', rules={'0': 'swap'})
    assert plan.maps[0].action is Action.SWAP
    assert plan.count(Action.KEEP) == len(plan.maps) - 1


@pytest.mark.parametrize('says', ['keep', 'no swap', 'recompute'])
def test_the_checker_names_the_rule(says: str) -> None:
    profile = toys.chain()
    plan = make_plan(profile, '60MiB', 'swap-all')
    broken = dataclasses.replace(plan, rules=(('/2/*', says),))
    with pytest.raises(PlanError, match=rf'storage 2|map 2 .*/2/\*: {says}'):
        check_plan(profile, broken)


def test_the_checker_counts_and_looks_at_replays() -> None:
    profile = toys.chain()
    plan = make_plan(profile, '1GiB', 'in-core')
    broken = dataclasses.replace(plan, rules=(('*', 'at most 10MiB'),))
    with pytest.raises(PlanError, match=r'keeps \d+ bytes where a rule allows'):
        check_plan(profile, broken)
    problem = make_problem(NETWORKS['residual'])
    search = Search(problem, 2**40)
    plan = search.finish('any', search.evaluate(search.fill(RECOMPUTE)))
    passed = {replay.operation for replay in plan.replays}
    transient = passed - {
        problem.profile.storages[e.storage].producer for e in plan.maps
    }
    assert transient  # a function whose result forward drops
    number = transient.pop()
    broken = dataclasses.replace(plan, rules=((f'/{number}/*', 'no recompute'),))
    with pytest.raises(PlanError, match="a rule says 'no recompute'"):
        check_plan(problem.profile, broken)
    obedient = make_problem(problem.profile, rules={f'/{number}/*': 'no recompute'})
    assert obedient.recomputable.sum() < problem.recomputable.sum()


def test_a_planner_that_ignores_rules_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        PLANNERS,
        'careless',
        lambda problem, limit: make_plan(problem.profile, limit, 'swap-all'),
    )
    assert make_plan(toys.chain(), '60MiB', 'careless', rules={'0': 'swap'}).rules
    with pytest.raises(PlanError, match='a rule forbids it: 0: keep'):
        make_plan(toys.chain(), '60MiB', 'careless', rules={'0': 'keep'})


def test_numbers_of_actions() -> None:
    assert [NUMBERS[action] for action in Action] == [KEEP, SWAP, RECOMPUTE]
