"""A session's report as a page for a browser, or as a cell of a notebook."""

from __future__ import annotations

import os
from typing import Any

from chainer_hybridmem.records import library
from chainer_hybridmem.records.measured_timeline import Measured
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.reporting.page import (
    Run,
    make_data,
    make_frame,
    make_page,
    make_text,
    make_text_page,
)
from chainer_hybridmem.simulation import Problem

SWEEP_SECONDS = 5.0
CELL_SWEEP_SECONDS = 1.0
TITLE = 'chainer_hybridmem session'


def write_page(
    path: str | os.PathLike[str],
    text: str,
    statistics: dict[str, Any],
    plan: Plan | None,
    problem: Problem | None,
    timeline: Measured | None,
) -> None:
    """Writes the page; without a plan it has the text only.

    Args:
        path: File to write.
        text: The report as a table.
        statistics: From :meth:`.Session.statistics`.
        plan: The plan followed; None if there is none.
        problem: What the plan was made for.
        timeline: What was traced last.

    Raises:
        FormatError: If the file cannot be written.
    """
    if plan is None or problem is None:
        page = make_text_page(text)
    else:
        run = _run(statistics, plan, problem, timeline)
        data = make_data(
            problem.profile, [run], TITLE, sweep_seconds=SWEEP_SECONDS, report=text
        )
        page = make_page(data)
    library.write_text(os.fspath(path), page)


def make_cell(
    text: str,
    statistics: dict[str, Any],
    plan: Plan | None,
    problem: Problem | None,
    timeline: Measured | None,
) -> str:
    """The page as a cell of a notebook; arguments as of :func:`write_page`."""
    if plan is None or problem is None:
        return make_text(text)
    run = _run(statistics, plan, problem, timeline)
    data = make_data(
        problem.profile, [run], TITLE, sweep_seconds=CELL_SWEEP_SECONDS, report=text
    )
    return make_frame(make_page(data))


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
    figures = {'planning_seconds': statistics['planning_seconds']}
    if statistics['guided_iterations'] and statistics['iteration_seconds']:
        figures |= {
            'measured_seconds': statistics['iteration_seconds'],
            'measured_peak_bytes': statistics['guided_peak_bytes'],
            'measured_stall_seconds': statistics['stall_seconds'],
            'measured_parts': statistics['split'],
        }
    known = {name: value for name, value in figures.items() if value is not None}
    return Run(plan.planner, plan, timeline if followed else None, known, problem)
