"""Measured training under a limit, beside its prediction."""

from __future__ import annotations

import statistics

from benchmarks.tables.form import (
    Body,
    Section,
    actions,
    gigabytes,
    megabytes,
    overhead,
    percent,
    ratio,
    seconds,
    table,
)


def host_methods(body: Body) -> str:
    """Returns planners on three networks: measured beside predicted."""
    rows = body['rows']
    slowest = {
        row['arch']: row['iteration_seconds']
        for row in rows
        if row['planner'] == 'swap-all-unscheduled'
    }
    head = ['network', 'limit', 'planner', 's / iteration, forecast', 'measured']
    head += ['simulator error', 'bound', 'speed', 'peak, predicted', 'measured']
    head += ['keep / swap / recompute']
    lines = []
    for row in rows:
        limited = 'limit_bytes' in row
        lines.append(
            [
                f'{row["arch"]} b{row["batchsize"]}',
                megabytes(row['limit_bytes']) if limited else 'none',
                f'`{row["planner"]}`',
                seconds(row['predicted_seconds']),
                seconds(row['iteration_seconds']),
                overhead(row['simulator_error']) if limited else None,
                seconds(row.get('lower_bound_seconds')) if limited else None,
                ratio(slowest[row['arch']] / row['iteration_seconds']),
                megabytes(row['predicted_peak_bytes'], 1),
                megabytes(row['peak_bytes'], 1),
                actions(row) if limited else 'all kept',
            ]
        )
    return f'{table(head, lines)}\n\n{_errors(rows)}'


def _errors(rows: list[Body]) -> str:
    limited = [row for row in rows if 'limit_bytes' in row]
    simulated = sorted(abs(row['simulator_error']) for row in limited)
    forecast = sorted(
        abs(row['predicted_seconds'] / row['iteration_seconds'] - 1) for row in limited
    )
    return (
        f'Over the {len(limited)} rows with a limit:\n\n'
        f'- simulator error: median {percent(statistics.median(simulated))}, '
        f'worst {percent(simulated[-1])};\n'
        f'- forecast error: median {percent(statistics.median(forecast))}, '
        f'worst {percent(forecast[-1])}.'
    )


def host_pairs(body: Body) -> str:
    """Returns ``hybrid`` against ``pooch``, measured in turns."""
    head = ['network', 'limit', 'predicted: pooch / hybrid', 'measured, median']
    head += ['measured, each round']
    return table(
        head,
        [
            [
                f'{row["arch"]} b{row["batchsize"]}',
                megabytes(row['limit_bytes']),
                ratio(row['predicted_ratio'], 3),
                ratio(row['measured_ratio'], 3),
                ', '.join(f'{value:.3f}' for value in row['ratios']),
            ]
            for row in body['rows']
        ],
    )


def paper_ito(body: Body) -> str:
    """Returns the largest batch size of each network on the modelled V100."""
    head = ['network', 'needs', '`superneurons`', '`pooch`', '`hybrid`']
    head += ['`hybrid`, whole forwards', 'bound']
    lines = []
    for arch in ('resnet50', 'googlenet', 'alexnet'):
        rows = [row for row in body['rows'] if row['arch'] == arch]
        batch = max(row['batchsize'] for row in rows)
        by_method = {row['method']: row for row in rows if row['batchsize'] == batch}
        hybrid = by_method['hybrid']
        bound = hybrid['lower_bound_seconds'] / hybrid['in_core_seconds'] - 1
        lines.append(
            [
                f'{arch} b{batch}',
                gigabytes(hybrid['in_core_peak_bytes']),
                *(
                    overhead(by_method[method]['overhead'])
                    for method in ('superneurons', 'pooch', 'hybrid', 'hybrid (whole)')
                ),
                overhead(bound),
            ]
        )
    return table(head, lines)


