"""The report of a run, as text and as a page: what was promised, what happened."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import chainer

from chainer_hybridmem.planning.records.measured_timeline import Measured
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.rules import RuleCost
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.reporting.page import (
    Run,
    make_data,
    make_frame,
    make_page,
    make_text,
    make_text_page,
)
from chainer_hybridmem.reporting.rows import (
    all_reduce_rows,
    in_core_row,
    rule_rows,
    source_rows,
)
from chainer_hybridmem.units import (
    format_bound,
    format_bytes,
    format_count,
    format_seconds,
)

if TYPE_CHECKING:
    from chainer_hybridmem.training.execution.verifier import Verdict

MOST_KINDS = 16  # of iterations that a report shows: the most frequent ones


def session_report(
    statistics: dict[str, Any],
    plan: Plan | None,
    profile: Profile | None,
    verdict: Verdict | None = None,
    costs: Iterable[RuleCost] = (),
) -> str:
    """Formats a session's statistics as a table.

    Args:
        statistics: From ``Session.statistics()``.
        plan: The plan followed; None if there is none yet.
        profile: The profile it was made from.
        verdict: Of the iterations that were verified.
        costs: Of the plan's rules.

    Returns:
        str: Several lines, the last without a line break.
    """
    s = statistics
    rows = [
        ('state', f'{s["state"]} after {format_count(s["iterations"], "iteration")}'),
        ('memory limit', _bytes(s['limit_bytes'])),
    ]
    rows += _peaks(s)
    if plan is not None and profile is not None:
        rows += [(action.value, _maps(plan, profile, action)) for action in Action]
        rows += source_rows(len(plan.sources), plan.source_bytes(profile))
        rows += _times(s)
        rows += all_reduce_rows(profile.all_reduce_seconds, profile.exchanged_bytes)
        rows.append(
            (
                'planning',
                f'{plan.planner}, {format_seconds(s["planning_seconds"])}, '
                f'{format_count(plan.simulations, "simulation")}',
            )
        )
    rows += rule_rows(costs)
    if s['cached']:
        rows.append(('plans of earlier runs', str(s['cached'])))
    rows += [*_memory(s), *_host(s), *_exceptions(s)]
    if verdict is not None:
        rows.append(
            (
                'verified',
                f'{format_count(verdict.iterations, "iteration")}, '
                f'{format_count(verdict.maps, "map")}, '
                f'{format_bytes(verdict.compared_bytes)}: every bit as forward made it',
            )
        )
    width = max(len(name) for name, _ in rows)
    title = f'chainer_hybridmem, planner {s["planner"]}'
    lines = [title, '-' * len(title)]
    lines += [f'{name:<{width}}  {value}' for name, value in rows]
    return '\n'.join(lines + _kinds(s['kinds']))


def _kinds(kinds: list[dict[str, Any]]) -> list[str]:
    """A table of all kinds of iterations, where there is more than one."""
    if len(kinds) < 2:
        return []
    shown = sorted(kinds, key=lambda kind: -kind['iterations'])[:MOST_KINDS]
    rows = [('iterations', 'operations', 'number', 's, predicted', 's, median', 'peak')]
    rows += [
        (
            kind['state'],
            '' if kind['operations'] is None else str(kind['operations']),
            str(kind['iterations']),
            _seconds(kind['predicted_seconds'], ''),
            _seconds(kind['seconds']),
            _bytes(kind['peak_bytes']),
        )
        for kind in kinds
        if kind in shown
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        '  '.join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    others = len(kinds) - len(shown)
    return ['', *lines, *([f'and {others} other kinds'] if others else [])]


def _exceptions(s: dict[str, Any]) -> list[tuple[str, str]]:
    """What a plan alone does not explain."""
    rows = []
    if s['split']:
        rows.append(
            (
                'run in parts, of these not exact',
                f'{format_count(s["split"], "function")} / {s["split_inexact"]}',
            )
        )
    if s['untrusted'] and s['recompute'] is not None:
        rows.append(('never recomputed (see recomputable)', ', '.join(s['untrusted'])))
    if s['foreign_bytes']:
        rows.append(('held beside what the plan knows', _bytes(s['foreign_bytes'])))
    if s['older_bytes']:
        rows.append(('maps of older graphs, away at most', _bytes(s['older_bytes'])))
    if s['evictions']:
        rows.append(('evicted / iteration, not planned', str(s['evictions'])))
    if s['unplanned']:
        rows.append(('kinds of iterations no plan fits', str(s['unplanned'])))
    if s['deviations']:
        rows.append(('iterations that differed', str(s['deviations'])))
    return rows


def _peaks(s: dict[str, Any]) -> list[tuple[str, str]]:
    if s['fits']:
        return [
            ('peak, measured', _bytes(s['peak_bytes'])),
            ('plan', 'none: everything fits below the limit, and nothing is planned'),
        ]
    return [
        in_core_row(s['in_core_peak_bytes'], s['in_core_peak_in_parts_bytes']),
        (
            'peak, predicted / measured',
            f'{_bytes(s["predicted_peak_bytes"])} / {_bytes(s["guided_peak_bytes"])}',
        ),
    ]


def _host(s: dict[str, Any]) -> list[tuple[str, str]]:
    """What swapped maps take; what of it was predicted where it is limited."""
    limit, name = s['host_limit_bytes'], 'host memory for swapped maps'
    if limit is None:
        return [(name, _bytes(s['host_bytes']))]
    tiers = [(name, 'host')] if limit else []
    if s['disk_bytes'] or s['predicted_disk_bytes'] or not limit:
        tiers.append(('disk for swapped maps', 'disk'))
    rows = [
        (
            f'{label}, predicted / measured',
            f'{_bytes(s[f"predicted_{tier}_bytes"])} / {_bytes(s[f"{tier}_bytes"])}',
        )
        for label, tier in tiers
    ]
    return [('host limit', _bytes(limit)), *rows] if limit else rows


def _memory(s: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [('footprint, measured', _bytes(s['footprint_bytes']))]
    if s['no_arena'] is not None and not s['fits']:
        rows.append(('arena', s['no_arena']))
    if s['arena_bytes'] is not None:
        rows.append(
            (
                'arena + beside it',
                f'{_bytes(s["arena_bytes"])} + {_bytes(s["side_bytes"])}',
            )
        )
        rows.append(
            (
                'allocations placed / not / iteration',
                f'{s["placed"]} / {s["unplaced"]}',
            )
        )
    return rows


def _times(s: dict[str, Any]) -> list[tuple[str, str]]:
    measured = s['iteration_seconds'] if s['guided_iterations'] else None
    predicted, in_core = s['predicted_seconds'], s['in_core_seconds']
    error = ''
    if measured:
        error = f' (prediction {predicted / measured - 1:+.1%})'
    rows = [
        (
            's / iteration, predicted / measured',
            f'{_seconds(predicted)} / {_seconds(measured)}{error}',
        ),
        ('s / iteration in-core', _seconds(in_core)),
        (
            'overhead, predicted / measured',
            f'{predicted / in_core - 1:+.1%}'
            + (' without older graphs' if s['older_bytes'] else '')
            + ' / '
            + (f'{measured / in_core - 1:+.1%}' if measured else 'not yet'),
        ),
        (
            'lower bound of any plan',
            format_bound(s['lower_bound_seconds'], s['gap'])
            + _judge_times(measured, s['lower_bound_seconds']),
        ),
    ]
    if measured:
        rows += [
            ('stalled, measured', _seconds(s['stall_seconds'])),
            ('copied / iteration', _bytes(s['swapped_bytes'])),
            ('recomputed / iteration', _bytes(s['recomputed_bytes'])),
        ]
    return rows


def _judge_times(measured: float | None, bound_seconds: float) -> str:
    """What the bound holds for."""
    stale = measured is not None and measured < bound_seconds
    if not stale:
        return ' for the recorded times'
    return ' for the recorded times, which are stale: iterations are faster'


def _maps(plan: Plan, profile: Profile, action: Action) -> str:
    nbytes = plan.action_bytes(profile, action)
    return f'{plan.count(action)} feature maps, {format_bytes(nbytes)}'


def _bytes(value: float | None) -> str:
    return 'unknown' if value is None else format_bytes(value)


def _seconds(value: float | None, missing: str = 'not yet') -> str:
    return missing if value is None else format_seconds(value)


SWEEP_SECONDS = 5.0
CELL_SWEEP_SECONDS = 1.0


def title_of(model: chainer.Link) -> str:
    """What a page is about: the model, and when the page was made."""
    names = [type(model).__name__]
    predictor = getattr(model, 'predictor', None)
    if isinstance(predictor, chainer.Link):  # a classifier says nothing
        names.append(type(predictor).__name__)
    return f'{" of ".join(names)}, {time.strftime("%Y-%m-%d %H:%M")}'


def session_page(
    title: str,
    text: str,
    statistics: dict[str, Any],
    plan: Plan | None,
    problem: Problem | None,
    timeline: Measured | None,
    cell: bool,
) -> str:
    """The report as a page for a browser, or as a cell of a notebook.

    Without a plan it has the text only.

    Args:
        title: From :func:`title_of`.
        text: The report as a table.
        statistics: From :meth:`.Session.statistics`.
        plan: The plan followed; None if there is none.
        problem: What the plan was made for.
        timeline: What was traced last.
        cell: Whether it is for a notebook.
    """
    if plan is None or problem is None:
        return make_text(text) if cell else make_text_page(text)
    run = _run(statistics, plan, problem, timeline)
    seconds = CELL_SWEEP_SECONDS if cell else SWEEP_SECONDS
    data = make_data(problem.profile, [run], title, sweep_seconds=seconds, report=text)
    page = make_page(data)
    return make_frame(page) if cell else page


def _run(
    statistics: dict[str, Any],
    plan: Plan,
    problem: Problem,
    timeline: Measured | None,
) -> Run:
    """The plan with what was measured: medians count, where there are some."""
    followed = timeline is not None and (
        timeline.profile_fingerprint == plan.profile_fingerprint
        and timeline.planner == plan.planner
    )
    figures = {
        'planning_seconds': statistics['planning_seconds'],
        'memory_limit_bytes': statistics['limit_bytes'],
    }
    if plan.memory_limit_bytes != statistics['limit_bytes']:  # room for the arena
        figures['planned_limit_bytes'] = plan.memory_limit_bytes
    if statistics['guided_iterations'] and statistics['iteration_seconds']:
        figures |= {
            'measured_seconds': statistics['iteration_seconds'],
            'measured_peak_bytes': statistics['guided_peak_bytes'],
            'measured_stall_seconds': statistics['stall_seconds'],
            'measured_parts': statistics['split'],
            'whole_peak_bytes': statistics['peak_bytes'],
        }
    known = {name: value for name, value in figures.items() if value is not None}
    return Run(plan.planner, plan, timeline if followed else None, known, problem)
