"""What single parts cost: replays, their checks, watching the pool."""

from __future__ import annotations

from benchmarks.tables.form import (
    Body,
    Section,
    megabytes,
    overhead,
    percent,
    ratio,
    table,
    yes,
)


def recompute(body: Body) -> str:
    """Returns forward, whole replay and pass of single functions."""
    head = ['case', 'forward', 'whole replay', 'pass', 'replay / pass', 'same bits']
    head += ['peak of the pass']
    return table(
        head,
        [
            [
                row['case'],
                _milliseconds(row['forward_seconds']),
                _milliseconds(row['replay_seconds']),
                _milliseconds(row['pass_seconds']) if row['has_pass'] else 'none',
                ratio(row['ratio'], 1) if row['has_pass'] else None,
                yes(row['exact']),
                megabytes(row['pass_peak_bytes'], 1) if row['has_pass'] else None,
            ]
            for row in body['rows']
        ],
    )


def _milliseconds(value: float) -> str:
    return f'{1000 * value:.2f} ms'


def checked_replays(body: Body) -> str:
    """Returns the share of an iteration that fingerprints take."""
    head = ['planner', 'limit', 'recomputed maps', 'fingerprints of', 'share of time']
    return table(
        head,
        [
            [
                f'`{row["planner"]}`',
                megabytes(row['limit_bytes']),
                row['recompute'],
                megabytes(row['fingerprint_bytes']),
                percent(row['share'], 2),
            ]
            for row in body['rows']
        ],
    )


def memory_profile(body: Body) -> str:
    """Returns what watching the pool costs, plain and in a session."""
    head = ['network', 'iteration, plain', 'watched', 'cost', 'in a session']
    head += ['watched in a session', 'cost']
    lines = []
    for row in body['rows']:
        plain, watched, session, both = (
            row[key]['fastest_tenth']
            for key in ('pool', 'profiled', 'session', 'session profiled')
        )
        lines.append(
            [
                row['arch'],
                _milliseconds(plain),
                _milliseconds(watched),
                overhead(watched / plain - 1),
                _milliseconds(session),
                _milliseconds(both),
                overhead(both / session - 1),
            ]
        )
    return table(head, lines)


SECTIONS = (
    Section(
        ('recompute',),
        'Recomputing: forward, whole replay and pass',
        """Medians on one BLAS thread. A pass is one compiled loop that makes the
        outputs of one or more functions again with the same bits.""",
        recompute,
    ),
    Section(
        ('checked_replays',),
        'Comparing every recomputed map',
        """ResNet-50, batch 16 at 112x112. Fingerprints of recomputed maps and of maps
        that the program holds, as a share of an iteration.""",
        checked_replays,
    ),
    Section(
        ('memory_profile',),
        'Watching the memory pool',
        """`profile_memory()` on ResNet-50 (64x64) and on a network of 20 tiny layers,
        in turns. The times are the fastest tenth of all iterations.""",
        memory_profile,
    ),
)
