"""A session's report as a page for a browser, or as a cell of a notebook."""

from __future__ import annotations

import os
import time
from typing import Any

import chainer

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


def title_of(model: chainer.Link) -> str:
    """What a page is about: the model, and when the page was made."""
    names = [type(model).__name__]
    predictor = getattr(model, 'predictor', None)
    if isinstance(predictor, chainer.Link):  # a classifier says nothing
        names.append(type(predictor).__name__)
    return f'{" of ".join(names)}, {time.strftime("%Y-%m-%d %H:%M")}'


def write_page(
    path: str | os.PathLike[str],
    title: str,
    text: str,
    statistics: dict[str, Any],
    plan: Plan | None,
    problem: Problem | None,
    timeline: Measured | None,
) -> None:
    """Writes the page; without a plan it has the text only.

    Args:
        path: File to write.
        title: From :func:`title_of`.
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
            problem.profile, [run], title, sweep_seconds=SWEEP_SECONDS, report=text
        )
        page = make_page(data)
    library.write_text(os.fspath(path), page)


def make_cell(
    title: str,
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
        problem.profile, [run], title, sweep_seconds=CELL_SWEEP_SECONDS, report=text
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
        }
    known = {name: value for name, value in figures.items() if value is not None}
    return Run(plan.planner, plan, timeline if followed else None, known, problem)
