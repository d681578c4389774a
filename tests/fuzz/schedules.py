"""Schedules: one program, and ever other moments at which its copies move.

Each iteration of a session is on a machine with conditions of its own (support/virtual,
``draw``): links, latencies, lateness, pauses. Losses and parameters must be those of
plain Chainer in every iteration, whatever the planner, the limit, and what is switched
off; the machine itself looks after copies. The command line is

    python -m tests.fuzz.schedules --seed 0 --minutes 5 --jobs 2
    python -m tests.fuzz.schedules --seed 0 --session 17        # one that has failed
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import multiprocessing
import pathlib
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from support.drawn_plans import RANDOM, random_plan
from support.virtual import Machine, draw

from chainer_hybridmem.planning import planners
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.execution.evictor import Prefetcher
from chainer_hybridmem.training.execution.executor import Executor

ITERATIONS = 500  # of a session
STRIDE = 1 << 20  # seeds of one run; another run's begin beyond them
PLANNERS = (
    *(None, 'swap-all', 'swap-opt', 'hybrid', 'pooch', 'capuchin', 'manual'),
    *(RANDOM, RANDOM),
)
OPTIONS: dict[str | None, dict[str, Any]] = {
    'hybrid': {'steps': 200},
    'pooch': {'node_budget': 20},
    'swap-opt': {'node_budget': 20},
    'manual': {'actions': {'*': 'swap'}},
}


class Layers(chainer.Chain):
    """Two layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first, self.second = L.Linear(32, 32), L.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        h = F.dropout(F.relu(self.first(x)), 0.3)
        return F.average(F.sigmoid(self.second(h)))


class Steps(chainer.Chain):
    """One layer, several times: a small recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.inwards, self.onwards = L.Linear(8, 32), L.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        h = F.tanh(self.inwards(x[:, :8]))
        for begin in range(8, 24, 8):
            h = F.tanh(self.inwards(x[:, begin : begin + 8]) + self.onwards(h))
        return F.average(h)


NETWORKS: tuple[Callable[[], chainer.Chain], ...] = (Layers, Steps)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A session.

    Attributes:
        seed: Of its machine.
        network: Index of its network.
        share: Of the memory that plain Chainer needs beyond what stays for good.
        options: Of the session.
        without: Optimisations that are switched off.
    """

    seed: int
    network: int
    share: float
    options: dict[str, Any]
    without: tuple[str, ...]


def draw_session(seed: int) -> Drawn:
    """The session of a seed."""
    chance = random.Random(seed)
    planner = chance.choice(PLANNERS)
    options = {'planner': planner, 'verify': chance.choice([0, 0, 3])}
    options |= _draw_plan(chance) if planner == RANDOM else OPTIONS.get(planner, {})
    if planner is None:
        del options['planner']
    options['arena'] = chance.random() < 0.7
    switches = [name for name in SWITCHES if chance.random() < 0.15]
    share = chance.uniform(0.6, 0.98)
    if options.get('sources'):
        share += 0.2  # they take memory
    network = chance.randrange(len(NETWORKS))
    return Drawn(seed, network, share, options, tuple(switches))


def _draw_plan(chance: random.Random) -> dict[str, Any]:
    return {
        'seed_of_plan': chance.randrange(1 << 30),
        'weights': [chance.random(), chance.random(), 2.0],
        'barrier': chance.random() < 0.5,
        'late': chance.choice((0.0, 0.5)),
        'sources': chance.choice((0.0, 0.5, 1.0)),
    }


def _make_known(
    executor: Executor, k: int, function: Any, before: Any = Executor.before_forward
) -> bool:
    """Begins a forward operation, of which no function is only noted."""
    before(executor, k, function)
    return False


def _nothing(*_: Any) -> None:
    pass


SWITCHES: dict[str, Callable[[], Any]] = {
    'idle functions': lambda: mock.patch.object(
        Executor, 'before_forward', _make_known
    ),
    'prefetching': lambda: mock.patch.object(Prefetcher, 'prefetch', _nothing),
}


def train(make: Callable[[], chainer.Chain], session: Any, each: Any) -> None:
    """Trains a network; ``each`` gets what every iteration has made."""
    np.random.seed(0)
    model = make()
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
    with session(model):
        for number in range(ITERATIONS):
            x = np.random.rand(64, 32).astype(np.float32)
            loss = model(x)
            model.cleargrads()
            loss.backward()
            each(number, (loss.array.tobytes(), optimizer))
            del loss
            optimizer.update()


