"""The page of a contest: who is how far from the best known, instance by instance."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chainer_hybridmem.units import format_seconds

Row = Mapping[str, Any]
NONE = '-'
LEVEL = 1e-9  # of a value; what is this much better is as good
PROVEN = 1e-5  # of a bound, which is lowered by its solver's tolerances
DEFAULTS = {'plan': 'hybrid', 'layout': 'exact'}
UNIT = 1e-5  # seconds; of Checkmate's and MONeT's objectives

HEAD = (
    'Each entrant answers each instance at each limit, in a warm process on one core, '
    'within {time_limit:g} s; seconds are CPU seconds. One checker judges all answers; '
    "on Checkmate's instances they also keep Checkmate's own constraints, and the time "
    "is its objective; so on MONeT's. The score is the best known value over the own "
    'one, 0 where nothing fits; best known is the smaller of the published one and the '
    'best of this page. It is proven where a bound reaches it, to 0.001 % or to less '
    "than a unit of a solver's objective: the published one, or "
    'ours for every schedule of the form that the family has, or for all plans of this '
    'package.'
)
FAMILY_HEAD = (
    'family',
    'limits',
    'by',
    'above the best known, at most',
    'at or below published',
    'proven optimal',
    'above a bound, at most',
    'longest s',
)
LOST_HEAD = ('instance', 'limit', 'best known', 'by', 'ours', 'above it', 'a bound')
FAMILIES = (
    'What the default planner and the default layout find, what is lost first; the '
    'best known counts, whoever has found it, and what an optimum is by construction.'
)


@dataclasses.dataclass(frozen=True)
class TitledTable:
    """A table with a title.

    Attributes:
        title (str): Above it.
        header (tuple of str): Names of its columns.
        rows (list of tuple of str): Its cells.
        text (str): A sentence before it.
    """

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    text: str = ''


def scored(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows with the best known of their instance, and their score."""
    rows = list(rows)
    best: dict[Any, float] = {}
    for row in rows:
        values = [row['best_known'], row['value'] if row['fits'] else None]
        found = [v for v in (*values, best.get(_case(row))) if v is not None]
        if found:
            best[_case(row)] = min(found)
    return [
        {
            **row,
            'best': best.get(_case(row)),
            'score': best[_case(row)] / row['value'] if row['fits'] else 0.0,
        }
        for row in rows
        if _case(row) in best  # what nobody can do says nothing
    ]


def _case(row: Row) -> tuple[str, str]:
    return row['instance'], row['limit']


def tables(body: Mapping[str, Any]) -> list[TitledTable]:
    """All tables of a contest's results: the families with what is lost first."""
    rows = scored(body['rows'])
    by_family: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_family.setdefault(row['instance'].partition('/')[0], []).append(row)
    made = _summary(by_family)
    for task, title in (('plan', 'Plans'), ('layout', 'Layouts')):
        chosen = [row for row in rows if row['task'] == task]
        if chosen:
            made.append(_standings(f'{title}: the entrants', chosen))
            for family, own in by_family.items():
                if any(row['task'] == task for row in own):
                    made.append(_family(f'{title}: {family}', own, task))
    return made


def cases(rows: Sequence[Row]) -> list[Row]:
    """Answers of the defaults in scored rows of one family.

    Returns:
        list of dict: Rows with the ``nearest`` of both bounds, what they have
        ``lost`` to the best known and left ``open`` to a bound, as shares that are
        infinite where nothing is found, and whether they are ``proven`` optimal.
    """
    found: list[Row] = []
    for row in rows:
        if row['entrant'] != DEFAULTS.get(row['task']):
            continue
        own = _own_bound([r for r in rows if _case(r) == _case(row)], rows)
        bound = max((b for b in (own, row['bound_known']) if b), default=None)
        lost = 1 / row['score'] - 1 if row['fits'] else math.inf
        left = row['value'] / bound - 1 if row['fits'] and bound else math.inf
        proof = '' if lost > LEVEL else _proof(row, own, row['task'])
        more = {'nearest': bound, 'lost': lost, 'open': max(left, 0.0)}
        found.append({**row, **more, 'proven': proof.startswith('proven')})
    return found


def _own_bound(rows: Sequence[Row], family: Sequence[Row]) -> float | None:
    """Ours: of every schedule where a family has such bounds, else of our plans."""
    any_schedule = any(map(_bounds, family))
    proofs = [row for row in rows if _bounds(row) or not any_schedule]
    return max((row['bound'] for row in proofs if row['bound']), default=None)


