"""Algorithms of convolutions chosen with the plan, on modelled GPUs.

    python -m benchmarks run algorithms

Seconds per iteration with the fastest algorithms inside Chainer's 8 MiB of workspace,
with those that ``hybridmem estimate --algorithms`` chooses, and the bound of any
choice. Writes ``estimate.json``.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from benchmarks import common
from chainer_hybridmem.commands import estimate, samples
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.forecasting.estimation import Estimator, load_device_model
from chainer_hybridmem.planning.planners import DEFAULT
from chainer_hybridmem.planning.simulation import make_problem

CASES = (
    ('resnet50', 640, 'v100-16gb-pcie3'),
    ('googlenet', 1024, 'v100-16gb-pcie3'),
    ('alexnet', 1920, 'v100-16gb-pcie3'),
    ('vgg16', 256, 'v100-16gb-pcie3'),
    ('resnet50', 184, 'gtx1080ti'),
    ('vgg16', 128, 'gtx1080ti'),
)
SAMPLES = 2, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""


def run(
    arch: str, batchsize: int, gpu: str, recorded: dict[str, Any]
) -> dict[str, Any]:
    """Figures of one case."""
    if arch not in recorded:
        sampling = samples.Sampling(arch, SAMPLES, parts=False)
        recorded[arch] = samples.record(sampling, Progress(2, sys.stderr))
    model = load_device_model(gpu)
    estimator = Estimator.make(recorded[arch].pair, model)
    start = time.perf_counter()
    decided = estimate.decide(
        estimator, batchsize, make_problem, lambda _: model.memory_bytes, DEFAULT
    )
    seconds = time.perf_counter() - start
    return {
        'network': f'{arch} b{batchsize}',
        'gpu': gpu,
        'in_core_bytes': decided.problem.in_core_peak_bytes,
        'limit_bytes': model.memory_bytes,
        'search_seconds': seconds,
        **decided.figures,
    }


def main(options: argparse.Namespace) -> int:
    """Runs every case and saves the figures."""
    recorded: dict[str, Any] = {}
    rows = []
    for case in CASES:
        rows.append(run(*case, recorded))
        print(rows[-1], file=sys.stderr, flush=True)
    common.save('algorithms', {'rows': rows})
    return 0
