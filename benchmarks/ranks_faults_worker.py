"""What each process of ``ranks_faults`` runs: the fault, and a folder for its files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainermn
import numpy as np

from benchmarks.ranks_worker import Normalised, bits_of

ITERATIONS = 14
MOMENT = 11  # the iteration with the fault
BATCHSIZE, INSIZE = 8, 32
LIMIT, OTHER_LIMIT = '40MiB', '45MiB'
STOPPED_SECONDS = 10


class Moments:
    """Wall clock times of one process, in a file that outlives it.

    Args:
        path: Of the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        self.note()

    def note(self, **found: Any) -> None:
        """Adds to the file."""
        self._found |= found
        with open(self._path, 'w', encoding='utf-8') as file:
            json.dump(self._found, file)


def disturb(fault: str, held: list[np.ndarray]) -> None:
    """Does to this process what the fault is."""
    if fault == 'killed':
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == 'raises':
        raise ValueError('rank 1 is broken')
    elif fault == 'memory':
        held.append(np.ones(2**26, np.float32))
    elif fault == 'stopped':
        wake = f'sleep {STOPPED_SECONDS}; kill -CONT {os.getpid()}'
        subprocess.Popen(['sh', '-c', wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def train(fault: str, communicator: Any, moments: Moments) -> None:
    """Trains; the second process has the fault."""
    second = communicator.rank == 1
    np.random.seed(0)
    model = Normalised()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(1e-4), communicator
    ).setup(model)
    data = np.random.RandomState(communicator.rank)
    batchsize = BATCHSIZE - 2 * (fault == 'network' and second)
    session: Any = contextlib.nullcontext()
    early = fault in ('absent', 'limit', 'network')
    moments.note(begin=time.time(), fault=time.time())
    if not (fault == 'absent' and second):
        limit = OTHER_LIMIT if fault == 'limit' and second else LIMIT
        session = hybridmem.optimize(
            model, limit, communicator=communicator, progress=sys.stderr
        )
    held: list[np.ndarray] = []
    with session as opened:
        for i in range(ITERATIONS):
            x = data.rand(batchsize, 3, INSIZE, INSIZE).astype(np.float32)
            t = data.randint(0, 10, batchsize).astype(np.int32)
            if i == MOMENT and second and not early:
                moments.note(fault=time.time())
                disturb(fault, held)
            optimizer.update(model, x, t)
            if i == MOMENT:
                moments.note(after=time.time())
    moments.note(bits=bits_of(model))
    if opened is not None:
        moments.note(state=opened.state)


def main(fault: str, folder: str) -> None:
    """Trains with the fault; what is said is in a file, which outlives the process."""
    communicator = chainermn.create_communicator('naive')
    path = os.path.join(folder, str(communicator.rank))
    with open(f'{path}.txt', 'w', encoding='utf-8') as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    moments = Moments(f'{path}.json')
    communicator.mpi_comm.barrier()
    train(fault, communicator, moments)


if __name__ == '__main__':
    main(*sys.argv[1:])
