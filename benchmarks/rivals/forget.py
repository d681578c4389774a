"""Chainer's own recomputation, ``F.forget``, beside plans with the memory it needs.

    python -m benchmarks run rivals.forget [--batchsize N] [--insize N] [--rounds N]

ResNet-50 on the CPU: plain Chainer; every residual block inside ``F.forget``, as its
documentation has it; and sessions whose limit is the peak of that, with copies as fast
as memory is and with a throttled link. Each variant runs in a process of its own, all
of them in turns. Peak: arrays of NumPy, as ``profile_memory`` or the session counts
them. Same bits: loss, parameters and statistics after the last iteration equal those of
plain Chainer. Writes ``rivals_forget.json`` to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import catalogue, common

# isort: split
import chainer.functions as F
import numpy as np

Row = dict[str, Any]

LINK = 72e6  # bytes per second, as in host_methods.py
LEARNING = 6  # iterations until a session is timed and placed
PLAIN, FORGET = 'plain', 'F.forget'
SESSIONS = {
    'hybrid': {'planner': 'hybrid'},
    'hybrid, 72 MB/s': {'planner': 'hybrid', 'link_bandwidth': LINK},
    'checkpoint-sqrt': {'planner': 'checkpoint-sqrt'},
}
VARIANTS = (PLAIN, FORGET, *SESSIONS)


class Training(common.Training):
    """ResNet-50, with its blocks inside ``F.forget`` if that is wanted."""

    def __init__(self, batchsize: int, insize: int, forget: bool) -> None:
        super().__init__('resnet50', batchsize, insize)
        if forget:
            features = self._features
            self.model.features = features

    def _features(self, x: Any) -> Any:
        model = self.model
        h = F.relu(model.stem_bn(model.stem(x)))
        h = F.max_pooling_2d(h, 3, stride=2, pad=1)
        for block in model.blocks:
            h = F.forget(block, h)
        return h

    def digest(self) -> str:
        """Of everything that training has changed."""
        result = hashlib.sha256(np.array(self.losses).tobytes())
        for _, parameter in sorted(self.model.namedparams()):
            result.update(parameter.array.tobytes())
        for _, link in sorted(self.model.namedlinks()):
            for name in sorted(link._persistent):  # a set
                result.update(np.asarray(getattr(link, name)).tobytes())
        return result.hexdigest()


def child(options: argparse.Namespace) -> Row:
    """One variant: seconds of its iterations, peak and digest."""
    variant = options.child
    training = Training(options.batchsize, options.insize, variant == FORGET)
    if variant not in SESSIONS:
        with hybridmem.profile_memory(training.model) as memory:
            training.step()
            training.step()
        peak = max(memory.series()['peak_bytes'])
        seconds = timed(training, options.iterations + LEARNING - 2)
        return {
            'peak_bytes': int(peak),
            'seconds': seconds,
            'digest': training.digest(),
        }
    arguments = SESSIONS[variant]
    with hybridmem.optimize(training.model, options.limit, **arguments) as session:
        seconds = timed(training, options.iterations + LEARNING)
        figures = session.statistics()
    return {
        'peak_bytes': figures['peak_bytes'],
        'predicted_seconds': figures['predicted_seconds'],
        'lower_bound_seconds': figures['lower_bound_seconds'],
        **{key: figures[key] for key in ('keep', 'swap', 'recompute')},
        'seconds': seconds,
        'digest': training.digest(),
    }


def timed(training: Training, iterations: int) -> list[float]:
    """Seconds of each iteration."""
    seconds = []
    for _ in range(iterations):
        start = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def run(variant: str, options: argparse.Namespace, limit_bytes: int) -> Row:
    """Runs one variant in a process of its own."""
    arguments = ['--child', variant, '--limit', str(limit_bytes)]
    for name in ('batchsize', 'insize', 'iterations'):
        arguments += [f'--{name}', str(getattr(options, name))]
    done = subprocess.run(
        [*catalogue.command('rivals.forget'), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {'fits': False, 'reason': done.stderr.strip().splitlines()[-1]}
    return {'fits': True, **json.loads(done.stdout.splitlines()[-1])}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--batchsize', type=int, default=8)
    parser.add_argument('--insize', type=int, default=112)
    parser.add_argument('--iterations', type=int, default=6)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--child', help=argparse.SUPPRESS)
    parser.add_argument('--limit', type=int, default=0, help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    if options.child:
        print(json.dumps(child(options)))
        return 0
    limit_bytes = run(FORGET, options, 0)['peak_bytes']
    runs: dict[str, list[Row]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            runs[variant].append(run(variant, options, limit_bytes))
            print(variant, runs[variant][-1], file=sys.stderr, flush=True)
    rows = [summary(v, found, options.iterations) for v, found in runs.items()]
    plain = rows[0]
    for row in rows:
        row['overhead'] = row['seconds'] / plain['seconds'] - 1 if row['fits'] else None
        row['same bits'] = row['digest'] == plain['digest'] if row['fits'] else None
    body = {'batchsize': options.batchsize, 'insize': options.insize, 'rows': rows}
    common.save('rivals_forget', {**body, 'limit_bytes': limit_bytes})
    columns = {
        'variant': str,
        'peak_bytes': lambda n: '' if n is None else f'{n / 2**20:.1f} MiB',
        'seconds': lambda s: '' if s is None else f'{s:.3f}',
        'overhead': lambda x: '' if x is None else f'{x:+.1%}',
        'same bits': str,
    }
    print(common.table(rows, columns))
    return 0


def summary(variant: str, runs: list[Row], iterations: int) -> Row:
    """Median seconds of the last iterations of all rounds."""
    if not all(run['fits'] for run in runs):
        reason = next(run['reason'] for run in runs if not run['fits'])
        nothing = dict.fromkeys(('peak_bytes', 'seconds', 'digest'))
        return {'variant': variant, 'fits': False, 'reason': reason, **nothing}
    last = [seconds for run in runs for seconds in run['seconds'][-iterations:]]
    return {
        **runs[-1],
        'variant': variant,
        'fits': True,
        'peak_bytes': max(run['peak_bytes'] for run in runs),
        'seconds': statistics.median(last),
        'all_seconds': [run['seconds'] for run in runs],
    }
