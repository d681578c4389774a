"""``hybridmem estimate --ranks``: how many GPUs on one link are worth it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.commands.arguments import ranks
from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.reporting.tables import (
    Column,
    figures_table,
)
from chainer_hybridmem.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from chainer_hybridmem.commands.progress import Progress
    from chainer_hybridmem.forecasting.estimation import GpuNode
    from chainer_hybridmem.forecasting.rank_plans import RankPlans
    from chainer_hybridmem.planning.simulation import Problem

COLUMNS = (
    Column('GPUs', 'gpus'),
    Column('on a link', 'ranks_on_link'),
    Column('images / s', 'images_per_second', '{:.1f}'.format),
    Column('per GPU', 'images_per_second_per_gpu', '{:.1f}'.format),
    Column('overhead', 'overhead', 'difference'),
    Column('bound', 'bound_overhead', 'difference'),
    Column('gap', 'gap', 'share'),
    Column('plan for a link alone', 'alone_plan_overhead', 'difference'),
)
EXTRA_COLUMNS = (
    Column('half an iteration apart', 'half_apart_overhead', 'difference'),
    Column('bound of any start', 'any_start_bound_overhead', 'difference'),
    Column('all-reduce', 'all_reduce'),
)


def add(group: Any) -> None:
    """Adds the options that ask about several GPUs."""
    from chainer_hybridmem.forecasting.estimation import node_names

    group.add_argument(
        '--ranks',
        type=ranks,
        metavar='N',
        help='also tell what 1, 2, 4 ... up to N GPUs on one link would do; with '
        '--node, GPUs of the node',
    )
    group.add_argument(
        '--node',
        metavar='NAME',
        help=f'the GPUs are those of {", ".join(node_names())}; --gpu is its own one '
        'then, and --ranks all of them, unless they are given',
    )
    group.add_argument(
        '--all-reduce',
        action='store_true',
        help='between backward and the update, the sum of gradients crosses the same '
        'link (where the node has no NVLink)',
    )
    group.add_argument(
        '--double-buffering',
        action='store_true',
        help='also tell what they reach half an iteration apart, as double buffering '
        'lets them be; the sum of gradients is left out',
    )


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """The options with what a node says where they say nothing.

    Raises:
        OptionError: If they contradict each other, or the node.
        UnknownNameError: If there is no such node.
    """
    found = vars(args).copy()
    node = _find_node(args)
    if node is not None:
        found['gpu'] = node.gpu if args.gpu is None else args.gpu
        found['ranks'] = node.gpus if args.ranks is None else args.ranks
        node.ranks_on_link(found['ranks'])  # or it has not so many
    for name in ('all_reduce', 'double_buffering'):
        if found['ranks'] is None and found[name]:
            raise OptionError(
                f'--{name.replace("_", "-")} is about several GPUs: say how many with '
                f'--ranks, or name a node with --node.'
            )
    if args.all_reduce and args.double_buffering:
        raise OptionError(
            '--all-reduce puts the sum of gradients between backward and the update; '
            'with double buffering it runs beside the next iteration: ask for one of '
            'both.'
        )
    if found['ranks'] is not None and args.shared_by is not None:
        raise OptionError(
            '--ranks counts the processes on the link from one on: leave out '
            '--shared-by, or leave out --ranks and --node.'
        )
    return argparse.Namespace(**found)


def _find_node(args: argparse.Namespace) -> GpuNode | None:
    from chainer_hybridmem.forecasting.estimation import load_node

    return None if args.node is None else load_node(args.node)


def counts(most: int) -> list[int]:
    """1, 2, 4 ... and the number itself."""
    powers = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [*powers, most]


def summarise(
    problem: Problem,
    limit_bytes: int,
    planner: str,
    args: argparse.Namespace,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Figures by the number of GPUs, as plain values.

    Args:
        problem: One process with the link for itself.
        limit_bytes: Memory limit of each process.
        planner: Its name.
        args: Of :func:`resolve`.
        progress: Is told what is planned.
    """
    from chainer_hybridmem.forecasting.estimation import with_all_reduce
    from chainer_hybridmem.forecasting.rank_plans import plan_ranks
    from chainer_hybridmem.planning.records.sharing import share_links
    from chainer_hybridmem.planning.simulation.problem import with_profile

    node = _find_node(args)
    summed = args.all_reduce and not (node is not None and node.nvlink)
    if summed:  # an operation more; how long it takes depends on their number
        problem = with_profile(problem, with_all_reduce(problem.profile, 1))
    on_link = {n: node.ranks_on_link(n) if node else n for n in counts(args.ranks)}
    problems = {
        shared: with_profile(problem, share_links(problem.profile, shared))
        for shared in sorted({1, *on_link.values()})
    }
    try:
        plans = plan_ranks(problems, limit_bytes, planner, tell=progress.detail)
    except InfeasibleError as error:
        return [_misfit(n, shared, str(error)) for n, shared in on_link.items()]
    rows = []
    for n, shared in on_link.items():
        there = problems[shared]
        if summed:
            there = with_profile(there, with_all_reduce(there.profile, n))
        row = _row(there, n, shared, plans, summed)
        if args.double_buffering:
            row |= _half_apart(there, shared, plans, limit_bytes)
        rows.append(row)
    return rows


