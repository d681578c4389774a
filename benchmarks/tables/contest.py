"""Planners and layouts against the best that others have published."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.tables.form import Body, Section, percent, table
from chainer_hybridmem.lab.contest import page

LONGER = 'hybrid:time_budget=50'
LEVEL = 1e-9  # of a value; what is this much larger is as good
FAMILY = 'checkmate/'
PUBLIC = {
    'checkmate': "plans, Checkmate's",
    'moccasin': "plans, MOCCASIN's",
    'minimalloc': "layouts, MiniMalloc's",
}
TILINGS = {
    'layouts, drawn tilings': ('guillotine', 'pinwheel'),
    'layouts, tilings with gaps': ('gaps',),
}
NAMES = {
    'unet': 'U-Net',
    'vgg16': 'VGG-16',
    'mobilenet-v2': 'MobileNet-v2',
    'resnet50': 'ResNet-50',
    'googlenet': 'GoogLeNet',
}


def _rows(body: Body, entrant: str = 'hybrid') -> list[Body]:
    """Those of a planner on Checkmate's instances."""
    return [
        row
        for row in body['rows']
        if row['entrant'] == entrant and row['instance'].startswith(FAMILY)
    ]


def _count(rows: Sequence[Body], most: float) -> int:
    """How many plans take at most so many times the published one."""
    return sum(
        row['fits'] and (row['best_known'] is None or _ratio(row) <= most)
        for row in rows
    )


def _ratio(row: Body) -> float:
    return float(row['value'] / row['best_known'])


def _hours(values: Sequence[float]) -> str:
    low, high = (_duration(value) for value in (min(values), max(values)))
    return low if low == high else f'{low} to {high}'


def _duration(seconds: float) -> str:
    return f'{seconds / 3600:.0f} h' if seconds >= 3600 else f'{seconds:,.0f} s'


def by_network(body: Body) -> str:
    """Returns how many plans are as good as the published ones, and seconds.

    Args:
        body: Content of ``arena.json``.
    """
    head = ['network', 'limits', 'as good', 'better', 'by up to', 'worse by up to']
    head += ['seconds', 'Gurobi']
    lines = []
    groups = itertools.groupby(_rows(body), key=lambda row: row['instance'])
    for _, group in groups:
        rows = list(group)
        shares = [_ratio(row) - 1 for row in rows if row['fits'] and row['best_known']]
        spent = [row['cpu_seconds'] for row in rows]
        known = [row['known_seconds'] for row in rows if row['known_seconds']]
        lines.append(
            [
                _name(rows[0]),
                len(rows),
                _count(rows, 1 + LEVEL),
                _count(rows, 1 - LEVEL),
                _share(-min(shares)),
                _share(max(shares)),
                f'{max(spent):.1f}',
                _hours(known),
            ]
        )
    return table(head, lines)


def readme(body: Body, chains: Body, tilings: Body) -> str:
    """Returns what the README says of it.

    Args:
        body: Content of ``arena.json``.
        chains: Content of ``chains.json``.
        tilings: Content of ``tilings.json``.
    """
    rows, longer = _rows(body), _rows(body, LONGER)
    return (
        'Public instances, and drawn ones of known optimum '
        '([arena](docs/reference/arena.md)): how many answers are proven. On '
        "Checkmate's, where Gurobi took up to a day, `hybrid` is as good or "
        f'better on {_count(rows, 1 + LEVEL)} of {len(rows)} limits, better on '
        f'{_count(rows, 1 - LEVEL)}; given 50 s, on {_count(longer, 1 + LEVEL)} and '
        f'{_count(longer, 1 - LEVEL)}.\n\n{proven(body, chains, tilings)}'
    )


def proven(body: Body, chains: Body, tilings: Body) -> str:
    """Returns how many answers are optimal, the largest share first.

    Args:
        body: Content of ``arena.json``.
        chains: Content of ``chains.json``.
        tilings: Content of ``tilings.json``.
    """
    plan = chains['plan']
    lines = [
        (
            'plans, drawn chains',
            chains['chains'],
            plan['equal'],
            plan['worst'],
            plan['most_seconds'],
        )
    ]
    for name, kinds in TILINGS.items():
        found = [tilings[kind]['exact'] for kind in kinds]
        lines.append(
            (
                name,
                sum(tilings[kind]['tilings'] for kind in kinds),
                sum(one['equal'] for one in found),
                max(one['worst'] for one in found),
                max(one['most_seconds'] for one in found),
            )
        )
    scored = page.scored(body['rows'])
    for family, name in PUBLIC.items():
        rows = [r for r in scored if r['instance'].startswith(f'{family}/')]
        found = page.cases(rows)
        worst = 1 + max(case['lost'] for case in found)
        spent = max(case['cpu_seconds'] for case in found)
        optimal = sum(case['proven'] for case in found)
        lines.append((name, len(found), optimal, worst, spent))
    lines.sort(key=lambda line: -line[2] / line[1])
    head = ['instances', 'limits', 'optimal', 'above best known', 'seconds']
    return table(head, [_cells(*line) for line in lines])


