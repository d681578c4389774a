"""Plans taken to other batch sizes, links and devices, beside fresh searches.

    python -m benchmarks run carried

A plan for one network, batch size and GPU model is taken to other ones with planner
``carry``; the default planner searches there, too. Writes ``carried.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import saving
from chainer_hybridmem.commands import samples
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.estimation import Estimator, load_device_model
from chainer_hybridmem.planners import make_plan
from chainer_hybridmem.records import library
from chainer_hybridmem.records.profile import Link
from chainer_hybridmem.simulation import Problem, make_problem

SOURCES = (
    ('resnet50', 640, 'v100-16gb-pcie3'),
    ('googlenet', 1024, 'v100-16gb-pcie3'),
    ('vgg16', 256, 'v100-16gb-pcie3'),
)
SHARES = (0.5, 2 / 3, 0.9, 1.1, 1.25, 1.5)  # of the batch
LINKS = (0.25, 0.5, 2.0, 4.0)  # of the bandwidth
GPUS = ('p100', 'titan-v', 'rtx3090')
SAMPLES = 2, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""


def targets(
    estimators: dict[str, Estimator], batchsize: int, gpu: str
) -> Iterator[tuple[str, Problem, int]]:
    """What a plan is taken to: name, problem and limit in bytes."""
    here = load_device_model(gpu)
    for share in SHARES:
        to = round(batchsize * share)
        problem = make_problem(estimators[gpu].profile(to))
        yield f'batch {to}', problem, here.memory_bytes
    profile = estimators[gpu].profile(batchsize)
    for factor in LINKS:
        slower = dataclasses.replace(profile, link=scaled(profile.link, factor))
        yield f'link x {factor:g}', make_problem(slower), here.memory_bytes
    for other in GPUS:
        problem = make_problem(estimators[other].profile(batchsize))
        yield other, problem, load_device_model(other).memory_bytes


def scaled(link: Link, factor: float) -> Link:
    """A link that is faster by a factor, in both directions."""
    return dataclasses.replace(
        link,
        d2h_bytes_per_second=link.d2h_bytes_per_second * factor,
        h2d_bytes_per_second=link.h2d_bytes_per_second * factor,
    )


def main(options: argparse.Namespace) -> int:
    """Takes each plan to each target and saves the figures."""
    rows = saving.Rows('carried')
    with tempfile.TemporaryDirectory() as folder:
        for arch, batchsize, gpu in SOURCES:
            pair = samples.record(
                arch,
                None,
                1000,
                samples.Sampling(SAMPLES, parts=False),
                Progress(2, sys.stderr),
            ).pair
            estimators = {
                name: Estimator.make(pair, load_device_model(name))
                for name in (gpu, *GPUS)
            }
            source = make_problem(estimators[gpu].profile(batchsize))
            files = save(source, load_device_model(gpu).memory_bytes, folder)
            for name, problem, limit in targets(estimators, batchsize, gpu):
                row = {'source': f'{arch} b{batchsize} {gpu}', 'target': name}
                rows.add({**row, **take(problem, limit, files)})
                print(rows.rows[-1], file=sys.stderr, flush=True)
    return 0


def save(problem: Problem, limit_bytes: int, folder: str) -> dict[str, str]:
    """Makes the plan to be taken elsewhere; its files."""
    plan = make_plan(problem, limit_bytes)
    names = {
        'plan_file': os.path.join(folder, 'plan.json'),
        'profile_file': os.path.join(folder, 'profile.json'),
    }
    library.save(plan, names['plan_file'])
    library.save(problem.profile, names['profile_file'])
    return names


def take(problem: Problem, limit_bytes: int, files: dict[str, str]) -> dict[str, Any]:
    """Figures of one target."""
    try:
        began = time.perf_counter()
        fresh = make_plan(problem, limit_bytes)
        searched = time.perf_counter()
        carried = make_plan(problem, limit_bytes, 'carry', **files)
        ended = time.perf_counter()
    except InfeasibleError as error:
        return {'error': str(error)}
    return {
        'needed': fresh.in_core_seconds != fresh.predicted_seconds,
        'fresh_seconds': fresh.predicted_seconds,
        'carried_seconds': carried.predicted_seconds,
        'lower_bound_seconds': fresh.lower_bound_seconds,
        'searched': carried.options['searched'],
        'search_seconds': searched - began,
        'carry_seconds': ended - searched,
    }
