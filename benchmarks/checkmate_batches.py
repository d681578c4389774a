"""The largest batches of Checkmate (Figure 6): ours, a bound, and what they publish.

    python -m benchmarks run checkmate_batches FOLDER

FOLDER has the files of github.com/haoming-codes/moccasin, which are Checkmate's own
graphs; their arrays grow with the batch. As in Checkmate's branch ``mlsys20_artifact``
(``experiments/experiment_max_batchsize_ilp.py``), 16 GB hold parameters and their
gradients besides, and an iteration takes no longer than with a second forward pass.
Their times are operations, those of the files are of a V100: what is allowed to be made
again differs. Published batches are those of that branch's README. A batch beyond our
bound is refused to every schedule of Checkmate's form. Writes
``benchmarks/results/checkmate_batches.json``.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, NamedTuple

from benchmarks import saving
from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.forecasting.batches import largest_planned
from chainer_hybridmem.lab.contest import checkmate_rules
from chainer_hybridmem.lab.contest.instances import load_catalogue
from chainer_hybridmem.lab.importing.checkmate import KIB, UNIT_SECONDS
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.search.bound import bound_of_schedules
from chainer_hybridmem.planning.simulation import Problem

NAME = 'checkmate_batches'
MEMORY_BYTES = 16 * 10**9
MOST = 2**14  # Checkmate looks no further
LOSS = 'Loss'


class Network(NamedTuple):
    """What is published of a network.

    Attributes:
        batchsize (int): Of its file.
        parameters (int): Of the network in Keras, of 4 bytes, as many gradients.
        published (int): The largest batch that Gurobi has found.
        certified (bool): Whether it is proven to be the largest.
    """

    batchsize: int
    parameters: int
    published: int
    certified: bool = False


NETWORKS = {
    'vgg19-b256': Network(256, 143_667_240, 289, True),
    'resnet50-b256': Network(256, 25_636_712, 193),
    'mobilenet-b512': Network(512, 4_253_864, 1105),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('folder', help="with MOCCASIN's repository")
    parser.add_argument('--planner', default='hybrid')


def main(options: argparse.Namespace) -> int:
    """Looks for the largest batch of each network."""
    files = {i.name: i for i in load_catalogue().instances([options.folder])}
    rows = []
    for name, network in NETWORKS.items():
        instance = files.get(f'moccasin/{name}')
        if instance is None:
            print(f'{options.folder} lacks the file of {name}.', file=sys.stderr)
            return 2
        rows.append({'network': name, **network._asdict()})
        rows[-1] |= look(instance.problem(), network, options.planner)
        print(rows[-1], file=sys.stderr, flush=True)
        saving.save(NAME, {'planner': options.planner, 'networks': rows})
    return 0


def look(problem: Problem, network: Network, planner: str) -> dict[str, Any]:
    """The largest batch of a plan, and the largest that no bound excludes."""
    operations = problem.profile.operations
    forward = sum(
        op.device_seconds
        for op in operations[: problem.profile.first_backward]
        if not op.label.endswith(LOSS)
    )
    most = (sum(op.device_seconds for op in operations) + forward) * (1 + 1e-9)

    def limit_of(batchsize: int) -> int:
        left = MEMORY_BYTES - 8 * network.parameters
        return left * network.batchsize // batchsize

    def is_planned(batchsize: int) -> bool:
        limit = limit_of(batchsize)
        try:
            plan = make_plan(problem, limit, planner)
        except InfeasibleError:
            return False
        found = checkmate_rules.judge_plan(problem.profile, plan, limit)
        return found.units * UNIT_SECONDS <= most

    def may_be(batchsize: int) -> bool:
        limit = limit_of(batchsize)
        if limit < least:
            return False
        return bound_of_schedules(problem, limit) <= most

    graph = checkmate_rules.graph_of(problem.profile)
    needed = [(i, *reads) for i, reads in enumerate(graph.reads)]
    least = KIB * max(sum(graph.kib[i] for i in there) for there in needed)
    began = time.process_time()
    ours = largest_planned(is_planned, MOST)
    between = time.process_time()
    bound = largest_planned(may_be, MOST)
    return {
        'ours': ours,
        'bound': bound,
        'refused_for': 'memory' if limit_of(bound + 1) < least else 'time',
        'seconds': between - began,
        'bound_seconds': time.process_time() - between,
    }