def _cells(
    name: str, count: int, optimal: int, worst: float, seconds: float
) -> list[str | None]:
    above = percent(worst - 1, 2) if worst > 1 + LEVEL else None
    return [name, f'{count:,}', f'{optimal:,}', above, f'{seconds:.1f}']


def _name(row: Body) -> str:
    name = row['instance'].removeprefix(FAMILY).rpartition('-b')[0]
    return NAMES.get(name, name)


def _share(value: float) -> str | None:
    return percent(value, 2) if value > LEVEL else None


def says(body: Body, layouts: Body) -> str:
    """Returns what was played against whom, and how it ended.

    Args:
        body: Content of ``arena.json``.
        layouts: Content of ``layouts.json``.
    """
    rows, longer = _rows(body), _rows(body, LONGER)
    public = [row for row in layouts['instances'] if row['minimalloc_cpu_seconds']]
    fit = sum(row['footprint_bytes'] <= row['capacity_bytes'] for row in public)
    most = max(row['cpu_seconds'] / row['minimalloc_cpu_seconds'] for row in public)
    return (
        "Checkmate's five networks without swaps, beside plans that Gurobi found in "
        'up to a day on twelve threads: `hybrid` at its defaults, on one core, is as '
        f'good or better on {_count(rows, 1 + LEVEL)} of {len(rows)} limits and better '
        f'on {_count(rows, 1 - LEVEL)}; with `time_budget=50`, on '
        f'{_count(longer, 1 + LEVEL)} and {_count(longer, 1 - LEVEL)}. Of the '
        f'{len(public)} memory layouts that MiniMalloc has published, `exact` finds '
        f'{fit}, in at most {most:.2f} of its time.'
    )


def batches(body: Body) -> str:
    """Returns the largest batches, published, ours and at most.

    Args:
        body: Content of ``checkmate_batches.json``.
    """
    head = ['network', 'published', '`hybrid`', 'CPU seconds', 'no schedule has more']
    head += ['refused for', 'CPU seconds']
    return table(
        head,
        [
            [
                row['network'].rpartition('-b')[0],
                f'{row["published"]}{", the largest" if row["certified"] else ""}',
                f'{row["ours"]:,}',
                f'{row["seconds"]:.1f}',
                f'{row["bound"]:,}',
                row['refused_for'],
                f'{row["bound_seconds"]:.1f}',
            ]
            for row in body['networks']
        ],
    )


def least(body: Body) -> str:
    """Returns how far plans at the least limits are from what is proven.

    Args:
        body: Content of ``least_limits.json``.
    """
    rows = []
    for row in body['profiles']:
        cells = [row['profile'], f'{row["limit_bytes"] / 2**30:.2f} GiB']
        for planner in ('hybrid', 'exact'):
            found = row[planner]
            over = found['seconds'] / found['in_core_seconds'] - 1
            gap = found['seconds'] / found['bound_seconds'] - 1
            cells += [percent(over), percent(gap), f'{found["cpu_seconds"]:.0f}']
        rows.append(cells)
    head = ['profile', 'limit']
    for planner in ('hybrid', 'exact'):
        head += [f'`{planner}` over in-core', 'gap', 'CPU seconds']
    return table(head, rows)


SECTIONS = (
    Section(
        ('arena', 'chains', 'tilings'),
        'Answers that are proven to be optimal',
        """`hybrid` at its defaults for plans, `exact` for layouts. Drawn chains have a
        closed optimum, tilings the height of the rectangle that they are cut from;
        seeds from 0 on. *Above the best known* counts whoever has found it. Seconds
        are the longest. Every instance: [the
        arena](../benchmarks/results/arena.md).""",
        proven,
    ),
    Section(
        ('least_limits',),
        'Plans at the least limits',
        """Every shipped profile at the smallest limit under which any plan exists,
        where plans are farthest from what is proven. The gap is the plan over the
        bound of the same row, less 1. `exact` has a minute for its tree.""",
        least,
    ),
    Section(
        ('checkmate_batches',),
        "Checkmate's largest batches",
        """In 16 GB with parameters and their gradients, in the time of two forward
        passes and backward (its Figure 6). Published are the batches of its branch
        `mlsys20_artifact`, after minutes to two days of Gurobi, whose times are
        operations; ours are in the times of the V100 that MOCCASIN's files have. A
        batch above the bound is refused to every schedule of Checkmate's form: one
        operation needs more memory, or all take more time.""",
        batches,
    ),
)
