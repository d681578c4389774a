"""What each process of ``ranks_measured`` runs: a case as JSON, and a file for rows."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import statistics
import sys
import time
from typing import Any

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np

from benchmarks import deep
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.training.session.guides.guide import TIMING_RUNS
from chainer_hybridmem.training.session.setting import link_measurement

WARM = 20  # iterations until the plan of a session stands, or a second one does
MEASURED = 12


class Plain(chainer.Chain):
    """Convolutions whose maps are larger than all their parameters."""

    depth, width = 48, 32

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.convolutions = chainer.ChainList(
                *(
                    L.Convolution2D(None, self.width, 3, pad=1)
                    for _ in range(self.depth)
                )
            )
            self.last = L.Linear(None, 10)

    def between(self, i: int, x: Any) -> Any:
        """What follows convolution i."""
        return F.relu(x)

    def forward(self, x: Any, t: Any) -> Any:
        """The loss."""
        for i, convolution in enumerate(self.convolutions):
            x = self.between(i, convolution(x))
        return F.softmax_cross_entropy(self.last(F.average(x, axis=(2, 3))), t)


class Normalised(Plain):
    """The same with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.norms = chainer.ChainList(
                *(L.BatchNormalization(self.width) for _ in range(self.depth))
            )

    def between(self, i: int, x: Any) -> Any:
        """What follows convolution i."""
        return F.relu(self.norms[i](x))


class Residual(deep.ResNet1001):
    """38 layers in residual blocks."""

    def __init__(self) -> None:
        super().__init__(blocks=4)

    def forward(self, x: Any, t: Any) -> Any:
        """The loss."""
        return F.softmax_cross_entropy(self.logits(x), t)


NETWORKS = {network.__name__: network for network in (Plain, Normalised, Residual)}


@dataclasses.dataclass
class Trained:
    """How one training went.

    Attributes:
        seconds (float): Median of the last iterations; of the slowest rank.
        timed_seconds (float or None): Median of those that its session has timed.
        bits (str): Of all parameters at its end.
        session: Its session, if it had one.
    """

    seconds: float
    timed_seconds: float | None
    bits: str
    session: Any


