"""Chains with a closed optimum: how far from it bounds and plans are.

    python -m benchmarks run chains [--chains 1000] [--seed 0] [--planner hybrid]

Draws chains of 20 to 200 equal steps and any number of slots (``lab/contest/chains``)
whose optimum is a formula, and asks for the bound of every schedule, for that of plans,
and for a plan. Writes ``benchmarks/results/chains.json``: shares of the optimum and CPU
seconds, the worst of them with their chains.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import saving
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.lab.contest import chains
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.search.bound import bound_of_schedules, lower_bound
from chainer_hybridmem.planning.simulation import make_problem

NAME = 'chains'
LEVEL = 1e-8  # of the optimum; what is less away from it is equal
LISTED = 20
SAVED = 50  # chains after which the result is written, too
ASKED = {'schedules': 1, 'plans': 1, 'plan': -1}  # whether it is at most the optimum


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--chains', type=int, default=1000)
    parser.add_argument('--seed', type=int, default=0, help='of the first chain')
    parser.add_argument('--planner', default='hybrid')


def main(options: argparse.Namespace) -> int:
    """Tries all chains; 1 if a bound is above the optimum, or a plan below it."""
    rows: list[dict[str, Any]] = []
    body = {}
    with Progress(options.chains, sys.stderr) as progress:
        for seed in range(options.seed, options.seed + options.chains):
            progress.step(f'chain {seed}')
            rows.append(try_chain(seed, options.planner))
            if len(rows) % SAVED == 0 or len(rows) == options.chains:
                body = {'planner': options.planner, 'seed': options.seed}
                body |= summarise(rows)
                saving.save(NAME, body)
    print(body)
    return int(body['wrong'] > 0)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many are equal to the optimum, and what is farthest from it."""
    body: dict[str, Any] = {'chains': len(rows), 'wrong': 0}
    for what, sign in ASKED.items():
        shares = [sign * row[what] for row in rows]
        body['wrong'] += sum(share > sign + LEVEL for share in shares)
        body[what] = {
            'equal': sum(abs(row[what] - 1) <= LEVEL for row in rows),
            'worst': abs(min(shares)),
            'most_seconds': max(row[f'{what}_seconds'] for row in rows),
        }
    far = [row for row in rows if any(abs(row[what] - 1) > LEVEL for what in ASKED)]
    return body | {'far': far[:LISTED]}


def try_chain(seed: int, planner: str) -> dict[str, Any]:
    """Bounds and plan of one chain over its optimum, with CPU seconds."""
    chain = chains.draw_chain(seed)
    limit, optimum = chains.limit_of(chain), chains.fastest_seconds(chain)
    profile = chains.make_profile(chain)
    asked: dict[str, Callable[[], float]] = {
        'schedules': lambda: bound_of_schedules(make_problem(profile), limit),
        'plans': lambda: lower_bound(make_problem(profile), limit).seconds,
        'plan': lambda: make_plan(profile, limit, planner).predicted_seconds,
    }
    row: dict[str, Any] = {'seed': seed, **chain._asdict()}
    for what, ask in asked.items():
        began = time.process_time()
        row[what] = ask() / optimum
        row[f'{what}_seconds'] = time.process_time() - began
    return row
