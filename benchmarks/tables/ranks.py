"""Tables of processes that train together."""

from __future__ import annotations

from benchmarks.tables.form import (
    Body,
    Section,
    overhead,
    percent,
    ratio,
    seconds,
    table,
    yes,
)

MOST_WORDS = 240


def ranks(body: Body) -> str:
    """Returns what plans cost on a link that several GPUs share."""
    head = ['network', 'GPUs', 'plan for a link alone', 'plan that knows', 'bound']
    head += ['gap', 'plan that knows, half later', 'double buffering, half apart']
    head += ['bound of any start']
    lines = []
    for row in body['rows']:
        in_core = row['in_core_seconds']

        def over(value: float | None, in_core: float = in_core) -> str | None:
            if value is None:
                return None
            return overhead(round(value / in_core - 1, 6) + 0.0)  # no -0.0

        lines.append(
            [
                row['network'],
                row['ranks'],
                over(row['alone_plan_seconds']),
                over(row['best_seconds']),
                over(row['bound_seconds']),
                percent(row['best_seconds'] / row['bound_seconds'] - 1),
                over(row['synchronous'].get('best')),
                over(row['double_buffering'].get('seconds')),
                over(row['any_start_bound_seconds']),
            ]
        )
    return table(head, lines)


def ranks_measured(body: Body) -> str:
    """Returns what processes gain that know of each other, measured."""
    head = ['network', 'processes', 'memory', 'plain', 'plans for a link alone']
    head += ['one plan that knows', 'gain', 'at most', 'forecast off by']
    head += ['timed ones off by', 'rounds', 'bits equal', 'commit']
    return table(
        head,
        [
            [
                row['network'].lower(),
                row['processes'],
                f'1 / {row["share"]:g}',
                f'{seconds(row["plain_seconds"])} s',
                f'{seconds(row["alone_seconds"])} s',
                f'{seconds(row["together_seconds"])} s',
                ratio(row['gain']),
                ratio(row['alone_seconds'] / row['bound_seconds']),
                overhead(row['forecast_error']),
                overhead(row['simulator_error']),
                row['rounds'],
                yes(row['equal']),
                row.get('commit', body['environment']['commit']),
            ]
            for row in body['rows']
        ],
    )


def ranks_faults(body: Body) -> str:
    """Returns what has become of processes, one of which fails or differs."""
    head = ['the second process', 'then', 'seconds', 'bits equal', 'the first says']
    head += ['the second says']
    return table(
        head,
        [
            [
                row['what'],
                'both end' if row['ends'] else 'both go on',
                seconds(row['seconds'], 1),
                None if row['ends'] else yes(row['bits_equal']),
                *(words[:MOST_WORDS] for words in row['words']),
            ]
            for row in body['rows']
        ],
    )


SECTIONS = (
    Section(
        ('ranks',),
        'Several GPUs on one link',
        """V100s with 16 GB that share one link of PCIe 3.0, 12 GB/s in each direction
        for all of them ([explained](guide/data_parallel.md#how-many-gpus-on-one-link)):
        predicted time over in-core time, minus 1, without the sum of gradients.
        Whole forwards are replayed. *Plan for a link alone*: made for one GPU and timed
        again on the shared link. *Plan that knows*: the best of the plans for 1, 2, 4
        and 8 GPUs. *Half later*: in synchronous training one half begins each iteration
        later; the best of seven delays. *Half apart*: with double buffering, the best
        of the plans and of several offsets. The bound is that of lockstep. Where
        the gap was above 1 %, planner `exact` had a minute to raise it. *Bound of any
        start*: no plans, alike or not, and no delays are faster.""",
        ranks,
    ),
    Section(
        ('ranks_measured',),
        'Processes on one link, measured',
        """48 convolutions (*plain*), the same with batch normalization (*normalised*)
        and a residual network of 38 layers, trained by ChainerMN over MPI on CPUs. All
        processes share one throttle ([explained](guide/data_parallel.md)): beside
        compute, it is as fast as 12 GB/s beside a V100 with ResNet-50. *Plans for a
        link alone*: each process plans as if it had the throttle for itself. *One plan
        that knows*: with `communicator`. Seconds of an iteration: medians of the last
        twelve, of the slowest process, in turns in the same processes; then the median
        of the rounds. All processes are on two cores. *At most*: plans for a link alone
        over the bound, which is for the times of the three iterations that are timed.
        *Timed ones off by*: the prediction against those three; the rest of the
        forecast's error is how the machine's speed has changed since. Rows of another
        commit than the last one are kept from an earlier run.""",
        ranks_measured,
    ),
    Section(
        ('ranks_faults',),
        'When one of several processes fails',
        """Two processes over MPI with `communicator`. Seconds from the fault until both
        have ended, or until both have gone on for an iteration; with another limit or
        batch size, of all twelve iterations beyond those without a fault. Long
        sentences are cut.""",
        ranks_faults,
    ),
)
