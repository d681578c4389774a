"""The limit as the operating system sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support import networks  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import numpy as np
import pytest

LIMIT = 160_000_000
LIBRARIES = 64_000_000  # bytes: BLAS, the planner, Python, what times replays


class Deep(chainer.Chain):
    """Feature maps of 16 MB, and little else."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.last = chainer.links.Linear(256, 10)

    def forward(self, x, t):
        h = chainer.Variable(x)  # with a gradient: backward goes all the way
        for _ in range(20):
            h = F.relu(h)
        return F.softmax_cross_entropy(self.last(h), t)


def batches(n, size):
    rng = np.random.RandomState(0)
    x = rng.rand(size, 256).astype(np.float32)
    return [(x, rng.randint(0, 10, size).astype(np.int32))] * n


def resident(name):
    with open('/proc/self/status', encoding='ascii') as lines:
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(name))


def train(**options):
    """Trains; how much more was resident than before at most, and what a session says.

    Its arena stands after 10 iterations at the latest.
    """
    data = batches(12 if options else 3, 16_000)
    before = resident('VmRSS')
    with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
        file.write('5')
    _, session = networks.train(Deep, data, **options)
    figures = session.statistics() if session else {}
    return {'bytes': resident('VmHWM') - before, **figures}


def child(folder):
    """Prints what training takes with a limit, and without."""
    networks.train(Deep, batches(8, 100), memory_limit='1GB')
    limited = train(memory_limit=LIMIT, swap_dir=folder)
    print(json.dumps([limited, train()]))


@pytest.mark.skipif(
    not os.access('/proc/self/clear_refs', os.W_OK), reason='needs Linux and /proc'
)
def test_the_resident_set_stays_inside_the_limit(tmp_path):
    path = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join([path, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, 'PYTHONPATH': path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    limited, plain = json.loads(done.stdout.splitlines()[-1])
    assert plain['bytes'] > LIMIT + 2 * LIBRARIES  # or nothing is shown here
    assert limited['bytes'] <= LIMIT + LIBRARIES, limited
    assert limited['footprint_bytes'] <= LIMIT
    assert limited['no_arena'] is None, limited
    assert limited['arena_bytes'] + limited['side_bytes'] <= LIMIT
    assert limited['swap'] + limited['recompute'] > 0


if __name__ == '__main__':
    child(*sys.argv[1:])
