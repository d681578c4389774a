"""Capuchin's run-time feedback on a link that gets slower while training runs.

Sessions with planner ``capuchin`` whose link loses 30 % of its bandwidth after some
iterations. Some iterations later feedback is switched on in every other session.
Recorded are the seconds that compute waits for copies in every iteration. The same
change is made in the simulator, with the profile and plan of each session: there
feedback takes the lateness as its step, or the paper's 5 % of a copy's time.

The link moves a third of all feature maps, each way, in the time of one in-core
iteration; two thirds of what lies above parameters, gradients and optimizer state are
inside the limit. Without ``--arena`` sessions have none, so that nothing but triggers
changes.

    python -m benchmarks run rivals.feedback [--rounds 1] [--arena]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

from benchmarks import common

# isort: split
import chainer
import numpy as np

import chainer_hybridmem as hybridmem
from benchmarks import cifar
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.feedback import moved_earlier
from chainer_hybridmem.planning.simulation import make_problem, simulate

ARCH, BATCHSIZE = 'ResNet50', 4
PART = 0.65  # of what lies above parameters, gradients and optimizer state
LINK = 0.35  # of all feature maps per in-core iteration
SLOWER = 0.7
SLOW_FROM, FEEDBACK_FROM, ITERATIONS = 10, 15, 24
MEDIAN_OF = 5  # iterations before each change
COLUMNS = {
    'feedback': str,
    'before': '{:.3f}'.format,
    'slower': '{:.3f}'.format,
    'at_last': '{:.3f}'.format,
    'operations_earlier': str,
}


class Training(common.Training):
    """A small residual network on pictures of 32x32."""

    def __init__(self) -> None:
        np.random.seed(0)
        self.model = getattr(cifar, ARCH)()
        rng = np.random.RandomState(1)
        x = rng.rand(BATCHSIZE, 3, 32, 32).astype(np.float32)
        self.batch = (x, rng.randint(0, 10, BATCHSIZE).astype(np.int32))
        self.optimizer = chainer.optimizers.MomentumSGD(0.002).setup(self.model)
        self.losses: list[float] = []


def conditions() -> dict[str, Any]:
    """Limit and bandwidth, from an in-core session."""
    training = Training()
    with hybridmem.optimize(training.model, '1TB', planner='in-core') as session:
        for _ in range(6):
            training.step()
        fixed = training.fixed_bytes()
    figures = session.statistics()
    maps = sum(s.nbytes for s in make_problem(session.profile).maps)
    peak, seconds = figures['guided_peak_bytes'], figures['iteration_seconds']
    return {
        'in_core_peak_bytes': peak,
        'in_core_seconds': seconds,
        'limit_bytes': int(fixed + (peak - fixed) * PART),
        'bandwidth': LINK * maps / seconds,
    }


def run(given: dict[str, Any], feedback: bool, arena: bool) -> dict[str, Any]:
    """One session."""
    training = Training()
    figures = []
    with hybridmem.optimize(
        training.model,
        given['limit_bytes'],
        planner='capuchin',
        link_bandwidth=given['bandwidth'],
        arena=arena,
        feedback=False,
    ) as session:
        for i in range(ITERATIONS):
            if i == SLOW_FROM:
                session.device.throttle(given['bandwidth'] * SLOWER)
            if i == FEEDBACK_FROM:
                session.options.feedback = feedback
                plan, profile = session.plan, session.profile
            training.step()
            session.finish_iteration()
            figures.append(session.last_iteration())
    stalls = [f['stall_seconds'] for f in figures]

    def median_before(end: int) -> float:
        return statistics.median(stalls[end - MEDIAN_OF : end])

    return {
        'feedback': feedback,
        'before': median_before(SLOW_FROM),
        'slower': median_before(FEEDBACK_FROM),
        'at_last': median_before(ITERATIONS),
        'operations_earlier': operations_earlier(plan, session.plan),
        'stall_seconds': stalls,
        'iteration_seconds': [f['seconds'] for f in figures],
        'swap': session.plan.count(Action.SWAP),
        'recompute': session.plan.count(Action.RECOMPUTE),
        'peak_bytes': session.statistics()['guided_peak_bytes'],
        'last_loss': training.losses[-1],
        'simulated': [rehearse(profile, plan, step) for step in (True, False)],
    }


def operations_earlier(before: Plan, after: Plan) -> int:
    """By how many operations all triggers have moved together."""
    return sum(
        old.swap_in_before - new.swap_in_before
        for old, new in zip(before.maps, after.maps, strict=True)
    )


def rehearse(profile: Profile, plan: Plan, by_lateness: bool) -> dict[str, Any]:
    """Simulated iterations on the slower link until nothing moves any more."""
    link = dataclasses.replace(
        profile.link,
        d2h_bytes_per_second=profile.link.d2h_bytes_per_second * SLOWER,
        h2d_bytes_per_second=profile.link.h2d_bytes_per_second * SLOWER,
    )
    problem = make_problem(dataclasses.replace(profile, link=link))
    stalls: list[float] = []
    swap_ins: list[float] = []
    while True:
        timeline = simulate(problem, plan)
        late = {
            i.storage: i.end_seconds - i.start_seconds
            for i in timeline.intervals
            if i.kind == 'stall' and 'swap-in' in i.label
        }
        stalls.append(timeline.stall_seconds)
        swap_ins.append(sum(late.values()))
        step = late if by_lateness else dict.fromkeys(late, 0.0)
        moved = moved_earlier(problem, plan, step)
        if moved is plan:
            break
        plan = moved
    return {
        'by_lateness': by_lateness,
        'stall_seconds': stalls,
        'swap_in_stall_seconds': swap_ins,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--rounds', type=int, default=1)
    parser.add_argument('--arena', action='store_true', help='as sessions have it')
    parser.add_argument('--name', default='rivals_feedback', help='of the result file')


def main(options: argparse.Namespace) -> int:
    given, rows = conditions(), []
    for turn in range(2 * options.rounds):
        rows.append(run(given, turn % 2 == 0, options.arena))
        print(common.table(rows[-1:], COLUMNS), flush=True)
    body = {
        'network': f'{ARCH} b{BATCHSIZE}, 32x32',
        'arena': options.arena,
        'slower': SLOWER,
        'slow_from': SLOW_FROM,
        'feedback_from': FEEDBACK_FROM,
        **given,
        'rows': rows,
    }
    common.save(options.name, body)
    print(common.table(rows, COLUMNS))
    for row in rows:
        for steps in row['simulated']:
            step = 'lateness' if steps['by_lateness'] else '5 %'
            late = steps['swap_in_stall_seconds']
            print(f'step {step}: {late[0]:.3f} to {late[-1]:.3f} s late', end=', ')
            print(f'{len(late) - 1} iterations')
    return 0