def _summary(by_family: Mapping[str, Sequence[Row]]) -> list[TitledTable]:
    """Families, and the answers of the defaults that are no best known."""
    found = {family: cases(rows) for family, rows in by_family.items()}
    worst = {
        name: max(case['lost'] for case in own) for name, own in found.items() if own
    }
    lines: list[tuple[str, ...]] = []
    for name in sorted(worst, key=lambda name: -worst[name]):
        own = found[name]
        known = [case for case in own if case['known_by']]
        lines.append(
            (
                name,
                str(len(own)),
                own[0]['entrant'],
                _more(worst[name]),
                f'{sum(_ratio(c) <= 1 + LEVEL for c in known)} of {len(known)}',
                f'{sum(case["proven"] for case in own)} of {len(own)}',
                _more(max(case['open'] for case in own)),
                max((_spent(case) for case in own), key=float),
            )
        )
    made = [TitledTable('Families', FAMILY_HEAD, lines, FAMILIES)] if lines else []
    lost = [case for own in found.values() for case in own if case['lost'] > LEVEL]
    lost.sort(key=lambda case: -case['lost'])
    if lost:
        made.append(
            TitledTable('What is lost', LOST_HEAD, [_lost(case) for case in lost])
        )
    return made


def _lost(case: Row) -> tuple[str, ...]:
    show = '{:,.0f}'.format if case['task'] == 'layout' else _seconds
    by = case['known_by'] if case['best_known'] == case['best'] else 'another entrant'
    ours = show(case['value']) if case['fits'] else 'none'
    cells = case['instance'], case['limit'], show(case['best']), by, ours
    return *cells, _more(case['lost']), _shown(case['nearest'], show)


def _more(share: float) -> str:
    return 'not found' if share == math.inf else f'{share:.2%}'


def _standings(title: str, rows: Sequence[Row]) -> TitledTable:
    entrants = list(dict.fromkeys(row['entrant'] for row in rows))
    trivial: dict[Any, float] = {}
    for row in rows:
        if row['trivial']:
            trivial[_case(row)] = max(trivial.get(_case(row), 0.0), row['score'])
    lines = []
    for entrant in entrants:
        own = [row for row in rows if row['entrant'] == entrant]
        published = [r for r in own if r['known_by']]
        below = [r for r in published if _ratio(r) < 1 - LEVEL]
        level = [r for r in published if _ratio(r) <= 1 + LEVEL]
        spent = [r['cpu_seconds'] or r['wall_seconds'] or 0.0 for r in own]
        score = sum(r['score'] for r in own) / len(own)
        behind = sum(r['score'] < trivial.get(_case(r), 0.0) - LEVEL for r in own)
        lines.append(
            (
                score,
                (
                    entrant,
                    f'{score:.4f}',
                    f'{sum(r["fits"] for r in own)} of {len(own)}',
                    f'{len(level)} of {len(published)}',
                    str(len(below)),
                    str(behind),
                    f'{max(spent):.1f}',
                    f'{sum(spent):.1f}',
                ),
            )
        )
    lines.sort(key=lambda line: -line[0])
    header = (
        'entrant',
        'score',
        'fits',
        'at or below published',
        'below',
        'behind a trivial answer',
        'longest s',
        'all s',
    )
    return TitledTable(title, header, [cells for _, cells in lines])


def _ratio(row: Row) -> float:
    """Own value over the published one, which is infinite where nobody found any."""
    if not row['fits']:
        return float('inf')
    return row['value'] / row['best_known'] if row['best_known'] is not None else 0.0


def _family(title: str, rows: Sequence[Row], task: str) -> TitledTable:
    show = '{:,.0f}'.format if task == 'layout' else _seconds
    entrants = list(
        dict.fromkeys(r['entrant'] for r in rows if not r['trivial'] and not _bounds(r))
    )
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault(_case(row), []).append(row)
    any_schedule = any(map(_bounds, rows))
    whose = 'every schedule' if any_schedule else 'our plans'
    header = (
        'instance',
        'limit',
        'published',
        'its bound',
        'its s',
        'by',
        *(part for e in entrants for part in (e, 's')),
        'best trivial',
        'best known',
        'found by',
        'our bound' if task == 'layout' else f'our bound, for {whose}',
        *(('its s',) if any_schedule else ()),
        'best known is',
    )
    lines = []
    for (instance, limit), own in cases.items():
        by = {row['entrant']: row for row in own}
        first = own[0]
        trivial = [r for r in own if r['trivial'] and r['fits']]
        least = min(trivial, key=lambda r: r['value'], default=None)
        bound = _own_bound(own, rows)
        cells = [
            instance.partition('/')[2],
            limit,
            _published(first, show),
            _shown(first['bound_known'], show),
            _shown(first['known_seconds'], '{:,.0f}'.format),
            first['known_by'] or NONE,
        ]
        for entrant in entrants:
            if entrant in by:
                cells += [_value(by[entrant], show), _spent(by[entrant])]
            else:  # results of several runs
                cells += [NONE, NONE]
        cells.append(
            NONE if least is None else f'{least["entrant"]}: {show(least["value"])}'
        )
        cells += [_shown(first['best'], show), _finders(own), _shown(bound, show)]
        if any_schedule:
            cells.append(next((_spent(r) for r in own if _bounds(r)), NONE))
        cells.append(_proof(first, bound, task))
        lines.append(tuple(cells))
    return TitledTable(title, header, lines)