def forget(body: Body) -> str:
    """Returns Chainer's own ``F.forget`` beside plans."""
    head = ['variant', 's / iteration', 'time over in-core', 'peak']
    head += ['keep / swap / recompute', 'same bits']
    return table(
        head,
        [
            [
                row['variant'],
                seconds(row['seconds'], 3),
                overhead(row['overhead']),
                megabytes(row['peak_bytes'], 1),
                actions(row) if 'keep' in row else None,
                'yes' if row['same bits'] else 'no',
            ]
            for row in body['rows']
        ],
    )


def varying_lengths(body: Body) -> str:
    """Returns a language model whose lengths vary beside one of fixed length."""
    head = ['lengths', 'ms / word, plain Chainer', 'in the limit', 'guided iterations']
    head += ['iterations that differed']
    rows = [
        [
            row['lengths'],
            seconds(row['plain_ms_per_word']),
            seconds(row['ms_per_word']),
            row['guided'],
            row['deviations'],
        ]
        for row in body['rows']
    ]
    return (
        f'{table(head, rows)}\n\n'
        f'Limit: {megabytes(body["limit_bytes"], 1)}. Ratio of the two times in the '
        f'limit: {ratio(body["ratio"])}.'
    )


def splitting(body: Body) -> str:
    """Returns what trains below the working set of single functions."""
    head = ['batch', 'in-core peak', 'limit', 'share', '`splitting`']
    head += ['functions in parts', 'of these not exact', 'seconds of iterations', 'end']
    return table(
        head,
        [
            [
                row['batch'],
                f'{megabytes(row["in_core_peak_bytes"])}',
                megabytes(row['limit_bytes']),
                f'1/{row["ratio"]:.1f}',
                row['splitting'],
                row['iterations'][-1]['split'],
                row['iterations'][-1]['split_inexact'],
                ', '.join(
                    f'{item["state"]} {item["seconds"]:.0f}'
                    for item in row['iterations']
                ),
                'out of memory' if row['error'] else row.get('ended', 'trained'),
            ]
            for row in body['rows']
        ],
    )


SECTIONS = (
    Section(
        ('host_methods',),
        'Planners on a CPU, measured beside predicted',
        """Three networks on pictures of 224x224, with copies throttled to 72 MB/s in
        each direction. That rate gives this machine the ratio of link to compute of
        the V100 of Ito et al. *Forecast* is the prediction before the measured
        iterations. *Simulator error* compares a simulation with the operation times
        of the very iterations that were measured. *Speed* is relative to
        `swap-all-unscheduled`. Each row has its own operation times and its own
        bound: do not compare bounds of different rows, nor times that differ by less
        than 10 %.""",
        host_methods,
    ),
    Section(
        ('host_pairs',),
        '`hybrid` against `pooch`, measured in turns',
        """The same networks and limits, both planners in turns in one process. Above
        1 `hybrid` is faster. Single rounds vary by up to 10 % on this machine.""",
        host_pairs,
    ),
    Section(
        ('paper_ito',),
        'Three networks on a modelled V100',
        """Predicted time over in-core time with 16 GB (10^9 bytes), each network at
        the largest batch size of the sweep. Compute times are calibrated on the 316
        images/s that Ito et al. measured for ResNet-50. *Passes* are recompute
        kernels over several functions. The paper measured up to +53 %, +64 % and
        +5 % for its own planner `pooch`. All batch sizes:
        [paper_ito.md](../benchmarks/results/paper_ito.md).""",
        paper_ito,
    ),
    Section(
        ('rivals_forget',),
        "Chainer's own `F.forget` beside plans",
        """ResNet-50, batch 8 at 112x112. `F.forget` wraps every block. The plans get
        the memory that `F.forget` needs. All variants run in turns.""",
        forget,
    ),
    Section(
        ('varying_lengths',),
        'Sequences of varying length',
        """A language model with 31 sequence lengths beside one with a single length,
        both in half the memory of the longest sequence. Medians of 60 iterations
        after 420.""",
        varying_lengths,
    ),
    Section(
        ('splitting',),
        'Functions in parts',
        """ResNet-50 at 224x224 in limits below the working set of single functions.
        The in-core peak of batch 64 is extrapolated from measured peaks of batches 4
        and 8.""",
        splitting,
    ),
)
