"""Plans as versioned JSON."""

from __future__ import annotations

import dataclasses
import json

from chainer_hybridmem import files
from chainer_hybridmem.planning.records.plan import MapPlan, Part, Plan, Replay, Source
from chainer_hybridmem.planning.records.rules import check_rules, pairs_of

FORMAT = 'chainer_hybridmem/plan'
VERSION = 1
_ROWS = ('maps', 'replays', 'parts', 'sources')
_FIGURES = (
    'memory_limit_bytes',
    'predicted_seconds',
    'predicted_peak_bytes',
    'in_core_seconds',
    'lower_bound_seconds',
    'planning_seconds',
    'simulations',
)


def serialise_plan(plan: Plan) -> str:
    """The JSON text of a plan."""
    body = {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if field.name not in _ROWS
    }
    for name in _ROWS:
        body[name] = [files.row(item) for item in getattr(plan, name)]
    return json.dumps({'format': FORMAT, 'version': VERSION, **body})


def parse_plan(text: str) -> Plan:
    """Reads what :func:`serialise_plan` has written.

    Raises:
        FormatError: If the text is no such file, or a figure is out of range.
    """
    body = files.parse(text, FORMAT, VERSION)
    with files.reading('plan'):
        host_limit = body['host_limit_bytes']
        plan = Plan(
            planner=str(body['planner']),
            options=dict(body['options']),
            profile_fingerprint=str(body['profile_fingerprint']),
            memory_limit_bytes=int(body['memory_limit_bytes']),
            maps=tuple(files.unrow(MapPlan, row) for row in body['maps']),
            replays=tuple(files.unrow(Replay, row) for row in body['replays']),
            predicted_seconds=float(body['predicted_seconds']),
            predicted_peak_bytes=int(body['predicted_peak_bytes']),
            in_core_seconds=float(body['in_core_seconds']),
            lower_bound_seconds=float(body['lower_bound_seconds']),
            planning_seconds=float(body['planning_seconds']),
            simulations=int(body['simulations']),
            host_limit_bytes=None if host_limit is None else int(host_limit),
            parts=tuple(files.unrow(Part, row) for row in body['parts']),
            rules=pairs_of(check_rules(body['rules'])),
            sources=tuple(files.unrow(Source, row) for row in body['sources']),
        )
    limited = () if plan.host_limit_bytes is None else ('host_limit_bytes',)
    for name in (*_FIGURES, *limited):
        if not 0 <= getattr(plan, name) < 2**62:
            raise files.broken('plan', f'{name} is {getattr(plan, name)}')
    return plan
