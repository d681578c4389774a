"""What each of the processes in test_ranks_cuda.py runs: ways to train, and a folder.

Each process has an emulated GPU of its own, whose number is its rank.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import sys
import time
import warnings

import chainer_hybridmem  # noqa: F401  before chainer, which it repairs

# isort: split
import chainer
import chainermn
import cupy
import numpy as np
from mpi4py import MPI

from chainer_hybridmem.training.recompute import drawing
from chainer_hybridmem.training.session.setting import ranks

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(sys.path[0]))
from support import networks

from tests.cuda_emulator import control

chainer.global_config.cudnn_deterministic = True
ranks.PATIENCE_SECONDS = 100.0  # how busy the machine is makes no rank plan alone
ITERATIONS = 9
LONGER = 13  # double buffering holds more from the second iteration on: planned twice
RECORDED = 6  # with double buffering, states come two iterations later than elsewhere
BATCH = 8
WAYS = {
    'pure_nccl': ('pure_nccl', {}, False),
    'half': ('pure_nccl', {'allreduce_grad_dtype': np.float16}, False),
    'flat': ('flat', {}, False),
    'double': ('pure_nccl', {}, True),
}


class DeviceAware(MPI.Intracomm):
    """Waits for the GPU first, as ChainerMN's 'flat' takes for granted."""

    def Allreduce(self, sent, received, *rest):
        """As in MPI."""
        cupy.cuda.get_current_stream().synchronize()
        super().Allreduce(sent, received, *rest)

    def Bcast(self, buffer, root=0):
        """As in MPI."""
        cupy.cuda.get_current_stream().synchronize()
        super().Bcast(buffer, root)


def train(way, seed, limit=None, iterations=None):
    """Trains plain or with a session inside a limit; what the test looks at."""
    name, options, double_buffering = WAYS[way]
    iterations = iterations or (LONGER if double_buffering else ITERATIONS)
    communicator = chainermn.create_communicator(
        name, DeviceAware(MPI.COMM_WORLD), **options
    )
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    control.schedule(os.environ.get('EMU_MODE', 'random'), seed)
    drawing.seed_gpu(0)
    np.random.seed(communicator.rank)
    device = chainer.get_device(f'@cupy:{communicator.rank}')
    model = networks.Everything(channels=8)
    model.to_device(device)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.01),
        communicator,
        double_buffering=double_buffering,
    ).setup(model)
    limits, lines = {}, io.StringIO()
    if limit is not None:
        limits = {'memory_limit': limit, 'communicator': communicator}
        limits['progress'] = lines
    began, before = time.monotonic(), cupy.cuda.get_allocator()
    control.take_device_peak()
    batches = networks.batches(iterations * communicator.size, size=BATCH)
    with (
        warnings.catch_warnings(record=True) as said,
        networks.session_for(model, limits) as session,
    ):
        warnings.simplefilter('always')
        for batch in batches[communicator.rank :: communicator.size]:
            optimizer.update(model, *device.send(batch))
        if double_buffering:
            optimizer.wait()
    digest = hashlib.sha256()
    for _, parameter in sorted(model.namedparams()):
        digest.update(parameter.array.get())
    found = {
        'parameters': digest.hexdigest(),
        'seconds': time.monotonic() - began,
        'taken': control.take_device_peak(),
        'said': [str(warning.message) for warning in said],
        'same_allocator': cupy.cuda.get_allocator() == before,
    }
    if session is not None:
        found['figures'] = session.statistics()
        found['last'] = session.last_iteration()
        found['footprint'] = session.device.memory.pool.footprint_bytes
        found['lines'] = lines.getvalue().splitlines()
        found['maps'] = repr(session.plan.maps)
        profile = session.profile
        after = profile.operations[profile.first_update :]
        found['after_backward'] = [op.phase.value for op in after]
    communicator.finalize()
    return found


def main(ways, seed, folder, only=''):
    """Trains in each way, plain and inside a limit; writes what it finds."""
    rank = MPI.COMM_WORLD.rank
    cupy.cuda.Device(rank).use()
    found = {}
    for way in ways.split(','):
        found[way] = {'plain': train(way, int(seed))}
        found[way]['races'] = control.counters()['race']
        if only == 'plain':
            continue
        kept = train(way, int(seed), 2**30, RECORDED)
        peak = kept['figures']['in_core_peak_bytes']
        limit = int(peak * 0.75)
        found[way]['small'] = {**train(way, int(seed), limit), 'limit': limit}
    path = os.path.join(folder, f'{rank}.json')
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(found, file, default=str)


if __name__ == '__main__':
    main(*sys.argv[1:])
