"""Batch sizes: the largest one, and plans that are taken to another one."""

from __future__ import annotations

import statistics

from benchmarks.tables.form import Body, Section, ratio, table


def largest(body: Body) -> str:
    """Returns by planner how often the answer trains and one more does not."""
    rows = body['rows']
    lines = []
    for planner in sorted({row['planner'] for row in rows}):
        mine = [row for row in rows if row['planner'] == planner]
        answers = [row for row in mine if row.get('answer')]
        gains = [row['answer'] / row['in_core'] for row in answers if row['in_core']]
        lines.append(
            [
                f'`{planner}`',
                len(mine),
                sum(row['right'] for row in mine),
                sum(row.get('with', {}).get('state') == 'guided' for row in mine),
                sum(row.get('answer') == 0 for row in mine),
                ratio(statistics.median(gains)) if gains else None,
            ]
        )
    right = sum(row['right'] for row in rows)
    lines.append(['all', len(rows), right, *[None] * 3])
    head = ['planner', 'cases', 'right', 'with a plan', 'nothing fits']
    head.append('answer / in-core, median')
    return table(head, lines)


SECTIONS = (
    Section(
        ('largest_batch',),
        'The largest batch',
        """Drawn networks, optimizers, limits and planners
        ([explained](guide/largest_batch.md)). *Right*: training with the answer of
        `largest_batch()` goes through inside the limit, and training with one example
        more ends in an error. *With a plan*: the answer's iterations end up following
        one.""",
        largest,
    ),
)
