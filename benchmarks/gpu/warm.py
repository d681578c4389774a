"""Compiles what sessions and planners need, while the GPU does something else.

Numba's cache has it afterwards (``NUMBA_CACHE_DIR`` names its folder). A session on the
host and every planner that ``methods_on_gpu.py`` asks by default see to it.

    python -m benchmarks run gpu.warm
"""

from __future__ import annotations

import argparse
import time

import chainer_hybridmem as hybridmem
from chainer_hybridmem.planning import planners
from chainer_hybridmem.planning.simulation.problem import make_problem
from tests.support import networks

PLANNERS = ('hybrid', 'swap-all', 'pooch', 'superneurons')
ITERATIONS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark takes nothing."""


def main(options: argparse.Namespace) -> int:
    start = time.time()
    name = next(name for name in hybridmem.shipped_profiles() if 'resnet50' in name)
    profile = hybridmem.load_profile(name)
    limit = make_problem(profile).in_core_peak_bytes // 2
    for planner in PLANNERS:
        try:
            planners.make_plan(profile, limit, planner)
        except hybridmem.HybridMemoryError as error:
            print(f'{planner}: {error}', flush=True)
        print(f'{planner}: {time.time() - start:.1f} s', flush=True)
    data = networks.batches(ITERATIONS, size=2)
    networks.train(networks.Everything, data, memory_limit='1GB')
    print(f'a session: {time.time() - start:.1f} s', flush=True)
    return 0
