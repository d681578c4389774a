"""What each of the processes in test_ranks.py runs: ways to train, and a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainermn
import numpy as np

from chainer_hybridmem.training.devices import link as link_module
from chainer_hybridmem.training.session.planning import plan_maker
from chainer_hybridmem.training.session.setting import ranks

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from session_tests import data_parallel
from support import networks
from support.quick_search import quick_search

ITERATIONS = 12
SETTLING = 10  # iterations more, at most, until all have heard of the newest plan
LIMIT = '3MiB'
AMPLE = '3.6MiB'
HELD = {'hold-0': 2**19, 'hold-all': 3 * 2**19}  # for the latter there is no plan
plan_maker.LEAST_SECONDS = plan_maker.LEAST_SECONDS_NEEDED = math.inf  # as in conftest
SLOW = '70MB/s'  # a copy takes about as long as what is measured
held = []  # by the program, beyond what it has trained with so far
others = []  # for each link that is measured, the processes that copy beside this one
_seconds_among = link_module.seconds_among


def _note_others(own: object, runs: list[object]) -> object:
    others.append(len(runs))
    return _seconds_among(own, runs)


link_module.seconds_among = _note_others


class Lines:
    """Keeps the lines of progress."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, text: str) -> None:
        self.lines += text.splitlines()

    def flush(self) -> None:
        """There is nothing to flush."""


def disturb(way: str, rank: int, i: int) -> None:
    """Does to one rank or all what the test asks for, in the middle."""
    if i != ITERATIONS // 2:
        return
    if way in (f'hold-{rank}', 'hold-all'):
        held.append(np.ones(HELD[way] // 4, np.float32))
    if rank != 1:
        return
    if way == 'raise':
        raise ValueError('rank 1 is broken')
    if way == 'kill':
        os.kill(os.getpid(), signal.SIGKILL)
    if way == 'stop':
        wake = f'import os, time; time.sleep(1.5); os.kill({os.getpid()}, 18)'
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, '-c', wake])
        os.kill(os.getpid(), signal.SIGSTOP)


def train(way: str, communicator: object, folder: str) -> dict[str, object]:
    """Trains; returns what the test looks at."""
    rank, lines, began = communicator.rank, Lines(), time.monotonic()
    others.clear()
    np.random.seed(0)
    model = networks.Convolutions()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), communicator
    ).setup(model)
    data = np.random.RandomState(rank)
    limit = '3.5MiB' if way == 'limit' and rank else LIMIT
    if way in ('hold-0', 'hold-all', 'replan', 'cache'):
        limit = AMPLE
    size = 12 if way == 'network' and rank else 16
    session = contextlib.nullcontext()
    link = communicator.mpi_comm.bcast(f'ranks-{time.time_ns()}')
    # Others wait for a rank that differs as long as this.
    ranks.PATIENCE_SECONDS = 2.0 if way in ('limit', 'network') else 20.0
    if way == 'absent':
        ranks.OPENING_SECONDS = 2.0
    if way != 'plain' and not (way == 'absent' and rank):
        session = hybridmem.optimize(
            model,
            limit,
            communicator=communicator,
            link_bandwidth=SLOW if way == 'slow' else '400MB/s',
            shared_link=link,
            host_limit='64MiB',
            rules={'*': 'no recompute'},  # however slow the link is now
            cache_dir=os.path.join(folder, 'cache') if way == 'cache' else None,
            progress=lines,
        )

    def update() -> None:
        x = data.rand(size, 3, 24, 24).astype(np.float32)
        t = data.randint(0, 10, size).astype(np.int32)
        optimizer.update(model, x, t)

    with session as opened:
        for i in range(ITERATIONS + 4 * way.startswith('hold')):
            disturb(way, rank, i)
            update()
            if way == 'replan' and i == ITERATIONS - 3:
                opened.replan('swap-all')
        found = {'parameters': digest_of(model), 'seconds': time.monotonic() - began}
        if opened is not None:
            opened.finish_iteration()
            found['guided'] = opened.statistics()['guided_iterations']
            # The others follow what the first one changes from their next iteration on.
            for _ in range(0 if way in ('limit', 'network') else SETTLING):
                plans = communicator.mpi_comm.allgather(repr(opened.plan.maps))
                if len(set(plans)) == 1:
                    break
                update()
                opened.finish_iteration()
    found |= {'lines': lines.lines, 'others': others}
    found['threads'] = threading.active_count()
    if opened is not None:
        found['state'] = opened.state
        found['maps'] = repr(opened.plan.maps)
        found['link'] = dataclasses.asdict(opened.profile.link)
        found['after_backward'] = [
            (op.phase.value, op.exchanged_bytes)
            for op in opened.profile.operations[opened.profile.first_update :]
        ]
        found['report'] = opened.report()
        found['gradient_bytes'] = sum(p.grad.nbytes for p in model.params())
        found['peak_bytes'] = opened.statistics()['peak_bytes']
        found['host_limit_bytes'] = opened.options.host_limit_bytes
    return found


def digest_of(model: chainer.Link) -> str:
    """Of every bit of the parameters."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.namedparams()):
        digest.update(np.ascontiguousarray(parameter.array))
    return digest.hexdigest()


def main(ways: str, folder: str) -> None:
    """Trains in one way after the other and writes what it has found."""
    communicator = chainermn.create_communicator('naive')
    said = os.path.join(folder, f'rank-{communicator.rank}.txt')
    with open(said, 'w', encoding='utf-8') as file:
        os.dup2(file.fileno(), sys.stderr.fileno())  # mpiexec may lose the last words
    for way in ways.split(','):
        if way == 'cache':
            train(way, communicator, folder)
        if way == 'after':  # one is through with its last session long before the other
            time.sleep(communicator.rank)
        if way == 'apart':
            found = data_parallel.train_apart(communicator)
        else:
            found = train(way, communicator, folder)
        path = os.path.join(folder, f'{way}-{communicator.rank}.json')
        with open(path, 'w', encoding='utf-8') as file:
            json.dump(found, file)


if __name__ == '__main__':
    with quick_search():
        main(*sys.argv[1:])