def bits_of(model: chainer.Link) -> str:
    """A digest of all parameters."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.namedparams()):
        digest.update(np.ascontiguousarray(parameter.array))
    return digest.hexdigest()


def find_timed(taken: list[float], settled: list[bool]) -> float | None:
    """Median of the iterations whose times the last plan is predicted from.

    Args:
        taken: Seconds of every iteration.
        settled: Whether the session was settled after each; it is, for the first time,
            after the iteration that follows the last timed one.
    """
    firsts = [i for i in range(1, len(settled)) if settled[i] and not settled[i - 1]]
    if not firsts:
        return None
    return statistics.median(taken[firsts[-1] - TIMING_RUNS : firsts[-1]])


class Case:
    """One network in several processes.

    Args:
        case: As ``ranks_measured`` gives it.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.communicator = chainermn.create_communicator('naive')
        self.link = self.communicator.mpi_comm.bcast(f'ranks-{time.time_ns()}')
        self.measure_link = link_measurement.measure_link
        self.rate: int | None = None  # of the link

    def measure_alone(self, device: Any, **options: Any) -> Link | None:
        """What a process finds that has the link for itself."""
        link = self.measure_link(device, **options)
        if link is None:
            return None
        rate = self.rate
        return dataclasses.replace(
            link, d2h_bytes_per_second=rate, h2d_bytes_per_second=rate
        )

    def train(self, way: str, limit_bytes: int) -> Trained:
        """Trains from the beginning."""
        case, communicator = self.case, self.communicator
        np.random.seed(0)
        model = NETWORKS[case['network']]()
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.MomentumSGD(1e-4), communicator
        ).setup(model)
        data = np.random.RandomState(communicator.rank)
        shape = (case['batchsize'], 3, case['insize'], case['insize'])
        session: Any = contextlib.nullcontext()
        if way != 'plain':
            alone = way == 'alone'
            link_measurement.measure_link = (
                self.measure_alone if alone else self.measure_link
            )
            session = hybridmem.optimize(
                model,
                limit_bytes,
                'hybrid',
                link_bandwidth=self.rate,
                shared_link=None if self.rate is None else self.link,
                communicator=None if alone else communicator,
            )
        taken: list[float] = []
        settled: list[bool] = []  # after each iteration
        with session as opened:
            for _ in range(WARM + MEASURED):
                x = data.rand(*shape).astype(np.float32)
                t = data.randint(0, 10, case['batchsize']).astype(np.int32)
                began = time.perf_counter()
                optimizer.update(model, x, t)
                taken.append(time.perf_counter() - began)
                settled.append(opened is not None and opened.settled)
        seconds = statistics.median(taken[-MEASURED:])
        slowest = max(communicator.mpi_comm.allgather(seconds))
        return Trained(slowest, find_timed(taken, settled), bits_of(model), opened)

    def run(self, share: float, in_core_bytes: int) -> dict[str, Any]:
        """The row for one share of the memory."""
        limit = int(in_core_bytes / share)
        ways: dict[str, list[Trained]] = {'plain': [], 'alone': [], 'together': []}
        for _ in range(self.case['rounds']):
            for way, runs in ways.items():
                runs.append(self.train(way, limit))
        seconds = {w: statistics.median(r.seconds for r in t) for w, t in ways.items()}
        bits = {run.bits for runs in ways.values() for run in runs}
        last = ways['together'][-1].session
        equal = self.communicator.mpi_comm.allgather(len(bits) == 1)
        plans = self.communicator.mpi_comm.allgather(repr(last.plan.maps))
        predicted = [r.session.plan.predicted_seconds for r in ways['together']]
        measured = [r.seconds for r in ways['together']]
        errors = [p / s - 1 for p, s in zip(predicted, measured, strict=True)]
        timed = [run.timed_seconds for run in ways['together']]
        of_timed = [p / s - 1 for p, s in zip(predicted, timed, strict=True) if s]
        peaks = [
            r.session.statistics()['guided_peak_bytes']
            for w in ('alone', 'together')
            for r in ways[w]
        ]
        moved = {
            f'{way}_{name}_of_each': self.communicator.mpi_comm.allgather(
                ways[way][-1].session.last_iteration()[name]
            )
            for way in ('alone', 'together')
            for name in ('swapped_bytes', 'evictions')
        }
        counts = {
            f'{way}_{action.value}': ways[way][-1].session.plan.count(action)
            for way in ('alone', 'together')
            for action in Action
        }
        return {
            **{k: v for k, v in self.case.items() if k != 'shares'},
            'link_bytes_per_second': self.rate,
            'processes': self.communicator.size,
            'share': share,
            'limit_bytes': limit,
            'peak_bytes': max(peaks),
            **{f'{way}_seconds': value for way, value in seconds.items()},
            'all_seconds': {w: [r.seconds for r in t] for w, t in ways.items()},
            'gain': seconds['alone'] / seconds['together'],
            'predicted_seconds': statistics.median(predicted),
            'forecast_error': statistics.median(errors),
            'forecast_errors': errors,
            'timed_seconds': timed,
            'simulator_error': statistics.median(of_timed) if of_timed else None,
            'bound_seconds': last.plan.lower_bound_seconds,
            'rate_together': last.profile.link.h2d_bytes_per_second,
            'one_plan': len(set(plans)) == 1,
            'equal': all(equal),
            **counts,
            **moved,
        }

    def prepare(self) -> int:
        """Chooses the link; returns the bytes that plain Chainer needs."""
        session = self.train('together', 2**50).session
        maps = sum(s.nbytes for s in session.profile.feature_maps())
        plain_seconds = self.train('plain', 0).seconds
        rate = maps / (self.case['copies'] * plain_seconds)
        everywhere = self.communicator.mpi_comm
        self.rate = everywhere.bcast(int(rate))
        needed = session.statistics()['in_core_peak_bytes']
        return max(everywhere.allgather(int(needed)))


def main(text: str, output: str) -> None:
    """Runs the case; the first process writes its rows."""
    case = Case(json.loads(text))
    needed = case.prepare()
    rows = [case.run(share, needed) for share in case.case['shares']]
    if case.communicator.rank == 0:
        with open(output, 'w', encoding='utf-8') as file:
            json.dump(rows, file)


if __name__ == '__main__':
    main(*sys.argv[1:])
