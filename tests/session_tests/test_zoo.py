"""Every planner on networks of many shapes: the same bits as without us.

Each network has a third of the planners, and all of them if matrices are full.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from support import networks, zoo
from support.matrices import FULL

# isort: split
import chainer

import chainer_hybridmem
from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning import planners
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.recompute import drawing

HOST, GPU = '@numpy', '@cupy:0'
ITERATIONS = 3  # under each planner
OPTIONS = {  # it is execution that is tried here, not the search
    'exact': {'time_budget': 0.2},
    'hybrid': {'steps': 1000},
    'pooch': {'node_budget': 300},
    'swap-opt': {'node_budget': 300},
    'autoswap-bo': {'evaluations': 6},
}
PLANNERS = [name for name in planners.PLANNERS if name != 'in-core']
SHARES = 1 if FULL else 3


class Training:
    """One iteration after the other, from a fixed seed."""

    def __init__(self, network: zoo.Network, device: str) -> None:
        np.random.seed(0)
        self.network = network
        self.device = chainer.get_device(device)
        self.model = network.make()
        self.model.to_device(self.device)
        if device != HOST:
            drawing.seed_gpu(0)
            self.device.use()
        self.optimizer = chainer.optimizers.Adam().setup(self.model)
        self.data = np.random.RandomState(1)
        self.losses: list[float] = []

    def step(self) -> str:
        """Trains once; a digest of everything that must be equal."""
        batch = map(self.device.send, self.network.batch(self.data))
        with chainer.using_config('cudnn_deterministic', True):
            loss = self.model(*batch)
            self.model.cleargrads()
            loss.backward()
        self.losses.append(float(loss.array))
        del loss
        self.optimizer.update()
        digest = hashlib.sha256()
        for name, array in networks.outcome(self.model, self.losses).items():
            digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()


def middle_limit(network: zoo.Network, device: str) -> int:
    """Between what single operations need and what plain Chainer needs."""
    training = Training(network, device)
    with chainer_hybridmem.optimize(
        training.model, '1GB', planner='in-core'
    ) as session:
        while session.profile is None:
            training.step()
    problem = make_problem(session.profile)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    return least + (most - least) // 2


@pytest.mark.parametrize('device', [HOST, pytest.param(GPU, marks=pytest.mark.gpu)])
@pytest.mark.parametrize('name', list(zoo.NETWORKS))
def test_every_planner_gives_the_same_bits(name, device):
    network = zoo.NETWORKS[name]
    number = list(zoo.NETWORKS).index(name) + (device == GPU)
    chosen = PLANNERS[number % SHARES :: SHARES]
    limit = middle_limit(network, device)
    training = Training(network, device)
    steps: list[tuple[str, str]] = []  # planner and digest
    link = {'link_bandwidth': '1GB/s'} if device == HOST else {}
    with chainer_hybridmem.optimize(
        training.model, limit, planner='swap-all', **link
    ) as session:
        while session.profile is None:
            steps.append(('no plan yet', training.step()))
        for planner in chosen:
            try:
                session.replan(planner, **OPTIONS.get(planner, {}))
            except InfeasibleError:
                continue
            except OptionError as error:
                assert 'lower sets' in str(error)  # too many for the exact programme
                continue
            steps += [(planner, training.step()) for _ in range(ITERATIONS)]
            figures = session.statistics()
            assert figures['deviations'] == figures['restores'] == 0, planner
            assert figures['peak_bytes'] <= limit, planner
    plain = Training(network, device)  # they share generators: one after the other
    for planner, digest in steps:
        assert plain.step() == digest, planner
    assert len({planner for planner, _ in steps}) > len(chosen) // 2