def _bounds(row: Row) -> bool:
    """Whether it is a bound, and no answer."""
    return bool(row['task'] == 'bound')


def _finders(rows: Sequence[Row]) -> str:
    """Who has found the best known: the published one, or entrants, or all."""
    best = rows[0]['best']
    found = ['published'] if rows[0]['best_known'] == best else []
    found += [
        row['entrant']
        for row in rows
        if row['fits'] and row['value'] <= best * (1 + LEVEL)
    ]
    return ', '.join(dict.fromkeys(found)) or NONE


def _proof(row: Row, ours: float | None, task: str) -> str:
    """Whether the best known is proven to be that, and by whom; else how far it is.

    Published solvers count in whole units, so what is less than one below is proven.
    """
    step = UNIT if task == 'plan' and row['known_by'] else 0.0
    found = []
    for name, bound in (('ours', ours), ('published', row['bound_known'])):
        if bound and row['best'] - bound < max(step * (1 - LEVEL), PROVEN * bound):
            found.append(name)
    if found:
        return f'proven: {", ".join(found)}'
    bound = max((b for b in (ours, row['bound_known']) if b), default=None)
    return NONE if bound is None else f'{row["best"] / bound - 1:.2%} above a bound'


def _value(row: Row, show: Any) -> str:
    if not row['fits']:
        return 'none'
    text = show(row['value'])
    if row['best_known'] is None:
        return str(text)
    return f'{text} ({row["value"] / row["best_known"] - 1:+.2%})'


def _spent(row: Row) -> str:
    seconds = row['cpu_seconds'] or row['wall_seconds']
    return NONE if seconds is None else f'{seconds:.1f}'


def _published(row: Row, show: Any) -> str:
    if row['best_known'] is None:
        return 'none found' if row['known_by'] else NONE
    return str(show(row['best_known']))


def _shown(value: float | None, show: Any) -> str:
    return NONE if value is None else str(show(value))


def _seconds(value: float) -> str:
    return f'{value:.5f}' if value < 10 else format_seconds(value)


# -- forms --------------------------------------------------------------------
def as_markdown(body: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    parts = ['# The arena', _head(body)]
    for table in tables(body):
        lines = [table.header, ('---',) * len(table.header), *table.rows]
        parts += [f'## {table.title}', *filter(None, [table.text])]
        parts.append(
            '\n'.join('| ' + ' | '.join(map(_cell, row)) + ' |' for row in lines)
        )
    parts.append(_foot(body))
    return '\n\n'.join(parts) + '\n'


def _cell(text: str) -> str:
    return text.replace('|', '\\|')


def as_html(body: Mapping[str, Any]) -> str:
    """The page as one HTML file, which loads nothing."""
    parts = [f'<h1>The arena</h1><p>{html.escape(_head(body))}</p>']
    for table in tables(body):
        header = ''.join(f'<th>{html.escape(name)}</th>' for name in table.header)
        rows = ''.join(
            '<tr>' + ''.join(f'<td>{html.escape(cell)}</td>' for cell in row) + '</tr>'
            for row in table.rows
        )
        parts.append(
            f'<h2>{html.escape(table.title)}</h2><p>{html.escape(table.text)}</p>'
            f'<table><thead><tr>{header}</tr></thead>'
            f'<tbody>{rows}</tbody></table>'
        )
    parts.append(f'<p>{html.escape(_foot(body))}</p>')
    style = (
        'body{font:15px sans-serif;margin:2em}table{border-collapse:collapse}'
        'th,td{padding:.2em .6em;border-bottom:1px solid #ccc;text-align:right}'
        'th:first-child,td:first-child{text-align:left}'
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<title>The arena</title><style>{style}</style></head><body>'
        + '\n'.join(parts)
        + '</body></html>\n'
    )


def _head(body: Mapping[str, Any]) -> str:
    text = HEAD.format(time_limit=body['time_limit'])
    if body.get('held_checksum'):
        text += f' Instances held back have SHA-256 {body["held_checksum"]}.'
    return text


def _foot(body: Mapping[str, Any]) -> str:
    about = body['environment']
    told = ('package', 'commit', 'processor', 'cores', 'python', 'date')
    known = ', '.join(f'{name} {about[name]}' for name in told if about.get(name))
    return f'Made with: {body["command"]}. {known}.'
