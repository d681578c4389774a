"""What fingerprints cost: of maps that are dropped and made again, and of held ones.

On the host every recomputed map is compared with what was dropped, and a map that the
program still holds when it leaves is compared when it comes back. The seconds of all
fingerprints of an iteration are added up and divided by the iteration's own seconds, so
that a slow machine slows both down. Medians over the guided iterations.

    python -m benchmarks run checked_replays [--batchsize 8] [--insize 160]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import chainer_hybridmem as hybridmem
from benchmarks import common
from chainer_hybridmem.training.execution import graph_slots

PLANNERS = {'hybrid': 0.65, 'superneurons': 0.65, 'checkpoint-speed': 1.0}
WARM_UP = 3  # iterations before the first plan


class Fingerprints:
    """Counts fingerprints, and the time that they take."""

    def __init__(self) -> None:
        self._original = graph_slots.fingerprint
        self.seconds, self.nbytes = 0.0, 0

    def take(self, array: Any) -> int:
        start = time.perf_counter()
        result = self._original(array)
        self.seconds += time.perf_counter() - start
        self.nbytes += array.nbytes
        return result


def measure(planner: str, limit_bytes: int, options: Any) -> dict[str, Any]:
    training = common.Training('resnet50', options.batchsize, options.insize)
    counted = Fingerprints()
    rows = []
    patch = mock.patch.object(graph_slots, 'fingerprint', counted.take)
    with patch, hybridmem.optimize(training.model, limit_bytes, planner) as session:
        for i in range(options.iterations):
            counted.seconds, counted.nbytes = 0.0, 0
            start = time.perf_counter()
            training.step()
            seconds = time.perf_counter() - start
            if i >= WARM_UP:
                rows.append((counted.seconds / seconds, counted.nbytes, seconds))
    figures = session.statistics()
    share, nbytes, seconds = map(statistics.median, zip(*rows, strict=True))
    return {
        'planner': planner,
        'limit_bytes': limit_bytes,
        'recompute': figures['recompute'],
        'swap': figures['swap'],
        'fingerprint_bytes': int(nbytes),
        'iteration_seconds': seconds,
        'share': share,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--batchsize', type=int, default=8)
    parser.add_argument('--insize', type=int, default=160)
    parser.add_argument('--iterations', type=int, default=8)


def main(options: argparse.Namespace) -> int:
    peak, _ = common.in_core_peak('resnet50', options.batchsize, options.insize)
    rows = [
        measure(planner, int(part * peak), options)
        for planner, part in PLANNERS.items()
    ]
    columns = {
        'planner': str,
        'limit_bytes': lambda b: f'{b / 2**20:.0f} MiB',
        'recompute': str,
        'swap': str,
        'fingerprint_bytes': lambda b: f'{b / 1e6:.0f} MB',
        'iteration_seconds': lambda s: f'{s:.2f} s',
        'share': lambda s: f'{s:.2%}',
    }
    print(common.table(rows, columns))
    common.save('checked_replays', {'settings': vars(options), 'rows': rows})
    return 0