def _row(
    problem: Problem, gpus: int, shared: int, plans: RankPlans, summed: bool
) -> dict[str, Any]:
    from chainer_hybridmem.forecasting.estimation import (
        all_reduce_bytes,
        all_reduce_seconds,
    )
    from chainer_hybridmem.forecasting.rank_plans import retime

    best = retime(problem, plans.best[shared])
    alone = retime(problem, plans.made.get(1, plans.best[1]))
    seconds, in_core = best.predicted_seconds, best.in_core_seconds
    profile = problem.profile
    batchsize = profile.device['batchsize']
    return {
        'gpus': gpus,
        'ranks_on_link': shared,
        'fits': True,
        'iteration_seconds': seconds,
        'in_core_seconds': in_core,
        'images_per_second_per_gpu': batchsize / seconds if seconds else None,
        'images_per_second': gpus * batchsize / seconds if seconds else None,
        'overhead': best.overhead,
        'lower_bound_seconds': best.lower_bound_seconds,
        'bound_overhead': best.lower_bound_seconds / in_core - 1 if in_core else 0.0,
        'gap': best.gap,
        'alone_plan_seconds': alone.predicted_seconds,
        'alone_plan_overhead': alone.overhead,
        'all_reduce_bytes': all_reduce_bytes(profile, gpus),
        'all_reduce_seconds': all_reduce_seconds(profile, gpus) if summed else None,
    }


def _half_apart(
    problem: Problem, shared: int, plans: RankPlans, limit_bytes: int
) -> dict[str, Any]:
    from chainer_hybridmem.planning.search.bound import bound_of_ranks
    from chainer_hybridmem.planning.simulation.problem import with_parts
    from chainer_hybridmem.planning.simulation.staggered import stagger

    found = []
    for plan in plans.best.values():
        there = with_parts(problem, plan.parts)
        found.append((stagger(there, plan, shared), there))
    best, there = min(found, key=lambda pair: pair[0])
    bound, in_core = bound_of_ranks(there, limit_bytes, shared), there.in_core_seconds

    def over(seconds: float) -> float:
        return max(0.0, seconds / in_core - 1) if in_core else 0.0

    return {
        'half_apart_seconds': best.seconds,
        'half_apart_offset_seconds': max(best.offsets),
        'half_apart_overhead': over(best.seconds),
        'any_start_bound_seconds': bound,
        'any_start_bound_overhead': over(bound),
    }


def _misfit(gpus: int, shared: int, reason: str) -> dict[str, Any]:
    return {'gpus': gpus, 'ranks_on_link': shared, 'fits': False, 'reason': reason}


def describe(rows: list[dict[str, Any]]) -> str:
    """The table for people."""
    if not rows[0]['fits']:
        return rows[0]['reason']
    rows = [_with_all_reduce(row) for row in rows]
    extra = [
        c for c in EXTRA_COLUMNS if any(row.get(c.key) is not None for row in rows)
    ]
    return figures_table([*COLUMNS, *extra], rows)


def _with_all_reduce(row: dict[str, Any]) -> dict[str, Any]:
    """The row with bytes and seconds of the sum of gradients in one cell."""
    seconds = row['all_reduce_seconds']
    if seconds is None:
        return row
    nbytes = format_bytes(row['all_reduce_bytes'])
    return {**row, 'all_reduce': f'{nbytes}, {format_seconds(seconds)}'}
