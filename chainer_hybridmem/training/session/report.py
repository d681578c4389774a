"""The report of a run, as text and as a page: what was promised, what happened."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import chainer

from chainer_hybridmem.planning.records.measured_timeline import Measured
from chainer_hybridmem.planning.records.plan import Plan
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
from chainer_hybridmem.reporting.page.figures import plan_figures
from chainer_hybridmem.reporting.rows import (
    ACTIONS,
    ALL_REDUCE,
    IN_PARTS,
    SOURCES,
    in_core_row,
    rule_rows,
)
from chainer_hybridmem.reporting.tables import (
    Column,
    Row,
    figures_table,
    named_values,
    told,
)
from chainer_hybridmem.training.session.iterations.iteration_history import (
    StepTimes,
    mean_times,
)
from chainer_hybridmem.units import format_bound, format_count

if TYPE_CHECKING:
    from chainer_hybridmem.training.execution.verifier import Verdict

DELAYED = 1.05  # times as long with other programs as without: worth a row
MOST_KINDS = 16  # of iterations that a report shows: the most frequent ones
NOT_ENTERED = 'not entered: use it in a `with` statement'
STALE = ', which are stale: iterations are faster (retime() times again)'
MISSING = {'bytes': 'unknown', 'seconds': 'not yet', 'difference': 'not yet'}
FITS = (
    Row('peak, measured', '{peak_bytes:bytes}'),
    Row('plan', 'none: everything fits below the limit, and nothing is planned'),
)
LIMITED = (
    Row(
        'peak, predicted / measured',
        '{predicted_peak_bytes:bytes} / {guided_peak_bytes:bytes}',
    ),
)
TIMES = (
    Row(
        's / iteration, predicted / measured',
        '{predicted_seconds:seconds} / {measured_seconds:seconds}{error}',
    ),
    Row('s / iteration in-core', '{in_core_seconds:seconds}'),
    Row(
        'overhead, predicted / measured',
        '{predicted_overhead:difference}{older} / {measured_overhead:difference}',
    ),
    Row('s / iteration with other programs', '{seconds:seconds}', 'is_delayed'),
)
OF_THE_PLAN = (
    Row('plan', 'of iterations of {operations:operation}', 'is_one_of_several'),
    *ACTIONS,
    SOURCES,
    Row('lower bound of any plan', '{bound} for the recorded times{stale}'),
    Row('stalled, measured', '{stall_seconds:seconds}', 'measured_seconds'),
    Row('copied / iteration', '{swapped_bytes:bytes}', 'measured_seconds'),
    Row('recomputed / iteration', '{recomputed_bytes:bytes}', 'measured_seconds'),
    ALL_REDUCE,
    Row('planning', '{by}, {planning_seconds:seconds}, {simulations:simulation}'),
)
OF_ALL_ITERATIONS = (
    Row('plans of earlier runs', '{cached}', 'cached'),
    Row('footprint, measured', '{footprint_bytes:bytes}'),
    Row('arena', '{no_arena}', 'lacks_arena'),
    Row('arena + beside it', '{arena_bytes:bytes} + {side_bytes:bytes}', 'arena_bytes'),
    Row(
        'allocations placed / not / iteration',
        '{placed} / {unplaced}',
        'arena_bytes',
    ),
    Row('host memory for swapped maps', '{host_bytes:bytes}', 'host_is_free'),
    Row('host limit', '{host_limit_bytes:bytes}', 'host_limit_bytes'),
    Row(
        'host memory for swapped maps, predicted / measured',
        '{predicted_host_bytes:bytes} / {host_bytes:bytes}',
        'host_limit_bytes',
    ),
    Row(
        'disk for swapped maps, predicted / measured',
        '{predicted_disk_bytes:bytes} / {disk_bytes:bytes}',
        'uses_disk',
    ),
    # what a plan alone does not explain
    Row(IN_PARTS, '{split:function} / {split_inexact}', 'split'),
    Row('never recomputed (see recomputable)', '{untrusted}', 'distrusts'),
    Row('held beside what the plan knows', '{foreign_bytes:bytes}', 'foreign_bytes'),
    Row('maps of older graphs, away at most', '{older_bytes:bytes}', 'older_bytes'),
    Row('evicted / iteration, not planned', '{evictions}', 'evictions'),
    Row('kinds of iterations no plan fits', '{unplanned}', 'unplanned'),
    Row('iterations that differed', '{deviations}', 'deviations'),
)
VERIFIED = Row(
    'verified',
    '{iterations:iteration}, {maps:map}, {compared_bytes:bytes}: every bit as forward '
    'made it',
)


def session_report(
    statistics: dict[str, Any],
    plan: Plan | None,
    profile: Profile | None,
    verdict: Verdict | None = None,
    costs: Iterable[RuleCost] = (),
    entered: bool = True,
) -> str:
    """Formats a session's statistics as a table.

    Args:
        statistics: From ``Session.statistics()``.
        plan: The plan followed; None if there is none yet.
        profile: The profile it was made from.
        verdict: Of the iterations that were verified.
        costs: Of the plan's rules.
        entered: Whether the session has begun; else there is nothing to tell.

    Returns:
        str: Several lines, the last without a line break.
    """
    s = statistics
    title = f'chainer_hybridmem, planner {s["planner"]}'
    if not entered:
        return named_values(title, [('state', NOT_ENTERED)])
    rows = [
        ('state', f'{s["state"]} after {format_count(s["iterations"], "iteration")}'),
        *told([Row('memory limit', '{limit_bytes:bytes}')], s),
    ]
    if s['fits']:
        rows += told(FITS, s, MISSING)
    else:
        peaks = s['in_core_peak_bytes'], s['in_core_peak_in_parts_bytes']
        rows += [in_core_row(*peaks), *told(LIMITED, s, MISSING)]
    if plan is not None and profile is not None:
        rows += told(TIMES, _time_figures(s), MISSING)
        rows += told(OF_THE_PLAN, _plan_figures(s, plan, profile), MISSING)
    rows += rule_rows(costs)
    host_limit = s['host_limit_bytes']
    disk = s['disk_bytes'] or s['predicted_disk_bytes'] or host_limit == 0
    figures = {
        **s,
        'lacks_arena': s['no_arena'] and not s['fits'],
        'host_is_free': host_limit is None,
        'uses_disk': disk and host_limit is not None,
        'distrusts': s['untrusted'] and s['recompute'] is not None,
        'untrusted': ', '.join(s['untrusted']),
    }
    rows += told(OF_ALL_ITERATIONS, figures, MISSING)
    if verdict is not None:
        rows += told([VERIFIED], dataclasses.asdict(verdict))
    return '\n'.join([named_values(title, rows), *_kinds(s['kinds'])])


def _time_figures(s: dict[str, Any]) -> dict[str, Any]:
    """Of an iteration that follows a plan; the mean over kinds if there are several."""
    alone = StepTimes(s['iteration_seconds'], s['own_seconds'], s['predicted_seconds'])
    times, in_core = mean_times(s['kinds']) or (alone, s['in_core_seconds'])
    measured = times.own_seconds if s['guided_iterations'] else None
    predicted = times.predicted_seconds or 0.0
    delayed = measured is not None and times.seconds > DELAYED * measured
    return {
        **times._asdict(),
        'in_core_seconds': in_core,
        'measured_seconds': measured,
        'error': f' (prediction {predicted / measured - 1:+.1%})' if measured else '',
        'predicted_overhead': predicted / in_core - 1,
        'older': ' without older graphs' if s['older_bytes'] else '',
        'measured_overhead': measured / in_core - 1 if measured else None,
        'is_delayed': delayed,
    }


def _plan_figures(s: dict[str, Any], plan: Plan, profile: Profile) -> dict[str, Any]:
    """The statistics with what only the plan and its profile tell."""
    measured = s['own_seconds'] if s['guided_iterations'] else None
    bound = s['lower_bound_seconds']
    stale = measured is not None and measured < bound
    return {
        **plan_figures(profile, plan),
        **s,
        'all_reduce_seconds': profile.all_reduce_seconds,
        'exchanged_bytes': profile.exchanged_bytes,
        'by': plan.planner,
        'measured_seconds': measured,
        'operations': profile.first_update,
        'is_one_of_several': mean_times(s['kinds']) is not None,
        'bound': format_bound(bound, s['gap']),
        'stale': STALE if stale else '',
    }


KINDS = (
    Column('iterations', 'state'),
    Column('operations', 'operations'),
    Column('number', 'iterations'),
    Column('s, predicted', 'predicted_seconds', 'seconds'),
    Column('s, median', 'seconds', 'seconds'),
    Column('peak', 'peak_bytes', 'bytes'),
)


def _kinds(kinds: list[dict[str, Any]]) -> list[str]:
    """A table of all kinds of iterations, where there is more than one."""
    if len(kinds) < 2:
        return []
    shown = sorted(kinds, key=lambda kind: -kind['iterations'])[:MOST_KINDS]
    rows = [kind for kind in kinds if kind in shown]
    others = len(kinds) - len(shown)
    lines = ['', figures_table(KINDS, rows)]
    return [*lines, *([f'and {others} other kinds'] if others else [])]


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
            'measured_seconds': statistics['own_seconds'],
            'measured_peak_bytes': statistics['guided_peak_bytes'],
            'measured_stall_seconds': statistics['stall_seconds'],
            'measured_parts': statistics['split'],
            'whole_peak_bytes': statistics['peak_bytes'],
        }
    known = {name: value for name, value in figures.items() if value is not None}
    return Run(plan.planner, plan, timeline if followed else None, known, problem)