def bits(made: tuple[bytes, Any]) -> tuple[bytes, ...]:
    """The loss, and the gradients of all parameters."""
    loss, optimizer = made
    return (loss, *(p.grad.tobytes() for p in optimizer.target.params()))


@functools.cache
def expected(network: int) -> tuple[list[tuple[bytes, ...]], int, int]:
    """What plain Chainer makes in each iteration, its peak and what stays, in bytes."""
    found: list[tuple[bytes, ...]] = []
    device = HostDevice(1 << 40)

    @contextlib.contextmanager
    def counted(model: chainer.Chain) -> Iterator[None]:
        device.memory.install(lambda nbytes: None)
        try:
            yield
        finally:
            stays.append(device.memory.used_bytes)
            device.memory.uninstall()

    stays: list[int] = []
    train(NETWORKS[network], counted, lambda _, made: found.append(bits(made)))
    peak_bytes = device.memory.peak_bytes
    device.close()
    return found, peak_bytes, stays[0]


def run(drawn: Drawn) -> tuple[str, int]:
    """Trains one session.

    Returns:
        tuple: What is wrong with it, empty if nothing; how many iterations there were.
    """
    records, peak_bytes, stays_bytes = expected(drawn.network)
    limit_bytes, done = stays_bytes + int(drawn.share * (peak_bytes - stays_bytes)), 0
    machine = Machine(draw(drawn.seed))

    def each(number: int, made: Any) -> None:
        nonlocal done
        if bits(made) != records[number]:
            raise AssertionError(f'iteration {number} has other bits')
        done = number + 1
        conditions = draw(drawn.seed * ITERATIONS + number)
        machine.change(**dataclasses.asdict(conditions))
        machine.chance.seed(conditions.seed)

    @contextlib.contextmanager
    def session(model: chainer.Chain) -> Iterator[None]:
        with hybridmem.optimize(model, f'{limit_bytes}B', **drawn.options) as opened:
            yield
        most_bytes = opened.statistics()['peak_bytes']
        if most_bytes > limit_bytes:
            raise AssertionError(f'peak {most_bytes} above the limit {limit_bytes}')

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter('ignore')
            stack.enter_context(machine.running())
            stack.enter_context(
                mock.patch.dict(planners.PLANNERS, {RANDOM: random_plan})
            )
            for name in drawn.without:
                stack.enter_context(SWITCHES[name]())
            train(NETWORKS[drawn.network], session, each)
    except hybridmem.HybridMemoryError as error:
        refused = isinstance(error, MemoryError | hybridmem.InfeasibleError)
        return ('' if refused else f'{type(error).__name__}: {error}'), done
    except AssertionError as error:
        return str(error), done
    return '', done


def _work(seeds: Iterator[int], end: float, failures: Any, count: Any) -> None:
    for seed in seeds:
        if time.monotonic() > end:
            return
        drawn = draw_session(seed)
        wrong, iterations = run(drawn)
        with count.get_lock():
            count.value += iterations
        if wrong:
            failures.put(f'session {seed}: {wrong}\n  {drawn}')


def main() -> int:
    """Runs sessions until the time is over; 1 if one has failed or none has run."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--seed', type=int, default=0, help='of the run')
    parser.add_argument('--minutes', type=float, default=5.0)
    parser.add_argument('--jobs', type=int, default=1, help='processes')
    parser.add_argument('--session', type=int, help='run only this one of the run')
    arguments = parser.parse_args()
    first = arguments.seed * STRIDE
    if arguments.session is not None:
        wrong, iterations = run(draw_session(first + arguments.session))
        print(f'{iterations} iterations; {wrong or "nothing is wrong"}')
        return int(bool(wrong))
    start = time.monotonic()
    end, count = start + 60 * arguments.minutes, multiprocessing.Value('l', 0)
    failures: Any = multiprocessing.Queue()
    jobs = [
        multiprocessing.Process(
            target=_work,
            args=(
                iter(range(first + j, first + STRIDE, arguments.jobs)),
                end,
                failures,
                count,
            ),
        )
        for j in range(arguments.jobs)
    ]
    for job in jobs:
        job.start()
    found = []
    while any(job.is_alive() for job in jobs) or not failures.empty():
        with contextlib.suppress(Exception):
            found.append(failures.get(timeout=0.2))
            print(found[-1], flush=True)
    for job in jobs:
        job.join()
    seconds = time.monotonic() - start
    print(
        f'{count.value} schedules in {seconds:.0f} s, {count.value / seconds:.0f} a '
        f'second; {len(found)} sessions have failed'
    )
    lost = any(job.exitcode for job in jobs)
    return int(bool(found) or lost or not count.value)


if __name__ == '__main__':
    sys.exit(main())
