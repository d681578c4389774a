"""The page that says which planner to take when: written from the comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.tables.form import Body, Section, actions, overhead, seconds, table
from benchmarks.tables.planning import EQUAL, short_seconds

DEFAULT = 'hybrid'
QUICK_SECONDS = 0.02
SHOWN = ('hybrid', 'pooch', 'capuchin', 'superneurons', 'swap-opt', 'checkpoint-dp')
HEAD = (
    '# Which planner when',
    'Which planner is fastest for my network and my limit? The default, `hybrid`. '
    'This page shows when another one is as good, and what a restriction costs.',
    '<!-- python -m benchmarks render writes this page; edit what it is made of -->',
    'The simulator predicts the times, for [every planner on every shipped profile]'
    '(tables_planning.md#every-planner-on-every-shipped-profile) ([for your own '
    'network](../../docs/guide/choosing.md#what-a-limit-costs)).',
)


def page(body: Body) -> list[str]:
    """Returns the paragraphs of the page.

    Args:
        body: Content of ``rivals_compare.json``.
    """
    rows = [row for row in body['rows'] if row['fits']]
    best = {case(row): row for row in rows if row['planner'] == DEFAULT}
    return [
        *HEAD,
        _summary(rows, best),
        '## What is allowed',
        'The two fastest planners of each kind, over the limits that they fit. *Over '
        '`hybrid`* is predicted time over that of `hybrid` at the same limits, minus '
        '1: geometric mean, and the worst.',
        _kinds(rows, best),
        '## How much memory there is',
        'Predicted time over in-core time, minus 1: geometric mean over the profiles '
        'that a planner fits. Limits lie at equal distances between the least memory '
        'of any plan and the in-core peak.',
        _limits(rows, body),
        'Near the in-core peak nearly every planner is free, because copies hide '
        'behind computing. Near the least memory the kinds part: swapping alone waits '
        'for the link, recomputing alone does not fit everywhere.',
        '[For each network](tables_planning.md#plans-of-each-shipped-profile).',
    ]


def case(row: Body) -> tuple[str, int]:
    """Returns what a plan is for: profile and limit."""
    return row['profile'], row['memory_limit_bytes']


def _summary(rows: list[Body], best: dict[tuple[str, int], Body]) -> str:
    fastest = {}
    for row in rows:
        fastest[case(row)] = min(
            row['iteration_seconds'], fastest.get(case(row), math.inf)
        )
    wins = sum(
        row['iteration_seconds'] <= fastest[key] * (1 + EQUAL)
        for key, row in best.items()
    )
    planners = len({row['planner'] for row in rows})
    long = max(row['planning_seconds'] for row in best.values())
    return (
        f'At {wins} of {len(fastest)} limits none of the {planners} planners compared '
        f'is faster than `hybrid`, which planned for {short_seconds(long)} at most. '
        f'`exact` is not among them: it searches on from the plan of `hybrid` for as '
        f'long as it is allowed.'
    )


def _kinds(rows: list[Body], best: dict[tuple[str, int], Body]) -> str:
    planners = dict.fromkeys(row['planner'] for row in rows)
    by_planner = {p: [row for row in rows if row['planner'] == p] for p in planners}
    kinds: dict[str, Callable[[list[Body]], bool]] = {
        'everything': lambda own: True,
        'no recomputing': lambda own: not any(row['recompute'] for row in own),
        'no copies': lambda own: not any(row['swap'] for row in own),
        f'planning in {short_seconds(QUICK_SECONDS)}': lambda own: (
            max(row['planning_seconds'] for row in own) <= QUICK_SECONDS
        ),
    }
    lines = []
    for kind, allows in kinds.items():
        found = [p for p in planners if allows(by_planner[p]) and p != 'in-core']
        lines += [
            [kind if i == 0 else '', *_beside(by_planner[p], best, len(best))]
            for i, p in enumerate(sorted(found, key=lambda p: _rank(by_planner[p]))[:2])
        ]
    head = ['allowed', 'planner', 'fits', 'over `hybrid`', 'worst', 'longest planning']
    return table(head, lines)


def _rank(own: list[Body]) -> tuple[int, float]:
    return -len(own), _mean(row['gap'] for row in own)


def _beside(
    own: list[Body], best: dict[tuple[str, int], Body], limits: int
) -> list[str | None]:
    ratios = [
        row['iteration_seconds'] / best[case(row)]['iteration_seconds'] - 1
        for row in own
    ]
    return [
        f'`{own[0]["planner"]}`',
        f'{len(own)} of {limits}',
        overhead(_mean(ratios)),
        overhead(max(ratios)),
        short_seconds(max(row['planning_seconds'] for row in own)),
    ]


def _limits(rows: list[Body], body: Body) -> str:
    limits = _limits_of(body)
    count = len(next(iter(limits.values())))
    lines = []
    for i in range(count):
        cases = {(profile, found[i]) for profile, found in limits.items()}
        line: list[str] = [_name(i, count)]
        for planner in SHOWN:
            own = [r for r in rows if r['planner'] == planner and case(r) in cases]
            mean = overhead(_mean(row['overhead'] for row in own)) if own else None
            all_fit = len(own) == len(cases)
            line.append(
                str(mean) if all_fit else f'{mean} ({len(own)} of {len(cases)} fit)'
            )
        lines.append(line)
    return table(['limit', *(f'`{name}`' for name in SHOWN)], lines)


def _name(i: int, count: int) -> str:
    names = {0: 'least memory', count - 1: 'in-core peak'}
    return names.get(i, f'{100 * i // (count - 1)} % of the way')


def _limits_of(body: Body) -> dict[str, list[int]]:
    """Returns the limits of each profile, the smallest first."""
    found: dict[str, set[int]] = {}
    for row in body['rows']:
        found.setdefault(row['profile'], set()).add(row['memory_limit_bytes'])
    return {profile: sorted(limits) for profile, limits in found.items()}


def networks(body: Body) -> str:
    """Returns the plans of each profile at its third limit."""
    rows = [row for row in body['rows'] if row['fits']]
    lines = []
    for profile, limits in _limits_of(body).items():
        own = [row for row in rows if case(row) == (profile, limits[2])]
        hybrid = next(row for row in own if row['planner'] == DEFAULT)
        copies = [r for r in own if not r['recompute'] and r['planner'] != DEFAULT]
        replays = [r for r in own if not r['swap'] and r['planner'] != DEFAULT]
        lines.append(
            [
                profile.removeprefix('shipped:'),
                f'{100 * limits[2] // body["peaks"][profile]} %',
                seconds(hybrid['in_core_seconds'], 3),
                overhead(hybrid['overhead']),
                actions(hybrid),
                _fastest(copies),
                _fastest(replays),
            ]
        )
    head = ['profile', 'limit / peak', 'in-core s', '`hybrid`']
    head += ['keep / swap / recompute', 'copies only', 'recomputing only']
    return table(head, lines)


def _fastest(own: Sequence[Body]) -> str:
    if not own:
        return 'no plan'
    row = min(own, key=lambda row: row['iteration_seconds'])
    return f'{overhead(row["overhead"])} `{row["planner"]}`'


def _mean(gaps: Iterable[float]) -> float:
    """Returns the geometric mean of ratios minus 1, minus 1."""
    return math.expm1(statistics.fmean(math.log1p(gap) for gap in gaps))


SECTIONS = (
    Section(
        ('rivals_compare',),
        'Plans of each shipped profile',
        """At the third of the six limits. *Copies only* and *recomputing only* are the
        fastest plans that do nothing else. Where copies alone cost much, the link is
        slow beside computing. Where recomputing alone costs little, most of the memory
        is in outputs of functions that are quick to run again.""",
        networks,
    ),
)
